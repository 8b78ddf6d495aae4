"""The draft tables: how they are made and filled. Also what drafters without a model share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from slipstream.kernels.types import Batch, Draft, Hidden, Verdict
from slipstream.models.stores import Store
from slipstream.models.view import CacheView


def empty(slots: int, k: int, s: int, device: torch.device | str = "cpu") -> Draft:
    """Draft tables of ``slots`` rows without any draft; k positions, lists of s entries."""
    integer = torch.int64
    return Draft(
        tokens=torch.zeros(slots, k, dtype=integer, device=device),
        count=torch.zeros(slots, dtype=integer, device=device),
        q_ids=torch.zeros(slots, k, s, dtype=integer, device=device),
        q_prob=torch.zeros(slots, k, s, device=device),
        score=torch.zeros(slots, k, device=device),
        source=torch.zeros(slots, k, dtype=integer, device=device),
    )


def put_points(
    out: Draft,
    slots: Sequence[int],
    drafts: Sequence[Sequence[int]],
    scores: Sequence[Sequence[float]],
    source: int = 0,
) -> None:
    """Write point masses: for each slot its drafts from position 0 on, and their scores."""
    if not slots:
        return
    device, k = out.tokens.device, out.tokens.shape[1]
    where = torch.tensor(list(slots), device=device)
    ids = torch.tensor(
        [list(d) + [0] * (k - len(d)) for d in drafts], dtype=torch.int64, device=device
    )
    count = torch.tensor([len(d) for d in drafts], dtype=torch.int64, device=device)
    exists = torch.arange(k, device=device) < count[:, None]
    out.tokens[where] = ids
    out.count[where] = count
    out.q_ids[where] = 0
    out.q_prob[where] = 0.0
    out.q_ids[where, :, 0] = ids
    out.q_prob[where, :, 0] = exists.to(out.q_prob.dtype)
    out.score[where] = torch.tensor(
        [list(s) + [0.0] * (k - len(s)) for s in scores], dtype=out.score.dtype, device=device
    )
    out.source[where] = source


def put_lists(
    out: Draft,
    slots: Tensor,
    position: int,
    token: Tensor,
    ids: Tensor,
    prob: Tensor,
    score: Tensor,
    source: int = 0,
) -> None:
    """Write the drafts of one position for slots [N]: token [N] out of lists ids, prob [N, s]."""
    out.tokens[slots, position] = token
    out.q_ids[slots, position] = 0
    out.q_prob[slots, position] = 0.0
    out.q_ids[slots, position, : ids.shape[1]] = ids
    out.q_prob[slots, position, : ids.shape[1]] = prob.to(out.q_prob.dtype)
    out.score[slots, position] = score.to(out.score.dtype)
    out.source[slots, position] = source


class Choose(Protocol):
    """Draws a draft out of a short list, the way the request samples."""

    def __call__(
        self, ids: Tensor, logits: Tensor, slots: Tensor, position: Tensor, anchor: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One of the candidates of each row, and the distribution it was drawn from.

        Args:
            ids: [N, s] candidates of each row, distinct.
            logits: [N, s] their scores before temperature.
            slots: [N].
            position: [N] of the token that is drafted.
            anchor: [N] first position that the step which verifies it decides.

        Returns:
            token [N] and prob [N, s]; a point mass for a greedy request.
        """
        ...


class Asked(NamedTuple):
    """Who wants drafts of a source after this step."""

    spans: list[int]  # indices into the batch's spans
    counts: Tensor  # [N] int64 on the host: how many each


def asked(batch: Batch, source: int, most: int) -> Asked:
    """Spans that decide a token and want drafts of ``source``, and how many, at most ``most``."""
    spans, counts = [], []
    for b, span in enumerate(batch.spans):
        count = most if span.ask is None else min(most, span.ask[source])
        if span.ready and count > 0:
            spans.append(b)
            counts.append(count)
    return Asked(spans, torch.tensor(counts, dtype=torch.int64))


def committed(batch: Batch, verdict: Verdict, wanted: Asked) -> tuple[Tensor, Tensor, Tensor]:
    """Where those spans stand after the step.

    Returns:
        slots [N], end [N] (committed positions, which is also the position of the newest token)
        and token [N], the newest token; all on the device.
    """
    at = torch.tensor(wanted.spans, device=batch.slots.device)
    end = batch.positions[batch.starts[at]] + verdict.count[at]
    token = verdict.tokens[at].gather(1, verdict.added[at, None] - 1)[:, 0]
    return batch.slots[at], end, token


def newest(batch: Batch, ring: int) -> tuple[Tensor, Tensor]:
    """Rows of the batch that a ring of this length keeps, and where: [n] rows, [n] ring rows."""
    parts = [torch.arange(s.row + max(0, s.length - ring), s.row + s.length) for s in batch.spans]
    rows = torch.cat(parts).to(batch.positions.device)
    return rows, batch.positions[rows] % ring


class Rule:
    """A drafter that is a rule over tokens: no weights, no memory in the cache, no taps."""

    stores: tuple[Store, ...] = ()
    taps: tuple[int, ...] = ()
    width = 1
    reach = 0

    def bind(self, cache: CacheView, first: int) -> None:
        """Nothing of the cache is needed."""

    def reset(self, slot: int, scope: str = "", share: bool = True) -> None:
        """The slot belongs to another sequence from now on."""

    def observe(self, batch: Batch, hidden: Hidden, verdict: Verdict) -> None:
        """Nothing is learned from a step."""
