"""Sampling parameters as a table indexed by slot, with host-side flags of what is in use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.request import SamplingParams

BIASES = 300  # most logit_bias entries of a request
ENDS = 24  # most end ids of a request: 16 stop_token_ids and the checkpoint's own


class Features(NamedTuple):
    """What the requests of one step ask for, known on the host before anything is launched.

    A feature nobody uses costs nothing. No field changes the bits of a row that does not use it.
    """

    greedy: bool  # every request is greedy
    penalty: bool  # some request has a repetition, presence or frequency penalty
    bias: bool  # some request has a logit_bias
    min_tokens: bool  # some request must not end yet, perhaps
    top_k: int  # largest top-k in use; 0: none
    ordered: int  # most probable tokens that top-p must put in order; 0: none; -1: all
    min_p: bool
    coupled: bool  # some request has a seed
    rejection: bool  # some request has none
    support: int  # no row has more tokens of positive probability; 0: no bound


@dataclass(frozen=True, slots=True)
class _Host:
    greedy: bool = True
    penalty: bool = False
    bias: bool = False
    min_tokens: bool = False
    top_k: int = 0
    top_p: bool = False
    min_p: bool = False
    coupled: bool = False


class ParamTable:
    """Per-slot tensors of every sampling parameter, allocated once.

    Slot 0 and every cleared slot are greedy and use no feature.

    Args:
        slots: rows of the table, the trash slot 0 included.
        device: where the tensors live.
    """

    def __init__(self, slots: int, device: torch.device | str = "cpu") -> None:
        def table(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(slots, *shape, dtype=dtype, device=device)

        integer = torch.int64
        self.temperature = table()  # [slots] float64; 0 = greedy
        self.top_k = table(dtype=integer)  # [slots]; 0 = off
        self.top_p = table()  # [slots]; 1 = off
        self.min_p = table()  # [slots]; 0 = off
        self.repetition = table()  # [slots]; 1 = off
        self.presence = table()  # [slots]; 0 = off
        self.frequency = table()  # [slots]; 0 = off
        self.seed = table(dtype=integer)  # [slots], two's complement of a 64-bit seed
        self.coupled = table(dtype=torch.bool)  # [slots]: the request gave its seed
        self.bias_ids = table(BIASES, dtype=integer)  # [slots, BIASES]; unused: id 0, value 0
        self.bias_values = table(BIASES)
        self.end_ids = table(ENDS, dtype=integer)  # [slots, ENDS]; unused: id 0, not in end_used
        self.end_used = table(ENDS, dtype=torch.bool)
        self.min_tokens = table(dtype=integer)  # [slots]
        self.prompt_len = table(dtype=integer)  # [slots], tokens before the first generated one
        self._host = [_Host()] * slots
        self.top_p.fill_(1)
        self.repetition.fill_(1)

    def set(
        self,
        slot: int,
        params: SamplingParams,
        prompt_len: int,
        eos_ids: Sequence[int],
        seed: int,
    ) -> None:
        """Enter a request's parameters.

        Args:
            slot: row to write.
            params: resolved against the checkpoint's defaults: temperature, top_k and top_p set.
                A request with ``params.seed`` is coupled; one without uses rejection sampling.
            prompt_len: tokens of the request's own prompt, also when a preempted request comes
                back with generated tokens behind it: penalties and min_tokens count from here.
            eos_ids: the checkpoint's end ids; left out of min_tokens by ``ignore_eos``.
            seed: 64-bit key of the request's random numbers: ``params.seed``, or a random one.

        Raises:
            ValueError: a parameter is unresolved, or there are too many end ids.
        """
        if params.temperature is None or params.top_k is None or params.top_p is None:
            raise ValueError("temperature, top_k and top_p must be resolved before they are set")
        ends = dict.fromkeys(params.stop_token_ids + (() if params.ignore_eos else tuple(eos_ids)))
        if len(ends) > ENDS:
            raise ValueError(f"{len(ends)} end ids: at most {ENDS} fit")
        self.clear(slot)
        top_k, min_p = max(params.top_k, 0), params.min_p or 0.0
        repetition = 1.0 if params.repetition_penalty is None else params.repetition_penalty
        self.temperature[slot] = params.temperature
        self.top_k[slot] = top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = min_p
        self.repetition[slot] = repetition
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.seed[slot] = (seed + 2**63) % 2**64 - 2**63
        self.coupled[slot] = params.seed is not None
        self.min_tokens[slot] = params.min_tokens
        self.prompt_len[slot] = prompt_len
        if params.logit_bias:
            count = len(params.logit_bias)
            self.bias_ids[slot, :count] = torch.tensor(list(params.logit_bias))
            self.bias_values[slot, :count] = torch.tensor(
                list(params.logit_bias.values()), dtype=torch.float64
            )
        if ends:
            self.end_ids[slot, : len(ends)] = torch.tensor(list(ends))
            self.end_used[slot, : len(ends)] = True
        greedy = params.temperature == 0
        self._host[slot] = _Host(
            greedy=greedy,
            penalty=repetition != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0,
            bias=bool(params.logit_bias),
            min_tokens=params.min_tokens > 0 and bool(ends),
            top_k=0 if greedy else top_k,
            top_p=not greedy and params.top_p < 1,
            min_p=not greedy and min_p > 0,
            coupled=params.seed is not None,
        )

    def clear(self, slot: int) -> None:
        """Forget a slot's request."""
        for name in (
            "temperature",
            "top_k",
            "min_p",
            "presence",
            "frequency",
            "seed",
            "coupled",
            "bias_ids",
            "bias_values",
            "end_ids",
            "end_used",
            "min_tokens",
            "prompt_len",
        ):
            getattr(self, name)[slot] = 0
        self.top_p[slot] = 1
        self.repetition[slot] = 1
        self._host[slot] = _Host()

    def features(self, slots: Iterable[int]) -> Features:
        """What the requests in ``slots`` ask for; reads no tensor."""
        hosts = [self._host[slot] for slot in slots]
        sampled = [h for h in hosts if not h.greedy]
        bounded = all(h.top_k > 0 for h in sampled)
        top_k = max((h.top_k for h in hosts), default=0)
        nucleus = [h.top_k for h in sampled if h.top_p]
        return Features(
            greedy=not sampled,
            penalty=any(h.penalty for h in hosts),
            bias=any(h.bias for h in hosts),
            min_tokens=any(h.min_tokens for h in hosts),
            top_k=top_k,
            ordered=-1 if nucleus and min(nucleus) == 0 else max(nucleus, default=0),
            min_p=any(h.min_p for h in sampled),
            coupled=any(h.coupled for h in hosts),
            rejection=not all(h.coupled for h in hosts),
            support=max(top_k, 1) if bounded else 0,
        )
