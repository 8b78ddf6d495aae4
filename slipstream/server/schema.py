"""What clients may send, checked, and the text side the server needs.

Owns the request models, their errors and the shape of messages. Knows neither HTTP nor the engine.
Scalars are checked by pydantic in strict mode; fields of several shapes (``content``, ``prompt``,
``stop``) are checked by hand, because a union's error would name every branch and help nobody.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from slipstream.request import RequestError, SamplingParams

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXT_PARTS = ("text", "input_text", "output_text")
MAX_CHOICES = 256  # completions of one HTTP request: prompts times n


class Decoder(Protocol):
    """Turns the tokens of one text into characters, never splitting one."""

    def feed(self, ids: Sequence[int], /) -> str: ...
    def finish(self) -> str: ...


class Stops(Protocol):
    """Finds stop strings in a text that arrives in pieces."""

    def feed(self, text: str, /) -> tuple[str, str | None]: ...
    def finish(self) -> str: ...


class TextSide(Protocol):
    """All that the server needs to know of tokens and templates."""

    def encode(self, text: str, /) -> list[int]:
        """Ids of a raw prompt, with the start token if the model wants one."""
        ...

    def encode_chat(self, text: str, /) -> list[int]:
        """Ids of a rendered conversation, which spells its own start token."""
        ...

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        arguments: dict[str, Any],
        /,
    ) -> str:
        """The conversation as one text, up to where the assistant speaks.

        Raises:
            RequestError: the template refuses these messages or arguments.
        """
        ...

    def decoder(self) -> Decoder: ...
    def stops(self, strings: tuple[str, ...], /) -> Stops: ...
    def token_bytes(self, id: int, /) -> bytes: ...


class ApiError(Exception):
    """An error in the shape that OpenAI clients understand."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """The JSON body clients parse."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


class StreamOptions(BaseModel):
    """``stream_options`` of a request."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None


class Body(BaseModel):
    """Fields that both completion endpoints take. Unknown ones are ignored, null means unset."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    stop: Any = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    speculate: bool | None = None
    share: bool | None = None

    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that carries the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def limit(self) -> int | None:
        """Completion tokens asked for at most."""
        return self.max_tokens

    def alternatives(self) -> int | None:
        """Log-probability alternatives per token; None: no log-probabilities."""
        return None

    def aliases(self) -> dict[str, str]:
        """Fields of the request by the engine's name, where they differ."""
        return {}


