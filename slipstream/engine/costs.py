"""What a step costs on this machine: plain numbers, measured once before the first request.

The prices decide only how much is drafted, never what is written. They are compared with each
other, so a machine that slows down as a whole, or a context that makes every row dearer alike,
changes no decision; that is why nothing corrects them while the engine runs. Knows no tensor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median
from time import perf_counter

ROWS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Price:
    """What one source takes to draft, in ms: ``fixed + count * each``, nothing for no drafts.

    ``most``: drafts it makes at once.
    """

    fixed: float = 0.0
    each: float = 0.0
    most: int = 64

    def of(self, count: int) -> float:
        """ms for so many drafts."""
        return self.fixed + count * self.each if count > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Costs:
    """ms of a step by its short rows, and of drafting by source.

    Args:
        rows: (rows, ms) with ascending rows. Between two entries the time is interpolated, behind
            the last it rises like between the last two. Time never falls with rows: an entry
            below the one before it is noise and is raised.
        sources: prices by name; a source that is missing costs nothing.

    Raises:
        ValueError: the rows do not ascend from 1 or more, or a time is not above 0.
    """

    rows: tuple[tuple[int, float], ...]
    sources: Mapping[str, Price] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = [n for n, _ in self.rows]
        if not counts or counts[0] < 1 or counts != sorted(set(counts)):
            raise ValueError(f"rows {counts} must ascend from 1 or more: measure at 1, 2, 4, ...")
        if not all(0 < ms < float("inf") for _, ms in self.rows):
            raise ValueError(f"times {[ms for _, ms in self.rows]} must be above 0 ms")
        if any(not 0 <= x < float("inf") for p in self.sources.values() for x in (p.fixed, p.each)):
            raise ValueError(f"prices {dict(self.sources)} must be 0 ms or more")
        times = accumulate((ms for _, ms in self.rows), max)
        object.__setattr__(self, "rows", tuple(zip(counts, times, strict=True)))

    @classmethod
    def flat(cls, row_cost: float) -> Costs:
        """One more row costs ``row_cost`` one-row steps, drafting nothing. A step takes 1 ms."""
        return cls(((1, 1.0), (2, 1.0 + row_cost)))

    @classmethod
    def measure(
        cls,
        step: Callable[[int], object],
        sources: Mapping[str, tuple[Callable[[int], object], int]],
        *,
        rows: Sequence[int] = ROWS,
        repeats: int = 5,
        clock: Callable[[], float] = perf_counter,
    ) -> Costs:
        """Time a step and the drafters. Rounds are interleaved, so that a drift hits all alike.

        Args:
            step: runs one step of so many short rows; on a device it waits for the end.
            sources: by name, what drafts a number of tokens, and the most it drafts.
            rows: row counts to time, ascending.
            repeats: rounds after one to warm up; medians count.
            clock: seconds.
        """
        runs: dict[tuple[str, int], Callable[[int], object]] = {("", n): step for n in rows}
        for name, (draft, most) in sources.items():
            runs |= {(name, n): draft for n in {1, most} if n > 0}
        taken: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
        for turn in range(repeats + 1):
            for key, run in runs.items():
                begin = clock()
                run(key[1])
                if turn:
                    taken[key].append((clock() - begin) * 1000)
        ms = {key: max(median(times), 1e-6) for key, times in taken.items()}
        prices = {}
        for name, (_, most) in sources.items():
            if most > 0:
                first, last = ms[name, 1], ms[name, most]
                each = max(0.0, last - first) / (most - 1) if most > 1 else 0.0
                prices[name] = Price(max(0.0, first - each), each, most)
        return cls(tuple((n, ms["", n]) for n in rows), prices)

    def step(self, rows: int) -> float:
        """ms of a step with so many short rows."""
        known = self.rows
        at = bisect_left(known, (rows, 0.0))
        if at < len(known) and known[at][0] == rows:
            return known[at][1]
        if at == 0 or len(known) == 1:
            return known[0][1]
        low, high = (known[at - 1], known[at]) if at < len(known) else (known[-2], known[-1])
        slope = (high[1] - low[1]) / (high[0] - low[0])
        return low[1] + slope * (rows - low[0])

    def curve(self, most: int) -> list[float]:
        """ms by rows, 0 to ``most``; entry 0 is that of one row."""
        return [self.step(max(1, rows)) for rows in range(most + 1)]

    def draft(self, name: str, count: int) -> float:
        """ms for drafts of one source."""
        price = self.sources.get(name)
        return price.of(count) if price else 0.0

    def most(self, name: str) -> int:
        """Drafts that a source makes at once."""
        price = self.sources.get(name)
        return price.most if price else 64
