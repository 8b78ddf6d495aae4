"""The text side of a checkpoint, as the server sees it."""

from __future__ import annotations

from typing import Any

from slipstream.request import RequestError
from slipstream.server.schema import Decoder, Stops
from slipstream.text.stop import StopStrings
from slipstream.text.template import Template, TemplateError
from slipstream.text.tokenizer import Incremental, Tokenizer


class CheckpointText:
    """A checkpoint's tokenizer and, if it has one, its chat template.

    ``most``: tokens of a prompt and its answer; texts far longer are refused before they are
    encoded.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: Template | None, most: int | None = None
    ) -> None:
        self._tokenizer, self._most = tokenizer, most
        self._template = template

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt, with the tokenizer's own first tokens."""
        return self._tokenizer.encode(text, begin=True, most=self._most)

    def encode_chat(self, text: str) -> list[int]:
        """Ids of a rendered conversation."""
        return self._tokenizer.encode(text, most=self._most)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        arguments: dict[str, Any],
    ) -> str:
        """The conversation as one text.

        Raises:
            RequestError: there is no template, or it refuses these messages.
        """
        if self._template is None:
            raise RequestError("this model has no chat template: use /v1/completions")
        try:
            return self._template.render(messages, tools, **arguments)
        except TemplateError as error:
            raise RequestError(str(error)) from None

    def decoder(self) -> Decoder:
        """A decoder for one text."""
        return Incremental(self._tokenizer)

    def stops(self, strings: tuple[str, ...]) -> Stops:
        """A search for stop strings in one text."""
        return StopStrings(strings)

    def token_bytes(self, id: int) -> bytes:
        """What one id stands for."""
        return self._tokenizer.token_bytes(id)
