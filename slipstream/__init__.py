"""Slipstream: an inference engine for hybrid Gated-DeltaNet language models.

The public names are imported when first used, so that ``import slipstream`` and
``slipstream --help`` cost milliseconds and load no tensor library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.config import Config, ConfigError
    from slipstream.llm import LLM, Completion, Delta, RequestOutput
    from slipstream.request import (
        RequestError,
        SamplingParams,
        Speculation,
        Timing,
        TokenLogprob,
        Usage,
    )

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Completion",
    "Config",
    "ConfigError",
    "Delta",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "Speculation",
    "Timing",
    "TokenLogprob",
    "Usage",
]

_HOME = {
    "LLM": "slipstream.llm",
    "Completion": "slipstream.llm",
    "Config": "slipstream.config",
    "ConfigError": "slipstream.config",
    "Delta": "slipstream.llm",
    "RequestError": "slipstream.request",
    "RequestOutput": "slipstream.llm",
    "SamplingParams": "slipstream.request",
    "Speculation": "slipstream.request",
    "Timing": "slipstream.request",
    "TokenLogprob": "slipstream.request",
    "Usage": "slipstream.request",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
