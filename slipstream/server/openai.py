"""The shapes of OpenAI's answers, made from pieces. Pure functions and small collectors."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from slipstream.request import Output, TokenLogprob
from slipstream.server.answer import Piece
from slipstream.server.schema import TextSide

# JSON has no infinity; clients know this number as "impossible".
LOWEST_LOGPROB = -9999.0


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Head:
    """The fields every object of one answer repeats."""

    id: str
    created: int
    model: str

    def body(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class Ledger:
    """Token counts of all choices of one answer."""

    def __init__(self, prompt_tokens: int, per_prompt: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._per_prompt = per_prompt  # choices that share one prompt
        self._completion: dict[int, int] = {}
        self._last: dict[int, Output] = {}

    def add(self, piece: Piece) -> None:
        """Count a piece."""
        self._completion[piece.index] = self._completion.get(piece.index, 0) + len(piece.tokens)
        self._last[piece.index] = piece.output

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object. A prompt counts once, however many choices continue it."""
        completion = sum(self._completion.values())
        firsts = [o for i, o in self._last.items() if i % self._per_prompt == 0]
        accepted = sum(o.speculation.accepted for o in self._last.values())
        drafted = sum(o.speculation.drafted for o in self._last.values())
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(o.usage.cached_tokens for o in firsts),
            },
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": max(drafted - accepted, 0),
            },
        }

    def line(self) -> str:
        """The same for a log line; says nothing of the text."""
        usage = self.usage()
        return (
            f"prompt={usage['prompt_tokens']} "
            f"cached={usage['prompt_tokens_details']['cached_tokens']} "
            f"completion={usage['completion_tokens']}"
        )


def token_text(text: TextSide, token: int) -> str:
    """A token by itself; bytes that are no whole character are spelled out."""
    raw = text.token_bytes(token)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB  # also replaces NaN


def _chat_entry(text: TextSide, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_text(text, token),
        "logprob": _finite(logprob),
        "bytes": list(text.token_bytes(token)),
    }


