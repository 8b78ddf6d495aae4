"""Command-line options made from the fields of Config, and TOML files read into one.

A field `limits.seqs` is the option ``--limits-seqs``; a switch named `enabled` goes by its
group's name (``--speculation`` / ``--no-speculation``).
"""

from __future__ import annotations

import functools
import inspect
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from slipstream.config import Config, ConfigError, override

PANEL = "Engine settings (also in a --config file)"

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@dataclass(frozen=True)
class Setting:
    """One leaf of the config tree."""

    path: str  # "limits.seqs"
    hint: Any  # int, float, bool, str or a Literal
    default: Any
    help: str
    name: str = ""  # of the option, where it is not the path

    @property
    def option(self) -> str:
        """The option's long name, without the dashes."""
        return self.name or self.path.removesuffix(".enabled").replace(".", "-").replace("_", "-")


def settings(node: Any = None, prefix: str = "") -> Iterator[Setting]:
    """All leaves of the config tree, in order."""
    node = Config() if node is None else node
    hints = get_type_hints(type(node))
    for entry in fields(node):
        value = getattr(node, entry.name)
        if is_dataclass(value):
            yield from settings(value, f"{prefix}{entry.name}.")
        else:
            yield Setting(
                f"{prefix}{entry.name}",
                hints[entry.name],
                value,
                entry.metadata.get("help", ""),
                entry.metadata.get("option", ""),
            )


def read_toml(path: Path) -> dict[str, Any]:
    """Dotted settings of a TOML file, ``{"limits.seqs": 4}``.

    Raises:
        ConfigError: the file cannot be read or is not TOML.
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from error
    return dict(_flat(tree, ""))


def _flat(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def with_config(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the command's ``config: Config`` parameter by one option per field of Config.

    A ``--config FILE`` comes along; options win over the file, the file over the defaults.
    """
    leaves = list(settings())
    signature = inspect.signature(command, eval_str=True)
    parameters = [p for p in signature.parameters.values() if p.name != "config"]
    parameters.append(_parameter("config_file", Path | None, "--config", _FILE_HELP))
    parameters.extend(_of(leaf) for leaf in leaves)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        file = given.pop("config_file")
        values = {leaf.path: given.pop(_name(leaf)) for leaf in leaves}
        config = override(Config(), read_toml(file)) if file else Config()
        config = override(config, {k: v for k, v in values.items() if v is not None})
        command(config=config, **given)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    return run


_FILE_HELP = "A TOML file of these settings; options given beside it win."


def _name(leaf: Setting) -> str:
    return leaf.path.replace(".", "_")


def _of(leaf: Setting) -> inspect.Parameter:
    flags = f"--{leaf.option}/--no-{leaf.option}" if leaf.hint is bool else f"--{leaf.option}"
    default = ("off", "on")[leaf.default] if leaf.hint is bool else leaf.default
    text = f"{leaf.help} [default: {default}]"
    return _parameter(_name(leaf), leaf.hint | None, flags, text)


def _parameter(name: str, hint: Any, flags: str, text: str) -> inspect.Parameter:
    option = typer.Option(flags, help=text, rich_help_panel=PANEL, show_default=False)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[hint, option],
    )
