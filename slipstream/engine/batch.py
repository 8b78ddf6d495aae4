"""The data of a step: limits, sequences, spans, and how a plan becomes tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from time import monotonic
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from slipstream.engine.lengths import Acceptance, Asks
from slipstream.engine.prefix import Lineage
from slipstream.engine.verify import Rows
from slipstream.kernels.types import FOLD, PAGE, Batch, Draft, SpanRows
from slipstream.request import Request, SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class Limits:
    """Everything is sized from these four, once."""

    seqs: int  # sequences computed at the same time
    tokens: int  # rows of one step
    span: int  # rows of one short span
    context: int  # positions of one sequence

    @property
    def slots(self) -> int:
        """Rows of every table; slot 0 takes what nobody reads."""
        return self.seqs + 1

    @property
    def drafts(self) -> int:
        """Most drafts of one span."""
        return self.span - 1

    @property
    def pages(self) -> int:
        """Pages of one sequence at full length."""
        return -(-self.context // PAGE)

    def ring(self, history: int) -> int:
        """Rows of a ring whose readers look `history` rows behind the fold.

        At worst the fold is one step behind the committed rows (FOLD - 1 + span of them), and a
        whole span of new rows follows.
        """
        return history + FOLD - 1 + 2 * self.span


@dataclass(slots=True, eq=False)
class Sequence:
    """One request on its way. The scheduler owns it; nobody else changes it."""

    request: Request
    params: SamplingParams  # resolved against the checkpoint's defaults
    tokens: list[int]  # prompt and accepted output
    prompt: int  # tokens before the first generated one
    stop_at: int  # length at which generation ends for certain
    ends: frozenset[int]  # ids that end the text
    lineage: Lineage
    seed: int
    slot: int = 0
    computed: int = 0  # positions that are real; len(tokens) - 1 while decoding
    drafts: int = 0  # proposed and waiting
    scores: list[float] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    acceptance: Acceptance = field(default_factory=Acceptance)
    asks: Asks = field(default_factory=Asks)
    marks: tuple[int, ...] = ()  # positions where a chunk ends for a snapshot
    adopted: int = 0  # positions taken from text that was computed another way
    cached: int = -1  # prompt tokens found in the prefix cache; -1 before admission
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_by_source: dict[str, int] = field(default_factory=dict)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # steps by their number of drafts
    prompt_logprobs: list[TokenLogprob | None] | None = None
    arrived: float = field(default_factory=monotonic)
    admitted: float = 0.0
    first: float = 0.0  # when the first token was decided

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt

    @property
    def prefilling(self) -> bool:
        """Prompt positions are left to compute."""
        return self.computed < self.prompt


class Span(NamedTuple):
    """Consecutive positions of one sequence, computed in one step.

    `tokens[start:]` followed by `drafts` drafts, cut to `length`. All of a chunk's positions are
    in the prompt, none of a short span's: which kernels compute a position depends on where it
    stands, never on what stands beside it.
    """

    sequence: Sequence
    start: int
    length: int
    drafts: int
    chunk: bool
    ask: tuple[int, ...] | None = None  # drafts wanted for the next step, by source

    @property
    def ready(self) -> bool:
        """The span reaches the last known token, so a new one is decided."""
        return self.start + self.length - self.drafts == len(self.sequence.tokens)


class Places(Protocol):
    """Where the cache keeps what: what a batch says of it."""

    table: Tensor  # [slots, pages per sequence] int64
    fold_of: list[int]

    def run(self, slot: int, upto: int) -> int:
        """First of the slot's pages below position `upto` if they are consecutive, or -1."""
        ...


class Inputs:
    """Token tables on the device, and the small integer arrays of each step.

    ``history[slot, :length[slot]]`` are the known tokens of a slot. Drafts stay on the device.
    """

    def __init__(self, limits: Limits, device: torch.device) -> None:
        self.device = device
        self.history = torch.zeros(
            limits.slots, limits.context + 1, dtype=torch.int64, device=device
        )
        self.length = torch.zeros(limits.slots, dtype=torch.int64, device=device)

    def admit(self, slot: int, tokens: list[int]) -> None:
        """Enter a sequence's known tokens."""
        self.history[slot, : len(tokens)] = torch.tensor(tokens)
        self.length[slot] = len(tokens)

    def append(self, batch: Batch, tokens: Tensor, added: Tensor) -> None:
        """Append each span's newly decided tokens [B, K+1], the first `added` [B] of them."""
        column = torch.arange(tokens.shape[1], device=self.device)
        length = self.length[batch.slots]
        wanted = column < added[:, None]
        slots = batch.slots[:, None].expand_as(wanted)[wanted]
        at = (length[:, None] + column)[wanted]
        inside = at < self.history.shape[1]
        self.history[slots[inside], at[inside]] = tokens[wanted][inside]
        self.length[batch.slots] = length + added

    def fill(self, plan: list[Span], cache: Places, draft: Draft) -> tuple[Batch, Rows]:
        """Turn a plan, short spans first, into the rows of a step."""
        lengths = [s.length for s in plan]
        starts = [0, *accumulate(lengths)]
        slots = [s.sequence.slot for s in plan]

        def column(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self.device)

        slot_column, length_column = column(slots), column(lengths)
        row_slots = slot_column.repeat_interleave(length_column)
        offset = column([s.start - r for s, r in zip(plan, starts, strict=False)])
        positions = torch.arange(starts[-1], device=self.device) + offset.repeat_interleave(
            length_column
        )
        ahead = positions - self.length[row_slots]
        tokens = torch.where(
            ahead < 0,
            self.history[row_slots, positions.clamp(max=self.history.shape[1] - 1)],
            draft.tokens[row_slots, ahead.clamp(0, draft.tokens.shape[1] - 1)],
        )
        rows: list[int] = []
        logit_starts, drafted = [], []
        for span, row in zip(plan, starts, strict=False):
            logit_starts.append(len(rows))
            drafted.append(span.drafts if span.ready else -1)
            if span.ready:
                rows.extend(range(row + span.length - span.drafts - 1, row + span.length))
        batch = Batch(
            tokens=tokens,
            positions=positions,
            starts=column(starts),
            slots=slot_column,
            row_slots=row_slots,
            places=cache.table[row_slots, positions // PAGE] * PAGE + positions % PAGE,
            known=length_column - column([s.drafts for s in plan]),
            rows=column(rows),
            split=sum(s.length for s in plan if not s.chunk),
            spans=tuple(
                SpanRows(
                    slot,
                    s.start,
                    s.length,
                    row,
                    s.chunk,
                    cache.fold_of[slot],
                    cache.run(slot, s.start + s.length),
                    s.ready,
                    s.ask,
                )
                for s, slot, row in zip(plan, slots, starts, strict=False)
            ),
        )
        return batch, Rows(
            column(logit_starts),
            column(drafted),
            max(0, *drafted),
        )
