"""`slipstream version`."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

import typer

from slipstream import __version__


def register(app: typer.Typer) -> None:
    app.command()(version)


def version() -> None:
    """Print the versions of slipstream, Python, torch and triton."""
    parts = [f"slipstream {__version__}", f"python {platform.python_version()}"]
    for name in ("torch", "triton"):
        try:
            parts.append(f"{name} {installed(name)}")
        except PackageNotFoundError:
            parts.append(f"{name} not installed")
    print(", ".join(parts))
