"""Drafts copied from text that is there already: what followed the last time it ended like this.

A match of level n is an earlier occurrence of the last n tokens. The longest level that has one
wins, and within it the most recent occurrence; the draft is what follows there. A continuation
that reaches the end of the text runs on into itself, so periodic text goes on periodically.
Strong matches are also looked for in other requests' text, within one scope (`SharedText`).
Every draft is a point mass. It must not know of models or of the cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice
from operator import mul
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.draft.table import Rule, put_points
from slipstream.kernels.types import Batch, Draft, Hidden, Verdict

LEVELS = (2, 3, 4, 6, 8, 12, 16)
STRONG = 8  # shortest match in another request's text that is believed
BUDGET = 8192  # positions of backlog indexed in one step
SHARED = 131072
_STEP = 0.08  # weight of one more draft in the running acceptance
_SHORT = 24  # up to here token by token is faster than arrays
_FIRST = 1024  # positions of the smallest index
_BLOCK = 64  # tokens of the shared store that are given to a text at once
_PARTS = 4  # of the shared store; the oldest goes as a whole
_CELLS = 2  # cells per n-gram: at most half of them are taken
_MASK = (1 << 64) - 1
_BASE = 0x9E3779B97F4A7C15
_SALT = 0xD1B54A32D192ED03


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


def _mix(h: Any) -> Any:
    """Spread an n-gram's polynomial over 64 bits; for an int, or for an array of uint64."""
    h = ((h ^ (h >> 32)) * 0xD6E8FEB86659FD93) & _MASK
    return h ^ (h >> 29)


class _Grams:
    """Hashes of the n-grams of every level: a polynomial in the tokens modulo 2^64, mixed.

    Different n-grams may share a hash, so whoever finds one compares the tokens.
    """

    def __init__(self, levels: Sequence[int]) -> None:
        self.levels = tuple(levels)
        self.longest = levels[-1]
        self._powers = [pow(_BASE, i, 1 << 64) for i in range(self.longest)]
        self._salts = [_SALT * level & _MASK for level in levels]
        starts = (0, *levels)
        self._parts = [
            (start, level, self._powers[start:level], salt)
            for start, level, salt in zip(starts, levels, self._salts, strict=False)
        ]

    def last(self, tokens: Sequence[int]) -> list[int]:
        """Hashes of the n-grams that ``tokens`` end with, a level each; too long ones are out."""
        h, found = 0, []
        backward = tokens[::-1]
        for start, level, powers, salt in self._parts:
            if level > len(backward):
                break
            h += sum(map(mul, backward[start:level], powers))
            found.append(_mix((h + salt) & _MASK))
        return found

    def stretch(self, tokens: NDArray[Any], new: int) -> Iterator[tuple[int, NDArray[Any]]]:
        """Hashes of all n-grams that end in the last ``new`` of ``tokens``.

        Yields:
            For each level: how many of the new tokens come too early to end one, and the hashes
            [new - that] uint64 for the others.
        """
        longest, before = self.longest, len(tokens) - new
        x = np.zeros(longest - 1 + new, np.uint64)
        x[max(longest - 1 - before, 0) :] = tokens[max(before - longest + 1, 0) :]
        h, done = np.zeros(new, np.uint64), 0
        for level, salt in zip(self.levels, self._salts, strict=True):
            for i in range(done, level):
                start = longest - 1 - i
                h = h + x[start : start + new] * np.uint64(self._powers[i])
            done = level
            early = min(max(level - 1 - before, 0), new)
            yield early, _mix(h[early:] + np.uint64(salt))


