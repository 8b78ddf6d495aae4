"""`slipstream serve`: a model behind OpenAI's API."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Literal

import typer

from slipstream.cli.settings import Debug, with_config
from slipstream.config import Config, ConfigError

GRACE = 10.0  # seconds


def register(app: typer.Typer) -> None:
    app.command()(with_config(serve))


def serve(
    config: Config,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is every network of this machine.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="What clients call the model; may be repeated. Default: from --model."),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="Ask clients for a key: a file of lines KEY or NAME KEY."),
    ] = None,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that answers may take to finish at the end.")
    ] = GRACE,
    log_level: Annotated[
        Literal["warning", "info", "debug"],
        typer.Option(help="info: one line per request, without any text of it."),
    ] = "warning",
    debug: Debug = False,
) -> None:
    """Serve a model through OpenAI's API.

    Ends on Ctrl-C or SIGTERM: answers under way may finish, a second signal ends them at once.
    """
    from slipstream.server import create_app, local
    from slipstream.server.gate import read_keys
    from slipstream.server.listen import bind, run, url
    from slipstream.server.text import CheckpointText

    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    keys = read_keys(api_key_file) if api_key_file else None
    names = served_model_name or [name_of(config.model)]

    listening = bind(host, port)
    try:
        made = local.load(config, announce=lambda plan: print(plan, flush=True))
    except BaseException:
        listening.close()
        raise
    try:
        if made.tokenizer is None:
            raise ConfigError(
                f"{config.model} has no tokenizer, and clients send text: add its tokenizer.json"
            )
        text = CheckpointText(made.tokenizer, made.template, made.serving.about().context)
        app = create_app(made.serving, text, names, keys=keys)

        def ready() -> None:
            address = url(listening)
            print(f"serving {', '.join(names)} at {address}", flush=True)
            if keys is None and host not in ("127.0.0.1", "localhost", "::1"):
                print("anyone who reaches this address can use it: see --api-key-file", flush=True)

        run(app, listening, grace, ready)
    finally:
        made.close()


def name_of(model: str) -> str:
    """What clients call a model, if nobody says: a path's last part, a name or hub id as it is."""
    path = Path(model).expanduser()
    if path.exists():
        path = path.resolve()
        return path.stem if path.suffix == ".gguf" else path.name
    return model