def chat_logprobs(text: TextSide, entries: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """The chat form: one entry per token."""
    return [
        {
            **_chat_entry(text, entry.token, entry.logprob),
            "top_logprobs": [_chat_entry(text, token, logprob) for token, logprob in entry.top],
        }
        for entry in entries
    ]


def completion_logprobs(
    text: TextSide,
    entries: Iterable[TokenLogprob | None],
    tokens: Iterable[int],
    offsets: list[int],
) -> dict[str, Any]:
    """The completions form: parallel lists. The first token of a prompt has no entry."""
    names: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token, entry in zip(tokens, entries, strict=True):
        names.append(token_text(text, token))
        logprobs.append(None if entry is None else _finite(entry.logprob))
        if entry is None:
            tops.append(None)
            continue
        top = {token_text(text, t): _finite(logprob) for t, logprob in entry.top}
        top.setdefault(names[-1], _finite(entry.logprob))
        tops.append(top)
    return {
        "tokens": names,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


@dataclass(slots=True)
class ChatChoice:
    """Collects one choice of a whole chat answer."""

    text: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None


class ChatShape:
    """``chat.completion`` and ``chat.completion.chunk`` objects."""

    def __init__(self, head: Head, text: TextSide, choices: int, logprobs: bool) -> None:
        self._head = head
        self._text = text
        self._logprobs = logprobs
        self._choices = [ChatChoice() for _ in range(choices)]

    def opening(self) -> list[dict[str, Any]]:
        """The first chunk of each choice: who speaks."""
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(i, dict(delta), None, None) for i in range(len(self._choices))]

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """What a stream sends for ``piece``."""
        chunks = []
        entries = chat_logprobs(self._text, piece.logprobs) if self._logprobs else []
        if piece.text or entries:
            logprobs = {"content": entries, "refusal": None} if self._logprobs else None
            chunks.append(self._chunk(piece.index, {"content": piece.text}, logprobs, None))
        if piece.finish is not None:
            chunks.append(self._chunk(piece.index, {}, None, piece.finish))
        return chunks

    def closing(self) -> dict[str, Any]:
        """The chunk that carries the usage."""
        return {**self._head.body("chat.completion.chunk"), "choices": []}

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return {**self._head.body("chat.completion.chunk"), "choices": [choice]}

    def add(self, piece: Piece) -> None:
        """Collect a piece for the whole answer."""
        choice = self._choices[piece.index]
        choice.text.append(piece.text)
        if self._logprobs:
            choice.logprobs += chat_logprobs(self._text, piece.logprobs)
        choice.finish = piece.finish

    def whole(self) -> dict[str, Any]:
        """The whole answer, without usage."""
        choices = []
        for index, choice in enumerate(self._choices):
            content = "".join(choice.text)
            logprobs = {"content": choice.logprobs, "refusal": None} if self._logprobs else None
            choices.append(
                {
                    "index": index,
                    "message": {"role": "assistant", "content": content, "refusal": None},
                    "logprobs": logprobs,
                    "finish_reason": choice.finish,
                }
            )
        return {**self._head.body("chat.completion"), "choices": choices}


@dataclass(slots=True)
class TextChoice:
    """Collects one choice of a whole completions answer."""

    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish: str | None = None


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is repeated before its completion."""

    text: str
    tokens: tuple[int, ...]
    offsets: tuple[int, ...]


class CompletionShape:
    """``text_completion`` objects, whole and streamed. ``echoes`` has one entry per choice."""

    def __init__(
        self,
        head: Head,
        text: TextSide,
        echoes: list[Echo | None],
        logprobs: bool,
    ) -> None:
        self._head = head
        self._text = text
        self._echoes = echoes
        self._logprobs = logprobs
        self._told = [False] * len(echoes)
        self._choices = [TextChoice() for _ in echoes]

    def opening(self) -> list[dict[str, Any]]:
        """Nothing is sent before the first text."""
        return []

    def _part(self, piece: Piece) -> TextChoice:
        """A piece with its prompt before it where one is due."""
        part = TextChoice(finish=piece.finish)
        echo = self._echoes[piece.index]
        shift = len(echo.text) if echo is not None else 0
        if echo is not None and not self._told[piece.index]:
            self._told[piece.index] = True
            part.text.append(echo.text)
            if self._logprobs:
                part.tokens += echo.tokens
                part.offsets += echo.offsets
                part.logprobs += piece.output.prompt_logprobs or [None] * len(echo.tokens)
        part.text.append(piece.text)
        if self._logprobs:
            part.tokens += piece.tokens
            part.offsets += [shift + offset for offset in piece.offsets]
            part.logprobs += piece.logprobs
        return part

    def _choice(self, index: int, part: TextChoice) -> dict[str, Any]:
        logprobs = None
        if self._logprobs and part.tokens:
            logprobs = completion_logprobs(self._text, part.logprobs, part.tokens, part.offsets)
        return {
            "index": index,
            "text": "".join(part.text),
            "logprobs": logprobs,
            "finish_reason": part.finish,
        }

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """What a stream sends for ``piece``."""
        part = self._part(piece)
        if not any(part.text) and not part.tokens and part.finish is None:
            return []
        choice = self._choice(piece.index, part)
        return [{**self._head.body("text_completion"), "choices": [choice]}]

    def closing(self) -> dict[str, Any]:
        """The chunk that carries the usage."""
        return {**self._head.body("text_completion"), "choices": []}

    def add(self, piece: Piece) -> None:
        """Collect a piece for the whole answer."""
        choice, part = self._choices[piece.index], self._part(piece)
        choice.text += part.text
        choice.tokens += part.tokens
        choice.offsets += part.offsets
        choice.logprobs += part.logprobs
        choice.finish = part.finish

    def whole(self) -> dict[str, Any]:
        """The whole answer, without usage."""
        choices = [self._choice(index, choice) for index, choice in enumerate(self._choices)]
        return {**self._head.body("text_completion"), "choices": choices}
