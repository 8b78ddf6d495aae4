"""The commands, one module each. A module has ``register(app)`` and imports torch only inside it.

`COMMANDS` is the one list; the order is that of ``slipstream --help``.
"""

from __future__ import annotations

import importlib

import typer

COMMANDS = ("run", "chat", "serve", "bench", "plan", "doctor", "version")


def build() -> typer.Typer:
    """The whole command line."""
    app = typer.Typer(
        name="slipstream",
        help="Run hybrid Gated-DeltaNet language models fast on one card.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def root() -> None:
        """Run hybrid Gated-DeltaNet language models fast on one card."""

    for name in COMMANDS:
        importlib.import_module(f"slipstream.cli.{name}").register(app)
    return app
