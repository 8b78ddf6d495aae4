"""What kernels are given: batches, caches and packed weights as tensors.

These are plain records. They own nothing and allocate nothing; `engine/` fills them and
`kernels/` reads them. Shapes by letter: T token rows, B spans, R rows with logits, K drafts,
S entries of a draft distribution, H heads, D head size, V vocabulary, N and K of a weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

PAGE = 64  # positions per page: pages, snapshots and prompt chunks share this grid
FOLD = 16  # positions per fold of the recurrent state


class SpanRows(NamedTuple):
    """Host view of one span: consecutive positions of one slot, consecutive rows of the batch."""

    slot: int
    start: int  # absolute position of the first row
    length: int
    row: int  # index of the first row in the batch
    chunk: bool  # True: prompt positions, computed by the long-span kernels
    folded: int  # position up to which the slot's recurrent state is stored
    run: int = -1  # first of the slot's pages up to the span's end if they are consecutive
    ready: bool = True  # the span reaches the last known token, so the step decides a new one
    ask: tuple[int, ...] | None = None  # drafts wanted next, by source; None: all there are


class Batch(NamedTuple):
    """One step's rows. Spans of short rows (generated positions) come first, chunks after."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64, absolute
    starts: Tensor  # [B+1] int64, span b is rows starts[b]:starts[b+1]
    slots: Tensor  # [B] int64, row of every table
    row_slots: Tensor  # [T] int64, the slot of each row
    places: Tensor  # [T] int64, where each row's keys and values go: page * PAGE + offset
    known: Tensor  # [B] int64, rows of the span that are not drafts
    rows: Tensor  # [R] int64, rows that need logits
    split: int  # rows 0:split belong to short spans, the rest to chunks
    spans: tuple[SpanRows, ...]


class PagedKV(NamedTuple):
    """Keys and values of one attention layer, in pages shared by all slots."""

    k: Tensor  # [pages, PAGE, H, D]
    v: Tensor  # [pages, PAGE, H, D]


class Ring(NamedTuple):
    """Keys and values of a sliding window, a row per slot; position p in ring row p % length."""

    k: Tensor  # [slots, ring, H, D]
    v: Tensor  # [slots, ring, H, D]


class GdnState(NamedTuple):
    """One Gated-DeltaNet layer's memory, a row per slot.

    ``state`` holds S at the fold position of the slot (a multiple of FOLD). The rings hold the
    raw inputs of later positions, position p in ring row p % ring length, with the three
    convolution rows before the fold.
    """

    state: Tensor  # [slots, Hv, Dk, Dv]
    u: Tensor  # [slots, ring, C] convolution inputs, C = 2*Hk*Dk + Hv*Dv
    g: Tensor  # [slots, ring, Hv] log decay
    beta: Tensor  # [slots, ring, Hv]


class Dense(NamedTuple):
    """A weight in floating point."""

    weight: Tensor  # [N, K]


class Int4(NamedTuple):
    """A 4-bit weight in canonical form: W = (code - zero) * scale, group by group along K."""

    codes: Tensor  # [K/8, N] int32; field j of word r is row 8r+j, low bits first
    scales: Tensor  # [K/G, N], signed
    zeros: Tensor | None  # [K/G, N] uint8; None: 8 everywhere
    group: int


class Int8(NamedTuple):
    """An 8-bit weight in canonical form: W = (code - 128) * scale, group by group along K."""

    codes: Tensor  # [K/4, N] int32; field j of word r is row 4r+j, low bits first
    scales: Tensor  # [K/G, N]
    zeros: Tensor | None
    group: int


Packed = Dense | Int4 | Int8


class Draft(NamedTuple):
    """Proposed tokens with the short list each was drawn from; a row per slot.

    A point mass (lookup, a greedy drafter) is one list entry of probability 1.
    """

    tokens: Tensor  # [slots, K] int64
    count: Tensor  # type: ignore[assignment]  # [slots] int64
    q_ids: Tensor  # [slots, K, S] int64
    q_prob: Tensor  # [slots, K, S] fp32; unused entries are 0
    # [slots, K] fp32, estimated chance that the position survives; never a function of its token
    score: Tensor
    source: Tensor  # [slots, K] int64, index into the drafters' names


class Verdict(NamedTuple):
    """What a step decided, a row per span."""

    count: Tensor  # type: ignore[assignment]  # [B] int64, positions of the span that became real
    tokens: Tensor  # [B, K+1] int64, newly decided tokens
    added: Tensor  # [B] int64, how many of them; 0 for a chunk that does not end the prompt


class Hidden(NamedTuple):
    """What a forward pass hands on."""

    last: Tensor  # [T, h] after the final norm
    taps: Tensor | None = None  # [T, n*h] residual stream after the tapped layers


DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
