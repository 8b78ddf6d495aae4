"""`slipstream bench`: figures of this machine, each with the machine they were measured on."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.cli.settings import Debug, with_config
from slipstream.config import Config

Json = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        help="Measure this machine: speed against a peer, what a step costs, what drafts bring.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    group.command()(with_config(speed))
    group.command()(with_config(steps))
    group.command()(with_config(ladder))
    app.add_typer(group, name="bench")


def steps(
    config: Config,
    contexts: Annotated[
        str, typer.Option(help="Tokens before the step, separated by commas.")
    ] = "1024,2048,4096,7936",
    rows: Annotated[
        str, typer.Option(help="Rows of a step, separated by commas.")
    ] = "1,2,4,8,16,32,64",
    count: Annotated[int, typer.Option(min=1, help="Steps per cell.")] = 12,
    file: Json = None,
    debug: Debug = False,
) -> None:
    """What a step costs by rows and context, beside the time its bytes take."""
    from slipstream.bench.steps import measure

    _show(measure(config, _numbers(contexts), _numbers(rows), count), file)


def speed(
    config: Config,
    prompt: Annotated[
        str, typer.Option(help="The prompt to continue.")
    ] = "Once upon a time, in a small village by the sea, there lived",
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to decode.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 5,
    peer: Annotated[bool, typer.Option(help="Run transformers beside it.")] = True,
    file: Json = None,
    debug: Debug = False,
) -> None:
    """Decode and prefill in float32 on the CPU beside transformers, and with right drafts."""
    from slipstream.bench.speed import measure

    _show(measure(config, prompt, new_tokens=new_tokens, rounds=rounds, peer=peer), file)


def ladder(
    config: Config,
    tasks: Annotated[
        str, typer.Option(help="Tasks to ask, separated by commas.")
    ] = "chat,code,reproduce,edit,quote,summarize",
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 5,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of an answer at most; default: each task's own."),
    ] = None,
    lengths: Annotated[
        bool,
        typer.Option(
            "--lengths", help="Also compare with fixed numbers of drafts, adaptive beside."
        ),
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Also draw the ladder as SVG into this file.")
    ] = None,
    file: Json = None,
    debug: Debug = False,
) -> None:
    """What each drafter adds, on tasks whose texts come along; all texts must be equal.

    The exit code is 1 if an answer differs from plain decoding.
    """
    from slipstream.bench import ladder as bench

    names = list(dict.fromkeys(name.strip() for name in tasks.split(",") if name.strip()))
    live = sys.stderr.isatty()
    found = bench.measure(
        config,
        names,
        rounds=rounds,
        max_tokens=max_tokens,
        lengths=lengths,
        progress=lambda line: print(line, file=sys.stderr, flush=True) if live else None,
    )
    _show(found, file)
    if picture:
        picture.write_text(bench.picture(found), encoding="utf-8")
    if not found.equal:
        raise typer.Exit(1)


def _numbers(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r}: give numbers separated by commas") from None
    if min(found) < 1:
        raise typer.BadParameter(f"{text!r}: give numbers above 0")
    return found


def _show(table: Any, file: Path | None) -> None:
    print(table)
    if file:
        file.write_text(json.dumps(dataclasses.asdict(table), indent=1) + "\n")
