"""Drafts copied from the request's own text: what followed the last time it ended like this.

A match of level n is an earlier occurrence of the last n tokens. The longest level that has one
wins, and within it the most recent occurrence; the draft is what follows there. A continuation
that reaches the end of the text runs on into itself, so periodic text goes on periodically.
Every draft is a point mass, and its score depends on the text alone: on the level, and on how
often drafts of that level were right in this request.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.draft.table import Rule, put_points
from slipstream.kernels.types import Batch, Draft, Hidden, Verdict

LEVELS = (2, 3, 4, 6, 8, 12, 16)
_STEP = 0.08  # weight of one more draft in the running acceptance


def suffix_match(
    text: Tensor, length: Tensor, k: int, levels: Sequence[int] = LEVELS
) -> tuple[Tensor, Tensor, Tensor]:
    """Longest suffix match by a scan of the whole text: the definition of a lookup draft.

    Args:
        text: [N, C] int64, tokens of each sequence from column 0.
        length: [N] int64, tokens that count.
        k: tokens to copy.
        levels: match lengths that are told apart, ascending.

    Returns:
        tokens [N, k] (0 without a match), level [N] of the match (0: none), count [N] (k or 0).
    """
    rows, width = text.shape
    device = text.device
    ends = torch.arange(1, width + 1, device=device)  # an occurrence is text[end - n : end]
    earlier = ends < length[:, None]
    alive = earlier
    best = torch.zeros(rows, dtype=torch.int64, device=device)  # level * (width + 1) + end
    for back in range(1, levels[-1] + 1):
        # Column e-1 holds text[e - back]; ends that reach before the text never match.
        moved = torch.full_like(text, -1)
        if back <= width:
            moved[:, back - 1 :] = text[:, : width - back + 1]
        last = text.gather(1, (length - back).clamp(min=0, max=width - 1)[:, None])
        alive = alive & (moved == last) & (length >= back)[:, None]
        if back in levels:
            found = torch.where(alive, ends + back * (width + 1), 0).amax(1)
            best = torch.maximum(best, found)
    level, end = best // (width + 1), best % (width + 1)
    period = (length - end).clamp(min=1)
    source = end[:, None] + torch.arange(k, device=device) % period[:, None]
    tokens = text.gather(1, source.clamp(0, width - 1))
    hit = level > 0
    return torch.where(hit[:, None], tokens, 0), level, torch.where(hit, k, 0)


class _Text:
    """One slot: its text, where each n-gram ended last, and how drafts of each level did."""

    def __init__(self, levels: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.indexed = 0  # n-grams that end at or before this position are in `last`
        self.last: list[dict[int, int]] = [{} for _ in levels]
        self.rate = [level / (level + 2.0) for level in levels]
        self.draft: list[int] = []
        self.level = 0  # index of the level `draft` came from


class Lookup(Rule):
    """The drafter. Work per step does not grow with the text: one dictionary per level.

    Only tokens of the history enter the index, so nothing is ever taken back.

    Args:
        history: [slots, context+1] int64 on the host: ``history[slot, :length[slot]]`` are all
            known tokens of the slot. The engine appends a step's tokens before it calls
            `observe` and `propose`.
        length: [slots] int64 on the host.
        k: most tokens to draft.
        levels: match lengths that are told apart, ascending.

    Raises:
        ValueError: ``levels`` is empty, or not ascending from 1.
    """

    names: tuple[str, ...] = ("lookup",)

    def __init__(
        self, history: Tensor, length: Tensor, k: int, levels: Sequence[int] = LEVELS
    ) -> None:
        if not levels or levels[0] < 1 or list(levels) != sorted(set(levels)):
            raise ValueError(f"levels {tuple(levels)} do not ascend from 1")
        self.max_len = k
        self.levels = tuple(levels)
        self._history = history
        self._length = length
        self._texts: dict[int, _Text] = {}

    def reset(self, slot: int, scope: str = "", share: bool = True) -> None:
        """The slot belongs to another sequence from now on."""
        self._texts.pop(slot, None)

    def observe(self, batch: Batch, hidden: Hidden | None, verdict: Verdict) -> None:
        """Index the step's positions, and see how far the last draft was right.

        It counts every decided token, whoever proposed it.
        """
        added, decided = verdict.added.tolist(), verdict.tokens.tolist()
        for b, span in enumerate(batch.spans):
            text = self._text(span.slot)
            if added[b]:
                self._judge(text, decided[b][: added[b]])
            else:
                self._index(span.slot, text, span.start + span.length)

    def propose(self, batch: Batch, verdict: Verdict, out: Draft) -> None:
        """Draft for every span that decided a token; the other slots get none."""
        added = verdict.added.tolist()
        slots, drafts, scores = [], [], []
        for b, span in enumerate(batch.spans):
            draft, score = self._next(span.slot) if added[b] else ([], 0.0)
            slots.append(span.slot)
            drafts.append(draft)
            scores.append([score] * len(draft))
        put_points(out, slots, drafts, scores)

    def extend(self, slot: int, drafts: Sequence[int], k: int) -> tuple[list[int], list[float]]:
        """What would follow the text and ``drafts``; for positions behind another drafter's.

        Args:
            slot: a slot that `propose` was just called for.
            drafts: tokens assumed to follow the text.
            k: most tokens to return.

        Returns:
            Tokens and their scores; both empty without a match.
        """
        draft, level = self._match(self._text(slot), list(drafts), k)
        return draft, [self._text(slot).rate[level]] * len(draft)

    def _text(self, slot: int) -> _Text:
        return self._texts.setdefault(slot, _Text(self.levels))

    def _index(self, slot: int, text: _Text, upto: int) -> None:
        """Enter all n-grams that end at or before ``upto``, or before the text's end."""
        end = int(self._length[slot])
        have = len(text.tokens)
        if end > have:
            text.tokens += self._history[slot, have:end].tolist()
        tokens, upto = text.tokens, min(upto, end)
        for level, last in zip(self.levels, text.last, strict=True):
            for stop in range(max(text.indexed + 1, level), upto + 1):
                last[hash(tuple(tokens[stop - level : stop]))] = stop
        text.indexed = max(text.indexed, upto)

    def _match(self, text: _Text, extra: list[int], k: int) -> tuple[list[int], int]:
        """Continuation of the text followed by ``extra``, and the index of its level."""
        tokens = text.tokens
        size = len(tokens)
        tail = tokens[max(size - self.levels[-1], 0) :] + extra
        for at in range(len(self.levels) - 1, -1, -1):
            level = self.levels[at]
            if level > len(tail):
                continue
            suffix = tail[-level:]
            end = text.last[at].get(hash(tuple(suffix)), 0)
            # Different tokens may share a hash: compare.
            if end and tokens[end - level : end] == suffix:
                period = size + len(extra) - end
                source = [end + i % period for i in range(k)]
                return [tokens[i] if i < size else extra[i - size] for i in source], at
        return [], 0

    def _next(self, slot: int) -> tuple[list[int], float]:
        text = self._text(slot)
        end = int(self._length[slot])
        if text.indexed < end:
            # The suffix itself goes in after the question, or it would be its own answer.
            self._index(slot, text, end - 1)
            text.draft, text.level = self._match(text, [], self.max_len)
            self._index(slot, text, end)
        return text.draft, text.rate[text.level]

    def _judge(self, text: _Text, decided: list[int]) -> None:
        rate = text.rate[text.level]
        for drafted, token in zip(text.draft, decided, strict=False):
            rate += _STEP * ((drafted == token) - rate)
            if drafted != token:
                break
        text.rate[text.level] = rate
        text.draft = []
