"""Several drafters as one.

The output stays exact only under this law: **the source of position j, and whether j is drafted
or verified at all, may depend on the text, on the drafts before j and on the list q_j as a whole,
never on the draft at j.** Anything computed from the draft at j falls under it too: the list of
position j + 1 and its score, for one. So the block is chosen by the scores of the first position,
which know the text alone, and what happens behind a block may look at the drafts in it.
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


class Tail(Protocol):
    """A drafter by rule that can go on from any point, as `draft.lookup.Lookup`."""

    max_len: int

    def extend(self, slot: int, drafts: Sequence[int], k: int) -> tuple[list[int], list[float]]: ...


class Fuse:
    """The first position's best score takes the block; a rule may go on behind it.

    Per slot, the child whose first position has the highest score drafts the whole block; among
    equals the earlier child. If the block is shorter than ``max_len``, ``tail`` continues after
    the text and the block, as point masses.

    Args:
        children: the drafters, in order of priority.
        slots: rows of the draft tables.
        tail: a rule for positions behind a block; usually the lookup among the children. Its
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
        self._first = torch.tensor(first[:-1], dtype=torch.int64, device=device)

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
        """Let every child draft, and copy one block per slot to ``out``."""
        for child, draft in zip(self.children, self._drafts, strict=True):
            child.propose(batch, verdict, draft)
        slots, k, s = batch.slots, self.max_len, self.width
        counts = torch.stack([d.count[slots] for d in self._drafts])  # [children, B]
        # The first position only: later scores know what was drafted before them.
        first = torch.stack([d.score[slots, 0] for d in self._drafts])
        winner = torch.where(counts > 0, first, -1.0).argmax(0)

        def pick(field: str) -> Tensor:
            every = torch.stack([getattr(d, field)[slots] for d in self._drafts])
            at = winner.view(1, -1, *[1] * (every.dim() - 2)).expand(1, *every.shape[1:])
            return every.gather(0, at)[0]

        count = pick("count")
        exists = torch.arange(k, device=slots.device) < count[:, None]
        out.count[slots] = count
        out.tokens[slots, :k] = torch.where(exists, pick("tokens"), 0)
        out.q_ids[slots] = 0
        out.q_prob[slots] = 0.0
        out.q_ids[slots, :k, :s] = pick("q_ids")
        out.q_prob[slots, :k, :s] = torch.where(exists[:, :, None], pick("q_prob"), 0.0)
        out.score[slots] = 0.0
        out.score[slots, :k] = torch.where(exists, pick("score"), 0.0)
        out.source[slots, :k] = pick("source") + self._first[winner][:, None]
        if self._tail is not None:
            self._continue(self._tail, slots.tolist(), out)

    def _continue(self, tail: Tail, slots: Sequence[int], out: Draft) -> None:
        limit = min(tail.max_len, self.max_len)
        for slot in slots:
            count = int(out.count[slot])
            if not 0 < count < limit:
                continue
            drafts = out.tokens[slot, :count].tolist()
            tokens, scores = tail.extend(slot, drafts, limit - count)
            stop = count + len(tokens)
            out.tokens[slot, count:stop] = torch.tensor(tokens, dtype=torch.int64)
            out.q_ids[slot, count:stop, 0] = torch.tensor(tokens, dtype=torch.int64)
            out.q_prob[slot, count:stop, 0] = 1.0
            out.score[slot, count:stop] = torch.tensor(scores, dtype=out.score.dtype)
            out.source[slot, count:stop] = self._tail_source
            out.count[slot] = stop
