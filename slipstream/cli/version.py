"""`slipstream version`."""

from __future__ import annotations

import platform

import typer

from slipstream import __version__


def register(app: typer.Typer) -> None:
    app.command()(version)


def version() -> None:
    """Print the versions of slipstream, Python, torch and triton."""
    # Here, because it takes longer to import than all of --help.
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    parts = [f"slipstream {__version__}", f"python {platform.python_version()}"]
    for name in ("torch", "triton"):
        try:
            parts.append(f"{name} {installed(name)}")
        except PackageNotFoundError:
            parts.append(f"{name} not installed")
    print(", ".join(parts))
