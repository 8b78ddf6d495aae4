"""A model of this machine, behind the `Serving` seam."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from slipstream.config import Config

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.engine.protocols import Serving
    from slipstream.text.template import Template
    from slipstream.text.tokenizer import Tokenizer


class Loaded(NamedTuple):
    """A model, its text side, and how to let go of it."""

    serving: Serving
    tokenizer: Tokenizer | None
    template: Template | None
    close: Callable[[], None]


def load(config: Config, announce: Callable[[object], None] | None = None) -> Loaded:
    """Load the model of a config; its steps run in a thread of their own.

    Args:
        announce: is given the memory plan before any weight is read; ``str`` of it is a table.

    Raises:
        ConfigError, CheckpointError, TokenizerError, TemplateError: with the next action.
    """
    from slipstream.engine.serving import InferenceThread
    from slipstream.llm import LLM

    llm = LLM(config=config, announce=announce)
    thread = InferenceThread(llm.engine)
    return Loaded(thread, llm.tokenizer, llm.template, thread.close)
