"""What a user asks for and what comes back: plain data, shared by every room.

Nothing here knows tensors, files or HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


class RequestError(ValueError):
    """A request that cannot be served as it stands; the text says what to change."""


class TooLong(RequestError):
    """A prompt that cannot fit, however it is cut into tokens."""


_NUMBERS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(
        ("max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs", "prompt_logprobs"), int
    ),
    **dict.fromkeys(
        (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ),
        (int, float),
    ),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one completion is sampled.

    ``temperature`` 0 is greedy. Filters apply in the order penalties, temperature, top-k, top-p,
    min-p. ``seed`` makes the text a function of the request alone: the same tokens come out
    whatever drafts, batches or caches were used. ``None`` for a default means "what the
    checkpoint's generation_config says".

    Raises:
        RequestError: a value is out of its range; the message names it.
    """

    max_tokens: int | None = None  # None: up to the context limit
    min_tokens: int = 0  # no end token before this many tokens
    temperature: float | None = None
    top_k: int | None = None  # 0 or -1: off
    top_p: float | None = None  # 1.0: off
    min_p: float | None = None  # 0: off
    repetition_penalty: float | None = None  # over prompt and output (Keskar et al. 2019); 1: off
    presence_penalty: float = 0.0  # over the output, once per distinct token
    frequency_penalty: float = 0.0  # over the output, once per occurrence
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()  # strings; the text ends before the first one
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives per token; 0 = the chosen token only
    prompt_logprobs: int | None = None
    speculate: bool = True  # draft and verify; never changes the text's distribution
    share: bool = True  # this text may help to draft others of the same scope, and theirs this one

    def __post_init__(self) -> None:
        def need(ok: bool, text: str) -> None:
            if not ok:
                raise RequestError(text)

        for name, kinds in _NUMBERS.items():
            value = getattr(self, name)
            good = value is None or (isinstance(value, kinds) and not isinstance(value, bool))
            need(good, f"{name} is {value!r}: give a number")

        need(
            self.max_tokens is None or self.max_tokens >= 1,
            f"max_tokens is {self.max_tokens}: give 1 or more",
        )
        need(self.min_tokens >= 0, f"min_tokens is {self.min_tokens}: give 0 or more")
        need(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}: lower it",
        )
        need(
            self.temperature is None or 0 <= self.temperature <= 100,
            f"temperature is {self.temperature}: give 0 (greedy) to 100",
        )
        need(
            self.top_k is None or self.top_k >= -1,
            f"top_k is {self.top_k}: give 1 or more, or 0 for off",
        )
        need(
            self.top_p is None or 0 < self.top_p <= 1,
            f"top_p is {self.top_p}: give more than 0, up to 1",
        )
        need(self.min_p is None or 0 <= self.min_p <= 1, f"min_p is {self.min_p}: give 0 to 1")
        need(
            self.repetition_penalty is None or 0 < self.repetition_penalty <= 100,
            f"repetition_penalty is {self.repetition_penalty}: give more than 0, up to 100 (1 is off)",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            need(-100 <= value <= 100, f"{name} is {value}: give -100 to 100 (0 is off)")
        need(
            len(self.logit_bias) <= 300,
            f"logit_bias has {len(self.logit_bias)} entries: give at most 300",
        )
        need(
            all(-1e4 <= b <= 1e4 for b in self.logit_bias.values()),
            "a logit_bias value is not a number from -10000 to 10000",
        )
        need(1 <= self.n <= 128, f"n is {self.n}: give 1 to 128")
        need(
            self.seed is None or -(2**63) <= self.seed < 2**64,
            f"seed is {self.seed}: give an integer of at most 64 bits",
        )
        need(len(self.stop) <= 16, f"stop has {len(self.stop)} strings: give at most 16")
        need(all(self.stop), "an empty stop string ends nothing: leave it out")
        need(
            len(self.stop_token_ids) <= 16,
            f"stop_token_ids has {len(self.stop_token_ids)} ids: give at most 16",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            need(value is None or 0 <= value <= 20, f"{name} is {value}: give 0 to 20")


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to compute (``SamplingParams.n`` is unrolled before it gets here)."""

    id: str
    tokens: tuple[int, ...]
    params: SamplingParams
    scope: str = ""  # who may share cached text with whom, an API key's name


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities of one token under the model itself, before temperature and masks."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # most probable first
    rank: int = 0  # 0 = the most probable token


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one request, by the engine's clock."""

    queued: float = 0.0  # submission to admission
    first_token: float = 0.0  # submission to first token
    total: float = 0.0  # submission to end


@dataclass(frozen=True, slots=True)
class Speculation:
    """What drafting did for one request. A draft counts once it is verified."""

    steps: int = 0  # steps that decided at least one token
    tokens: int = 0  # decided in them
    drafted: int = 0
    accepted: int = 0
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    drafted_by_source: dict[str, int] = field(default_factory=dict)
    drafted_by_position: tuple[int, ...] = ()  # entry j: drafts at position j of their span
    accepted_by_position: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()  # entry k: steps that verified k drafts

    @property
    def tokens_per_step(self) -> float:
        """Tokens a deciding step yields on average; 1.0 without speculation."""
        return self.tokens / self.steps if self.steps else 0.0

    def __add__(self, other: Speculation) -> Speculation:
        """Both together."""

        def places(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(x + y for x, y in zip_longest(a, b, fillvalue=0))

        def names(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
            return {name: a.get(name, 0) + b.get(name, 0) for name in {**a, **b}}

        return Speculation(
            self.steps + other.steps,
            self.tokens + other.tokens,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            names(self.accepted_by_source, other.accepted_by_source),
            names(self.drafted_by_source, other.drafted_by_source),
            places(self.drafted_by_position, other.drafted_by_position),
            places(self.accepted_by_position, other.accepted_by_position),
            places(self.lengths, other.lengths),
        )


@dataclass(frozen=True, slots=True)
class Output:
    """What one step did for one request. ``finish`` is set on the last one only.

    ``tokens`` are the newly decided ones; the end token is among them when one ended the text.
    ``logprobs`` has one entry per token in ``tokens`` if the request asked for any.
    """

    id: str
    tokens: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()  # who proposed each token: "target", "lookup", ...
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # once; the first entry is None
    finish: FinishReason | None = None
    stop_reason: int | str | None = None  # the token id or string that ended the text
    usage: Usage = Usage()
    timing: Timing = Timing()
    speculation: Speculation = Speculation()
    error: str | None = None  # set with finish "abort" when the request could not be served
