"""Several drafters as one.

The output stays exact only under this law: **the source of position j, and whether j is drafted
or verified at all, may depend on the text, on the drafts before j and on the list q_j as a whole,
never on the draft at j.** Anything computed from the draft at j falls under it too: the list of
position j + 1 and its score, for one. So a block is put together from the front: position j is
given to somebody knowing the drafts before it and the scores at j, and nothing behind j.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from slipstream.draft.table import empty
from slipstream.kernels.types import Batch, Draft, Hidden, Verdict
from slipstream.models.stores import Store
from slipstream.models.view import CacheView


class Child(Protocol):
    """A drafter, as `engine.protocols.Drafter`."""

    stores: tuple[Store, ...]
    taps: tuple[int, ...]
    max_len: int
    width: int
    names: tuple[str, ...]
    reach: int

    def bind(self, cache: CacheView, first: int) -> None: ...
    def reset(self, slot: int, scope: str = "", share: bool = True) -> None: ...

    def observe(self, batch: Batch, hidden: Hidden, verdict: Verdict) -> None: ...

    def propose(self, batch: Batch, verdict: Verdict, out: Draft) -> None: ...


class Tail(Child, Protocol):
    """A drafter by rule that can go on from any point, as `draft.lookup.Lookup`."""

    max_len: int

    def extend(self, slot: int, drafts: Sequence[int], k: int) -> tuple[list[int], list[float]]: ...


SURE = 0.9  # a rule's score from which model drafters need not run for a slot


class Fuse:
    """Position by position, the best score drafts; among equals the earlier child.

    A child takes part at position j as long as its own drafts before j are those of the block.
    ``tail`` takes part at every position: it continues the text and the block so far, as point
    masses, also behind the others' blocks. Where a model has a list for the position, half of the
    copy's score is what that list gives to its token.

    Args:
        children: the drafters, in order of priority.
        slots: rows of the draft tables.
        tail: a rule for every position; usually the lookup among the children. Its
            index must be up to date when it is asked, so it should be one of the children.
        tail_source: name of the tail in ``names``.
        device: where the children's drafts are kept.

    Raises:
        ValueError: no children, or ``tail_source`` is not among their names.
    """

    def __init__(
        self,
        *children: Child,
        slots: int,
        tail: Tail | None = None,
        tail_source: str = "lookup",
        device: torch.device | str = "cpu",
    ) -> None:
        if not children:
            raise ValueError("nothing to fuse: give at least one drafter")
        self.stores: tuple[Store, ...] = tuple(s for c in children for s in c.stores)
        self.taps: tuple[int, ...] = tuple(sorted({t for c in children for t in c.taps}))
        self.max_len = max(c.max_len for c in children)
        self.width = max(c.width for c in children)
        self.names: tuple[str, ...] = tuple(n for c in children for n in c.names)
        self.reach = max(c.reach for c in children)
        if tail is not None and tail_source not in self.names:
            raise ValueError(f"the tail's name {tail_source!r} is not among {self.names}")
        self.children = children
        self._tail = tail
        self._tail_source = self.names.index(tail_source) if tail is not None else 0
        k, s = self.max_len, self.width
        self._drafts = [empty(slots, k, s, device) for _ in children]
        first = [0]
        for child in children:
            first.append(first[-1] + len(child.names))
        self._first = first[:-1]
        models = [c.max_len for c in children if c.stores]
        self._block = max(models, default=0)  # drafts of the longest model block

    def bind(self, cache: CacheView, first: int) -> None:
        """The children's stores follow one another in the cache."""
        for child in self.children:
            child.bind(cache, first)
            first += len(child.stores)

    def reset(self, slot: int, scope: str = "", share: bool = True) -> None:
        """The slot belongs to another sequence from now on."""
        for child in self.children:
            child.reset(slot, scope, share)

    def observe(self, batch: Batch, hidden: Hidden, verdict: Verdict) -> None:
        """Every child hears of every step, whoever drafted, and sees its own taps."""
        for child in self.children:
            child.observe(batch, self._view(hidden, child.taps), verdict)

    def _view(self, hidden: Hidden, taps: tuple[int, ...]) -> Hidden:
        if hidden is None or hidden.taps is None or taps == self.taps:
            return hidden
        if not taps:
            return hidden._replace(taps=None)
        parts = hidden.taps.unflatten(-1, (len(self.taps), -1))
        return hidden._replace(taps=parts[:, [self.taps.index(t) for t in taps]].flatten(1))

    def propose(self, batch: Batch, verdict: Verdict, out: Draft) -> None:
        """Let the children draft, and write one block per slot to ``out``."""
        slots = batch.slots.tolist()
        sure = [False] * len(slots)
        for child, draft, first in zip(self.children, self._drafts, self._first, strict=True):
            asked = self._asked(batch, child, first, sure)
            child.propose(asked, verdict, draft)
            if not child.stores:  # a rule costs nothing: where it is sure, no model need run
                score = draft.score[batch.slots, 0].tolist()
                full = (draft.count[batch.slots] >= self._block).tolist()
                sure = [s or (f and x >= SURE) for s, f, x in zip(sure, full, score, strict=True)]
        blocks = [self._block_of(slot) for slot in slots]
        self._write(batch.slots, blocks, out)

    def _asked(self, batch: Batch, child: Child, first: int, sure: Sequence[bool]) -> Batch:
        """The batch as a child sees it: what is asked of its own sources."""
        own = slice(first, first + len(child.names))
        model = bool(child.stores)
        spans = []
        for span, skip in zip(batch.spans, sure, strict=True):
            ask = span.ask if span.ask is None else span.ask[own]
            spans.append(span._replace(ask=(0,) * len(child.names) if model and skip else ask))
        return batch._replace(spans=tuple(spans))

    def _block_of(self, slot: int) -> list[tuple[int, int, float]]:
        """For each position of a slot's block: who drafts it, its token and its score.

        The child -1 is the tail, whose token was not in any child's table.
        """
        drafts: list[tuple[list[int], list[float]]] = []
        copy: tuple[list[int], list[float]] = ([], [])
        for drafter, draft in zip(self.children, self._drafts, strict=True):
            count = int(draft.count[slot])
            tokens, scores = draft.tokens[slot, :count], draft.score[slot, :count]
            drafts.append((tokens.tolist(), scores.tolist()) if count else ([], []))
            if drafter is self._tail:
                copy, drafts[-1] = drafts[-1], ([], [])
        alive = [bool(tokens) for tokens, _ in drafts]
        limit = self.max_len
        if self._tail is not None and not any(alive):
            # Nothing to choose between: the copy as it is.
            return [(-1, t, s) for t, s in zip(*copy, strict=True)]
        block: list[tuple[int, int, float]] = []
        at, stale = 0, False  # how far into the copy the block is; whether it left the copy
        while len(block) < limit:
            j = len(block)
            if self._tail is not None and j and (stale or at >= len(copy[0])):
                # The copy begins anew behind the drafts so far; they are known, so it may.
                copy, at, stale = self._copy(slot, [b[1] for b in block], limit - j), 0, False
            options = [
                (drafts[c][1][j], -c, c)
                for c, yes in enumerate(alive)
                if yes and j < len(drafts[c][0])
            ]
            child, token, score = -2, 0, -1.0
            if options:
                score, _, child = max(options)
                token = drafts[child][0][j]
            if at < len(copy[0]):
                believed = copy[1][at]
                if options:
                    # A model that sees the same text knows more of it than the match does.
                    believed = (believed + self._share(child, slot, j, copy[0][at])) / 2
                if believed > score:
                    child, token, score = -1, copy[0][at], believed
            if child == -2:
                break
            block.append((child, token, score))
            for c, yes in enumerate(alive):
                alive[c] = yes and j < len(drafts[c][0]) and drafts[c][0][j] == token
            stale = at < len(copy[0]) and copy[0][at] != token
            at += 1
        return block

    def _share(self, child: int, slot: int, position: int, token: int) -> float:
        """The probability that a child's list at a position gives to a token."""
        draft = self._drafts[child]
        ids, prob = draft.q_ids[slot, position], draft.q_prob[slot, position]
        return float(prob[ids == token].sum())

    def _copy(self, slot: int, drafts: list[int], k: int) -> tuple[list[int], list[float]]:
        assert self._tail is not None
        k = min(k, self._tail.max_len - len(drafts))
        return self._tail.extend(slot, drafts, k) if k > 0 else ([], [])

    def _write(
        self, slots: Tensor, blocks: Sequence[Sequence[tuple[int, int, float]]], out: Draft
    ) -> None:
        """Copy lists from the children's tables, and put the tail's point masses between them."""
        k, s, device = self.max_len, self.width, slots.device

        def column(part: int, empty: float) -> list[list[float]]:
            return [[b[part] for b in block] + [empty] * (k - len(block)) for block in blocks]

        child = torch.tensor(column(0, -2), dtype=torch.int64, device=device)
        tokens = torch.tensor(column(1, 0), dtype=torch.int64, device=device)
        score = torch.tensor(column(2, 0.0), dtype=out.score.dtype, device=device)
        pick = child.clamp(min=0)

        def chosen(field: str) -> Tensor:
            every = torch.stack([getattr(d, field)[slots, :k] for d in self._drafts])
            at = pick.view(1, *pick.shape, *[1] * (every.dim() - 3))
            return every.gather(0, at.expand(1, *every.shape[1:]))[0]

        drawn = (child >= 0)[..., None]
        ids = torch.where(drawn, chosen("q_ids"), 0)
        prob = torch.where(drawn, chosen("q_prob"), 0.0)
        copied = child == -1
        ids[..., 0] = torch.where(copied, tokens, ids[..., 0])
        prob[..., 0] = torch.where(copied, 1.0, prob[..., 0])
        source = chosen("source") + torch.tensor(self._first, device=device)[pick]
        out.count[slots] = torch.tensor([len(b) for b in blocks], device=device)
        out.tokens[slots, :k] = tokens
        out.q_ids[slots] = 0
        out.q_prob[slots] = 0.0
        out.q_ids[slots, :k, :s] = ids
        out.q_prob[slots, :k, :s] = prob
        out.score[slots] = 0.0
        out.score[slots, :k] = score
        out.source[slots, :k] = torch.where(copied, self._tail_source, source)