class ChatBody(Body):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: Any = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def alternatives(self) -> int | None:
        if not self.logprobs:
            if self.top_logprobs is not None:
                raise ApiError(
                    400, "top_logprobs needs logprobs: set logprobs to true", param="top_logprobs"
                )
            return None
        return self.top_logprobs or 0

    def aliases(self) -> dict[str, str]:
        named = {"logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            named["max_tokens"] = "max_completion_tokens"
        return named

    def template_arguments(self) -> dict[str, Any]:
        """What the template gets beside messages and tools."""
        arguments: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            arguments["reasoning_effort"] = self.reasoning_effort
        if self.enable_thinking is not None:
            arguments["enable_thinking"] = self.enable_thinking
        arguments.update(self.chat_template_kwargs or {})
        for name in ("self", "messages", "tools", "add_generation_prompt"):
            if name in arguments:
                raise ApiError(
                    400,
                    f"chat_template_kwargs may not set {name!r}: leave it out",
                    param="chat_template_kwargs",
                )
        return arguments

    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools the template shows to the model."""
        choice = self.tool_choice
        if choice in (None, "auto"):
            return self.tools or None
        if choice == "none":
            return None
        raise ApiError(
            400,
            f"tool_choice {json.dumps(choice)} is not supported: use 'auto' or 'none'",
            param="tool_choice",
            code="unsupported_value",
        )


class CompletionBody(Body):
    """Body of ``POST /v1/completions``."""

    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None

    def alternatives(self) -> int | None:
        return self.logprobs


B = TypeVar("B", bound=Body)


def parse(body: bytes, shape: type[B]) -> B:
    """Read a request body.

    Raises:
        ApiError: not JSON, not an object, or a field of the wrong type; the message names it.
    """
    try:
        return shape.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    param = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]
    ).lstrip(".")
    if first["type"] == "json_invalid":
        raise ApiError(400, f"the body is not valid JSON: {first['ctx']['error']}")
    if not param:
        raise ApiError(400, "the body is not a JSON object: send one with the request's fields")
    if first["type"] == "missing":
        raise ApiError(400, f"{param} is missing: it is required", param=param)
    text = str(first["msg"]).removeprefix("Input should be ")
    raise ApiError(400, f"{param} is of the wrong type: give {text}", param=param)


def sampling(body: Body) -> SamplingParams:
    """The engine's parameters for one completion.

    Raises:
        ApiError: a value is out of its range.
    """
    given: dict[str, Any] = {
        "max_tokens": body.limit(),
        "min_tokens": body.min_tokens,
        "temperature": body.temperature,
        "top_k": body.top_k,
        "top_p": body.top_p,
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "logit_bias": _bias(body.logit_bias),
        "seed": body.seed,
        "n": body.n,
        "stop": _stop(body.stop),
        "stop_token_ids": None if body.stop_token_ids is None else tuple(body.stop_token_ids),
        "ignore_eos": body.ignore_eos,
        "logprobs": body.alternatives(),
        "speculate": body.speculate,
        "share": body.share,
    }
    try:
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})
    except RequestError as error:
        refusal = refused(error)
        # What was sent under another name is named as it was sent.
        sent = body.aliases().get(refusal.param or "")
        if sent is not None:
            refusal = refused(RequestError(str(error).replace(str(refusal.param), sent, 1)))
        raise refusal from None


def refused(error: RequestError) -> ApiError:
    """A refusal of the engine or the template, as clients see it."""
    message = str(error)
    # A refusal names its field, with few words before it: "a logit_bias value", "an empty stop".
    words = message.split()[:3]
    known = [w for w in words if w in ChatBody.model_fields or w in CompletionBody.model_fields]
    return ApiError(400, message, param=known[0] if known else None)


def _bias(given: dict[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError:
        raise ApiError(
            400, "logit_bias has a key that is not a token id: give integers", param="logit_bias"
        ) from None


def _stop(given: Any) -> tuple[str, ...] | None:
    if given is None:
        return None
    strings = [given] if isinstance(given, str) else given
    if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
        raise ApiError(
            400, "stop is of the wrong type: give a string or a list of strings", param="stop"
        )
    return tuple(strings)


def check_chat(body: ChatBody) -> None:
    """Refuse what would silently be done wrong."""
    kind = body.response_format
    if isinstance(kind, dict):
        kind = kind.get("type")
    if kind not in (None, "text"):
        raise ApiError(
            400,
            f"response_format {json.dumps(kind)} is not supported: use 'text' or leave it out",
            param="response_format",
            code="unsupported_value",
        )


def check_completion(body: CompletionBody) -> None:
    """Refuse what would silently be done wrong."""
    if body.suffix:
        raise ApiError(
            400, "suffix is not supported: leave it out", param="suffix", code="unsupported_value"
        )
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(
            400,
            f"best_of {body.best_of} is not supported: leave it out or set it to n",
            param="best_of",
            code="unsupported_value",
        )


def conversation(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose roles and contents are sound, each content one string or none.

    The rest of the shape is the template's affair.

    Raises:
        ApiError: a role or content that cannot be rendered; the message names its place.
    """
    if not messages:
        raise ApiError(400, "messages is empty: send at least one message", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: dict[str, Any], place: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise ApiError(
            400,
            f"{place}.role is {str(role)[:40]!r}: give one of {', '.join(ROLES)}",
            param=f"{place}.role",
        )
    plain = {**message, "content": _content(message.get("content"), f"{place}.content")}
    calls = message.get("tool_calls")
    if calls is None:
        plain.pop("tool_calls", None)
    elif not isinstance(calls, list) or not all(_is_call(call) for call in calls):
        raise ApiError(
            400,
            f"{place}.tool_calls is of the wrong type: give a list of objects with a function "
            f"that has a name",
            param=f"{place}.tool_calls",
        )
    return plain


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _content(content: Any, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(
            400, f"{place} is of the wrong type: give a string or a list of parts", param=place
        )
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        where = f"{place}[{i}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in (*TEXT_PARTS, "refusal"):
            what = f"a part of type {kind!r}" if isinstance(kind, str) else "a part without a type"
            raise ApiError(
                400,
                f"{where} is {what}, and this model reads text only: send text parts",
                param=where,
                code="unsupported_content",
            )
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise ApiError(400, f"{where}.text is not a string: give one", param=f"{where}.text")
        texts.append(text)
    return "\n".join(texts)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a completion request, as text or as tokens."""

    text: str | None
    tokens: tuple[int, ...] | None


def prompts(given: Any) -> list[Prompt]:
    """The prompts of a completion request.

    Raises:
        ApiError: not a string, a list of strings, a list of ids or a list of lists of ids.
    """
    if isinstance(given, str):
        return [Prompt(given, None)]
    if isinstance(given, list) and given:
        if all(isinstance(item, str) for item in given):
            return [Prompt(item, None) for item in given]
        if _are_ids(given):
            return [Prompt(None, tuple(given))]
        if all(isinstance(item, list) and item and _are_ids(item) for item in given):
            return [Prompt(None, tuple(item)) for item in given]
    missing = given is None or given == []
    raise ApiError(
        400,
        "prompt is missing: it is required"
        if missing
        else "prompt is of the wrong type: give a string, a list of strings, a list of token ids "
        "or a list of lists of token ids",
        param="prompt",
    )


def _are_ids(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)