class _Index:
    """Where each n-gram ended last: an open-addressing table that never grows.

    A cell is 32 bits of the hash and a 31-bit place above 0; cell 0 is free. The other 32 bits
    say where to look first.
    """

    __slots__ = ("cells", "size", "table")

    def __init__(self, grams: int) -> None:
        self.size = _CELLS * grams
        self.table = np.zeros(self.size, np.int64)
        self.cells = self.table.data

    def find(self, h: int) -> int:
        """The place put last under this hash, or 0."""
        cells, tag = self.cells, h & 0xFFFFFFFF
        at = (h >> 32) * self.size >> 32
        while cell := cells[at]:
            if cell >> 31 == tag:
                return int(cell & 0x7FFFFFFF)
            at = at + 1 if at + 1 < self.size else 0
        return 0

    def put(self, h: int, place: int) -> None:
        cells, tag = self.cells, h & 0xFFFFFFFF
        at = (h >> 32) * self.size >> 32
        while (cell := cells[at]) and cell >> 31 != tag:
            at = at + 1 if at + 1 < self.size else 0
        cells[at] = tag << 31 | place

    def put_all(self, h: NDArray[Any], places: NDArray[Any]) -> None:
        """As `put` for each in turn: of equal hashes the later one stays."""
        at = ((h >> 32) * self.size >> 32).astype(np.int64)
        tags = (h & 0xFFFFFFFF).astype(np.int64)
        cells = tags << 31 | places
        while at.size:
            seen = self.table[at]
            good = (seen == 0) | (seen >> 31 == tags)
            # Of several writes to one cell the last counts. Equal hashes move on together.
            self.table[at[good]] = cells[good]
            left = np.flatnonzero(self.table[at] >> 31 != tags)
            at, tags, cells = at[left] + 1, tags[left], cells[left]
            at[at == self.size] = 0


def _places(indexes: Sequence[_Index], grams: Sequence[int]) -> list[list[tuple[int, int]]]:
    """For each n-gram, short to long, the indexes that have it and its place; newest index first.

    Where a short one is missing, no longer one can be: it would end with the short one.
    """
    found = []
    alive: Sequence[int] = range(len(indexes) - 1, -1, -1)
    for h in grams:
        places = [(i, place) for i in alive if (place := indexes[i].find(h))]
        if not places:
            break
        found.append(places)
        alive = [i for i, _ in places]
    return found


class _Part:
    """A part of the shared store: an index, and who owns each block of its places."""

    __slots__ = ("alive", "index", "owners")

    def __init__(self, grams: int) -> None:
        self.index = _Index(grams)
        self.owners: list[tuple[_Passage, int]] = []  # passage, and its tokens before the block
        self.alive = True

    def clear(self) -> None:
        """Give the memory back, whoever still knows of this part."""
        self.alive = False
        self.owners = []
        self.index = _Index(1)


class _Passage:
    """Consecutive tokens of one text within one part of the store."""

    __slots__ = ("blocks", "next", "part", "scope", "skip", "tokens")

    def __init__(self, scope: str, part: _Part, before: NDArray[Any]) -> None:
        self.scope = scope
        self.part = part
        self.blocks: list[int] = []
        self.tokens = array("i", before.tolist())
        self.skip = len(before)  # tokens that the passage before this one has, too
        self.next: _Passage | None = None

    def after(self, end: int, k: int) -> list[int]:
        """What follows the first ``end`` tokens, in the next passages, too."""
        found = self.tokens[end : end + k].tolist()
        passage = self.next
        while passage and len(found) < k:
            found += passage.tokens[passage.skip : passage.skip + k - len(found)].tolist()
            passage = passage.next
        return found


class _Author:
    """A request that gives its text to the store and takes from it."""

    __slots__ = ("at", "done", "follow", "passage", "salt", "scope")

    def __init__(self, scope: str) -> None:
        self.scope = scope
        self.salt = _mix((crc32(scope.encode()) + 1) * _SALT & _MASK)
        self.done = 0  # tokens of the text that are in the store
        self.passage: _Passage | None = None  # that the text goes on in
        self.follow: _Passage | None = None  # a passage that says the same so far
        self.at = 0  # and how far it does


