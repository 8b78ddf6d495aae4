"""`slipstream plan`: what fits, by arithmetic, before anything is loaded."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from slipstream.cli.settings import Debug, with_config
from slipstream.config import Config


def register(app: typer.Typer) -> None:
    app.command()(with_config(plan))


def plan(
    config: Config,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    debug: Debug = False,
) -> None:
    """Print the memory plan of a checkpoint without loading its weights."""
    from slipstream.engine.memory import plan_for

    made = plan_for(config.model, config)
    print(json.dumps(dataclasses.asdict(made)) if as_json else made)
