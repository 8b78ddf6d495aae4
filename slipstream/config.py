"""The one config tree. The command line, TOML files and the reference docs come from its fields.

Each field's ``help`` metadata is its documentation everywhere. Only `engine.build` reads a whole
Config; every other constructor takes just the values it uses.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, get_type_hints


class ConfigError(ValueError):
    """A setting that cannot work; the text says what to change."""


def _setting(default: Any, help: str, option: str = "") -> Any:
    """A field; ``option`` is its name on the command line where the path would be too long."""
    return field(default=default, metadata={"help": help, "option": option})


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """What everything is sized from, once, at start."""

    seqs: int = _setting(8, "sequences computed at the same time")
    tokens: int = _setting(512, "token rows of one step, over all sequences")
    span: int = _setting(16, "rows of one short span: the last token and its drafts")
    context: int = _setting(0, "positions of one sequence; 0: the model's own limit, at most 32768")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Memory for keys, values and recurrent state, and how it is reused."""

    memory: float = _setting(
        0.0,
        "GiB for pages of keys and values; 0: enough for two full contexts or all sequences, whichever is less",
    )
    prefix: bool = _setting(True, "reuse what earlier requests computed for the same beginning")
    reuse: Literal["exact", "text"] = _setting(
        "text",
        "which computed text may be reused: 'exact' only what a fresh computation would give bit for bit, "
        "'text' also an earlier turn's generated text (equal up to rounding)",
    )
    snapshot_every: int = _setting(
        1024, "prompt positions between snapshots of recurrent state; a multiple of 64"
    )
    snapshots: float = _setting(1.0, "GiB of host memory for snapshots of recurrent state")


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Drafting. It changes speed, never text."""

    enabled: bool = _setting(True, "draft tokens and verify them together")
    lookup: bool = _setting(True, "draft by copying from the request's own tokens")
    shared: int = _setting(
        131072, "tokens of other requests of the same key that lookup may copy from; 0: none"
    )
    mtp: bool = _setting(True, "draft with the checkpoint's own MTP head, if it has one")
    dflash: str = _setting(
        "auto",
        "a DFlash drafter: a directory or a hub id; auto: the folder draft beside the weights, if there is one; "
        "empty: none",
    )
    require_drafter: bool = _setting(
        False,
        "do not start if a drafter cannot be used, rather than run without it",
        option="require-drafter",
    )
    verify: Literal["block", "draft"] = _setting(
        "block",
        "how drafts of sampled requests without a seed are judged: whole prefixes, or draft by draft; both are "
        "exact, and the first keeps at least as many",
    )
    length: int = _setting(0, "drafts to verify in each step; 0: as many as pay")
    row_cost: float = _setting(
        0.0, "cost of one more row in a step, as a share of a one-row step; 0: measured at start"
    )


@dataclass(frozen=True, slots=True)
class Config:
    """Everything a person can set."""

    model: str = _setting(
        "demo", "a checkpoint directory, a .gguf file, a hub id, or a built-in model: demo, smollm2"
    )
    device: str = _setting("auto", "cpu, cuda, or auto")
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"] = _setting(
        "auto", "number format of the computation; auto: float32 on a CPU"
    )
    threads: int = _setting(0, "CPU threads; 0: the number of physical cores")
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)


def override(config: Config, values: dict[str, Any]) -> Config:
    """A copy with dotted settings replaced, ``{"limits.seqs": 4}``.

    Raises:
        ConfigError: no such setting, or a value of another type; the message names it.
    """
    for path, value in values.items():
        config = _replace(config, path.split("."), value, path)
    return config


def _replace(node: Any, path: list[str], value: Any, whole: str) -> Any:
    hints = get_type_hints(type(node))
    if path[0] not in hints:
        known = ", ".join(f.name for f in fields(node))
        raise ConfigError(f"there is no setting {whole!r}: {path[0]!r} is not one of {known}")
    current = getattr(node, path[0])
    if len(path) > 1:
        if not is_dataclass(current):
            raise ConfigError(f"there is no setting {whole!r}: {path[0]!r} has no parts")
        return replace(node, **{path[0]: _replace(current, path[1:], value, whole)})
    if is_dataclass(current):
        raise ConfigError(f"{whole!r} is a group of settings: name one of its parts")
    return replace(node, **{path[0]: _typed(value, hints[path[0]], whole)})


def _typed(value: Any, hint: Any, whole: str) -> Any:
    choices = getattr(hint, "__args__", None)
    if choices:
        if value not in choices:
            raise ConfigError(f"{whole} is {value!r}: give one of {', '.join(map(repr, choices))}")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        raise ConfigError(f"{whole} is {value!r}: give a value of type {hint.__name__}")
    return value