class SharedText:
    """Text of running and finished requests, for others of the same scope.

    It holds at most ``tokens`` tokens in four parts. A new part takes the place of the oldest,
    whose tokens and index entries are dropped together. A stretch that the scope has already is
    not stored again: the author follows it until the texts part.

    Args:
        tokens: most tokens, at least 256.
        levels: match lengths, ascending.

    Raises:
        ValueError: fewer tokens than that.
    """

    def __init__(self, tokens: int, levels: Sequence[int]) -> None:
        if tokens < _PARTS * _BLOCK:
            raise ValueError(
                f"{tokens} shared tokens are too few: give {_PARTS * _BLOCK} or more, or 0 for none"
            )
        self.levels = tuple(levels)
        self._grams = _Grams(levels)
        self._blocks = tokens // (_PARTS * _BLOCK)  # of one part
        self._parts: list[_Part] = []
        self._open()

    @property
    def tokens(self) -> int:
        """Tokens held, in whole blocks."""
        return _BLOCK * sum(len(part.owners) for part in self._parts)

    def find(
        self, author: _Author, tail: list[int], grams: Sequence[int], above: int, k: int
    ) -> tuple[list[int], int] | None:
        """What followed the longest match that is longer than ``above``, and its length.

        ``grams``: hashes of the n-grams that ``tail`` ends with, a level each as far as it goes.
        """
        levels = [level for level in self.levels[: len(grams)] if level > above]
        if not levels:
            return None
        salted = [h ^ author.salt for h in grams[-len(levels) :]]
        indexes = [part.index for part in self._parts]
        candidates = _places(indexes, salted)
        for level, places in zip(
            reversed(levels[: len(candidates)]), candidates[::-1], strict=True
        ):
            for at, place in places:
                found = self._read(author, self._parts[at], place, tail[-level:])
                if found and (tokens := found[0].after(found[1], k)):
                    return tokens, level
        return None

    def add(
        self, author: _Author, row: NDArray[Any], upto: int, known: Mapping[int, Sequence[int]]
    ) -> None:
        """Enter the author's text ``row[:upto]``, of which ``author.done`` tokens are in.

        ``known``: hashes, as for `find`, of n-grams by where in the text they end.
        """
        while author.done < upto:
            if author.follow:
                self._compare(author, row, upto)
            else:
                self._append(author, row, *self._meeting(author, row, upto), known)

    def _find(self, author: _Author, gram: list[int], h: int) -> tuple[_Passage, int] | None:
        """The most recent passage of the scope that has these tokens, and where they end."""
        for part in reversed(self._parts):
            place = part.index.find(h ^ author.salt)
            if place and (found := self._read(author, part, place, gram)):
                return found
        return None

    def _read(
        self, author: _Author, part: _Part, place: int, gram: list[int]
    ) -> tuple[_Passage, int] | None:
        """The passage at a place and where in it that is, if it is what the hash promised."""
        passage, before = part.owners[(place - 1) // _BLOCK]
        end = before + (place - 1) % _BLOCK + 1
        if (
            passage.scope == author.scope
            and end >= len(gram)
            and passage.tokens[end - len(gram) : end].tolist() == gram
        ):
            return passage, end
        return None

    def _compare(self, author: _Author, row: NDArray[Any], upto: int) -> None:
        """Go along the passage that the author follows, as far as it goes."""
        passage = author.follow
        assert passage
        if not passage.part.alive:
            author.follow = None
        elif author.at >= len(passage.tokens):
            author.follow, author.at = passage.next, passage.next.skip if passage.next else 0
        else:
            most = min(upto - author.done, len(passage.tokens) - author.at)
            theirs = np.array(passage.tokens[author.at : author.at + most])
            differ = np.flatnonzero(row[author.done : author.done + most] != theirs)
            same = int(differ[0]) if differ.size else most
            author.done, author.at = author.done + same, author.at + same
            if same < most:
                author.follow = None

    def _meeting(
        self, author: _Author, row: NDArray[Any], upto: int
    ) -> tuple[int, tuple[_Passage, int] | None]:
        """Up to where to write, and whom to follow from there: a look at the end of each block."""
        longest, least = self.levels[-1], max(self.levels[-1], _BLOCK // 2)
        for p in range(author.done // _BLOCK * _BLOCK + _BLOCK, upto + 1, _BLOCK):
            if p >= least:
                recent = row[p - least : p].tolist()
                h = self._grams.last(recent[-longest:])[-1]
                found = self._find(author, recent[-longest:], h)
                if found:
                    passage, end = found
                    if end >= least and passage.tokens[end - least : end].tolist() == recent:
                        gap = p - author.done
                        same = row[author.done : p].tolist()
                        if end >= gap and passage.tokens[end - gap : end].tolist() == same:
                            return author.done, (passage, end - gap)
                        return p, found
        return upto, None

    def _append(
        self,
        author: _Author,
        row: NDArray[Any],
        stop: int,
        follow: tuple[_Passage, int] | None,
        known: Mapping[int, Sequence[int]],
    ) -> None:
        while author.done < stop:
            passage, part = author.passage, self._parts[-1]
            if passage is None or passage.part is not part:
                passage = self._begin(author, row)
                part = passage.part
            room = len(passage.blocks) * _BLOCK - len(passage.tokens)
            missing = -(-(stop - author.done - room) // _BLOCK)
            for _ in range(min(missing, self._blocks - len(part.owners))):
                self._take(passage)
                room += _BLOCK
            if not room:
                self._open()
                continue
            new = min(room, stop - author.done)
            passage.tokens.extend(row[author.done : author.done + new].tolist())
            self._enter(author, passage, new, known)
            author.done += new
        if follow:
            author.follow, author.at = follow
            author.passage = None

    def _enter(
        self, author: _Author, passage: _Passage, new: int, known: Mapping[int, Sequence[int]]
    ) -> None:
        """Put the n-grams that the last ``new`` tokens of a passage follow into its index.

        So an end of the text that nothing follows yet does not hide an earlier occurrence.
        """
        size, index, longest = len(passage.tokens), passage.part.index, self.levels[-1]
        first = max(size - new, 1)
        if size - first <= _SHORT:
            for end in range(first, size):
                place = passage.blocks[(end - 1) // _BLOCK] * _BLOCK + (end - 1) % _BLOCK + 1
                grams = known.get(author.done + new - (size - end))
                if grams is None:
                    grams = self._grams.last(passage.tokens[max(end - longest, 0) : end].tolist())
                for h in grams:
                    index.put(h ^ author.salt, place)
            return
        ends = np.arange(first - 1, size - 1)
        places = np.array(passage.blocks)[ends // _BLOCK] * _BLOCK + ends % _BLOCK + 1
        tokens = np.array(passage.tokens[max(first - longest, 0) : size - 1])
        for early, hashes in self._grams.stretch(tokens, size - first):
            index.put_all(hashes ^ np.uint64(author.salt), places[early:])

    def _begin(self, author: _Author, row: NDArray[Any]) -> _Passage:
        """A new passage for the author, in a part that has room for it."""
        if len(self._parts[-1].owners) == self._blocks:
            self._open()
        overlap = min(author.done, self.levels[-1] - 1, _BLOCK - 1)
        passage = _Passage(author.scope, self._parts[-1], row[author.done - overlap : author.done])
        self._take(passage)
        if author.passage:
            author.passage.next = passage
        author.passage = passage
        return passage

    def _take(self, passage: _Passage) -> None:
        owners = passage.part.owners
        owners.append((passage, len(passage.blocks) * _BLOCK))
        passage.blocks.append(len(owners) - 1)

    def _open(self) -> None:
        if len(self._parts) == _PARTS:
            self._parts.pop(0).clear()
        self._parts.append(_Part(self._blocks * _BLOCK * len(self.levels)))


class _Text:
    """One slot: its text, where each n-gram ended last, and how drafts of each level did."""

    def __init__(self, row: NDArray[Any], levels: Sequence[int], author: _Author | None) -> None:
        self.row = row
        self.indexes: list[_Index] = []  # of consecutive stretches
        self.covered = 0  # where the last one ends
        self.indexed = 0  # n-grams that end at or before this position are in
        prior = [level / (level + 3.0) for level in levels]
        self.rates = (prior, list(prior))  # of own matches, and of shared ones
        self.author = author
        self.end = 0  # length of the text that `draft` continues
        self.tail: list[int] = []  # its last tokens
        self.grams: dict[int, list[int]] = {}  # the step's hashes, by where the n-grams end
        self.draft: list[int] = []
        self.level = 0  # index of the level `draft` came from
        self.shared = False  # `draft` is from another request


class Lookup(Rule):
    """The drafter. Work per step does not grow with the text.

    Only tokens of the history enter the index, so nothing is ever taken back. At most `BUDGET`
    positions of backlog are indexed in a step (a prefix hit leaves one, for instance); what is
    indexed already serves meanwhile.

    A score is the running acceptance of the level that the match has grown to: behind j drafts
    that stood, a match of level n is one of at least n + j tokens. It depends on the text before
    the block and on j, never on a drafted token, and so may decide who drafts and how much.
    Other requests' text decides what is proposed, as a whole and before anything is drawn, so it
    is part of q; verification makes the text the target's own whatever was proposed.

    Args:
        history: [slots, context+1] int64 on the host: ``history[slot, :length[slot]]`` are all
            known tokens of the slot. The engine appends a step's tokens before it calls
            `observe` and `propose`.
        length: [slots] int64 on the host.
        k: most tokens to draft.
        levels: match lengths that are told apart, ascending.
        shared: tokens of other requests' text to keep; 0: none.

    Raises:
        ValueError: ``levels`` is empty, or not ascending from 1; ``history`` is not on the host;
            ``shared`` is too small.
    """

    names: tuple[str, ...] = ("lookup",)

    def __init__(
        self,
        history: Tensor,
        length: Tensor,
        k: int,
        levels: Sequence[int] = LEVELS,
        shared: int = SHARED,
    ) -> None:
        if not levels or levels[0] < 1 or list(levels) != sorted(set(levels)):
            raise ValueError(f"levels {tuple(levels)} do not ascend from 1")
        if history.device.type != "cpu" or length.device.type != "cpu":
            raise ValueError("lookup reads the history on the host: give it tensors of the CPU")
        self.max_len = k
        self.levels = tuple(levels)
        self._rows, self._ends = history.numpy(), length.numpy()
        self._grams = _Grams(self.levels)
        strong = [level for level in levels if level >= STRONG]
        self.shared = SharedText(shared, strong) if shared and strong else None
        self._texts: dict[int, _Text] = {}
        self._left = BUDGET
        # The index of the level that a match of each level has behind j drafts that stood.
        self._grown = [
            [sum(n <= level + j for n in levels) - 1 for j in range(k)] for level in levels
        ]

    @staticmethod
    def host_bytes(context: int, slots: int, shared: int = SHARED) -> int:
        """Most memory of the indexes, for texts of ``context`` tokens in all of ``slots``.

        It is taken as texts grow, and given back when their slots are.
        """
        own = (context + _FIRST) * len(LEVELS) * _CELLS * 8
        strong = sum(level >= STRONG for level in LEVELS)
        return slots * own + shared * (strong * _CELLS * 8 + 8)

    def reset(self, slot: int, scope: str = "", share: bool = True) -> None:
        """The slot belongs to another sequence from now on, of this scope.

        ``share``: its text may help other requests of the scope, and theirs help it.
        """
        author = _Author(scope) if share and self.shared else None
        self._texts[slot] = _Text(self._rows[slot], self.levels, author)

    def observe(self, batch: Batch, hidden: Hidden | None, verdict: Verdict) -> None:
        """Index the step's positions, and see how far the last draft was right.

        It counts every decided token, whoever proposed it.
        """
        self._left = BUDGET
        added, decided = verdict.added.tolist(), verdict.tokens.tolist()
        for b, span in enumerate(batch.spans):
            text = self._text(span.slot)
            if added[b]:
                self._judge(text, decided[b][: added[b]])
            else:
                end = self._end(span.slot)
                self._advance(text, min(span.start + span.length, end), end)

    def propose(self, batch: Batch, verdict: Verdict, out: Draft) -> None:
        """Draft for every span that decided a token; the other slots get none."""
        added = verdict.added.tolist()
        slots, drafts, scores = [], [], []
        for b, span in enumerate(batch.spans):
            most = self.max_len if span.ask is None else min(self.max_len, span.ask[0])
            draft, score = self._next(span.slot) if added[b] else ([], [])
            slots.append(span.slot)
            drafts.append(draft[:most])
            scores.append(score[:most])
        put_points(out, slots, drafts, scores)

    def extend(self, slot: int, drafts: Sequence[int], k: int) -> tuple[list[int], list[float]]:
        """What would follow the text and ``drafts``; for positions behind another drafter's.

        Args:
            slot: a slot that `propose` was just called for.
            drafts: tokens assumed to follow the text.
            k: most tokens to return.

        Returns:
            Tokens and the score of each; both empty without a match.
        """
        text = self._text(slot)
        if not drafts:  # the text's end is indexed by now and would be its own answer
            tokens, level, shared = text.draft[:k], text.level, text.shared
        else:
            tokens, level, shared = self._match(text, list(drafts), k)
        return tokens, self._scores(text, level, shared, len(tokens))

    def _text(self, slot: int) -> _Text:
        if slot not in self._texts:
            self.reset(slot)
        return self._texts[slot]

    def _end(self, slot: int) -> int:
        return min(int(self._ends[slot]), int(self._rows.shape[1]))

    def _scores(self, text: _Text, level: int, shared: bool, k: int) -> list[float]:
        rates, grown = text.rates[shared], self._grown[level]
        return [rates[grown[min(j, len(grown) - 1)]] for j in range(k)]

    def _advance(self, text: _Text, upto: int, end: int) -> None:
        """Enter all n-grams that end at or before ``upto``, as far as the step's budget goes.

        ``end``: known tokens of the text.
        """
        # A few tokens always go in, so that a backlog elsewhere does not hold up decoding.
        stop = min(upto, text.indexed + max(self._left, 2 * _SHORT))
        self._left -= max(stop - text.indexed, 0)
        while text.indexed < stop:
            if text.indexed == text.covered:
                # As much again as there is; a prompt is known from the start.
                room = max(_FIRST, text.indexed, end - text.indexed)
                room = min(room, len(text.row) - text.indexed)
                text.indexes.append(_Index(room * len(self.levels)))
                text.covered += room
            part = min(stop, text.covered)
            self._enter(text, part)
            text.indexed = part
        if text.author and self.shared:
            first = len(self.levels) - len(self.shared.levels)
            known = {end: grams[first:] for end, grams in text.grams.items()}
            self.shared.add(text.author, text.row, text.indexed, known)
        last = text.grams.get(text.indexed)
        text.grams = {text.indexed: last} if last else {}

    def _enter(self, text: _Text, stop: int) -> None:
        index, row, first, longest = text.indexes[-1], text.row, text.indexed, self.levels[-1]
        if stop - first <= _SHORT:
            start = max(first + 1 - longest, 0)
            tokens = row[start:stop].tolist()
            for end in range(first + 1, stop + 1):
                grams = text.grams.get(end)
                if grams is None:
                    grams = self._grams.last(tokens[max(end - longest, 0) - start : end - start])
                    text.grams[end] = grams
                for h in grams:
                    index.put(h, end)
            return
        ends = np.arange(first + 1, stop + 1)
        stretch = row[max(first - longest + 1, 0) : stop]
        for early, hashes in self._grams.stretch(stretch, stop - first):
            index.put_all(hashes, ends[early:])

    def _match(self, text: _Text, extra: list[int], k: int) -> tuple[list[int], int, bool]:
        """What followed text and ``extra`` last time, the index of its level, and if it is shared.

        Own text wins over a shared match that is not longer.
        """
        row, size = text.row, text.end
        tail = (text.tail + extra)[-self.levels[-1] :]
        grams = self._grams.last(tail)
        if not extra:
            text.grams[size] = grams
        found, at = 0, 0
        candidates = _places(text.indexes, grams)
        for at in range(len(candidates) - 1, -1, -1):
            level = self.levels[at]
            for _, end in candidates[at]:
                # Different tokens may share a hash: compare.
                if end >= level and row[end - level : end].tolist() == tail[-level:]:
                    found = end
                    break
            if found:
                break
        if self.shared and text.author:
            strong = grams[len(self.levels) - len(self.shared.levels) :]
            above = self.levels[at] if found else 0
            best = self.shared.find(text.author, tail, strong, above, k)
            if best:
                return best[0], self.levels.index(best[1]), True
        if not found:
            return [], 0, False
        tokens = row[found : min(size, found + k)].tolist() + extra
        return list(islice(cycle(tokens), k)), at, False

    def _next(self, slot: int) -> tuple[list[int], list[float]]:
        text = self._text(slot)
        end = self._end(slot)
        if text.end < end:
            # The suffix itself goes in after the question, or it would be its own answer.
            self._advance(text, end - 1, end)
            text.end = end
            text.tail = text.row[max(end - self.levels[-1], 0) : end].tolist()
            text.draft, text.level, text.shared = self._match(text, [], self.max_len)
            self._advance(text, end, end)
        return text.draft, self._scores(text, text.level, text.shared, len(text.draft))

    def _judge(self, text: _Text, decided: list[int]) -> None:
        rates, grown = text.rates[text.shared], self._grown[text.level]
        for j, (drafted, token) in enumerate(zip(text.draft, decided, strict=False)):
            rates[grown[j]] += _STEP * ((drafted == token) - rates[grown[j]])
            if drafted != token:
                break
        text.draft = []
