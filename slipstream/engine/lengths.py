"""How many drafts to verify, and which drafters to ask for the next ones.

A draft's score is the chance that it stands if those before it do, so the chance that position j
is reached and stands is the product of the scores up to j, its survival. The output stays exact
only if whether position j is verified does not depend on the draft at j. Later scores do depend
on it: a model drafter's next list is computed from it. So nothing here looks ahead in a step's
scores. What the text so far says (how drafts of a source turned out, by position) and what rows
cost may look ahead as far as they like, so they decide first: they set for every position the
survival it must exceed, its floor. Then the scores are walked once, and the first draft that
does not exceed its floor ends the span.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul

EXPECT = 0.6  # chance of a draft of which nothing is known
RUNS = (1, 8)  # drafts in a row that stood, up to the last step: these numbers part the contexts


def choose(score: Sequence[float], most: int, floors: Sequence[float] | float) -> int:
    """Drafts to verify for one request: those in front whose survival exceeds their floor.

    Args:
        score: chance per position, given that all before it stand.
        most: most drafts.
        floors: by position, at least `most` of them or one number for all; made without the
            scores.

    Returns:
        0 to ``min(len(score), most)``.
    """
    survival = 1.0
    for at in range(min(len(score), most)):
        survival *= _chance(score[at])
        if survival <= (floors if isinstance(floors, float | int) else floors[at]):
            return at
    return max(0, min(len(score), most))


def floors(chances: Sequence[float], cost: Sequence[float], rate: float) -> list[float]:
    """The survival that each position must exceed.

    A draft pays if it, together with the drafts that are expected to follow it, brings more
    tokens than the time of their rows would bring elsewhere. So a position whose row is dear only
    because a step in the cost lies before it is judged by all the rows that come with it.

    Args:
        chances: expected chance per position, from the past.
        cost: ms of the step with 0, 1, ... drafts; one more entry than `chances`.
        rate: tokens per ms to be beaten.
    """
    found = []
    for j in range(len(chances)):
        tokens, survival, least = 1.0, 1.0, float("inf")
        for end in range(j + 1, len(chances) + 1):
            least = min(least, rate * (cost[end] - cost[j]) / tokens)
            if end < len(chances):
                survival *= chances[end]
                tokens += survival
        found.append(least)
    return found


def gains(chances: Sequence[float]) -> list[float]:
    """Expected tokens that 0, 1, ... drafts add."""
    return list(accumulate(accumulate(chances, mul), initial=0.0))


def best(gain: Sequence[float], cost: Sequence[float], beside: float = 0.0) -> tuple[int, float]:
    """The number of drafts with the most tokens per ms, and those.

    Args:
        gain: tokens that 0, 1, ... drafts add.
        cost: ms with so many.
        beside: ms that come on top whatever the number.
    """
    rates = [(1 + g) / (c + beside) for g, c in zip(gain, cost, strict=False)]
    k = max(range(len(rates)), key=rates.__getitem__)
    return k, rates[k]


def settle(
    gain: Sequence[Sequence[float]], curve: Sequence[float], beside: float = 0.0
) -> tuple[list[int], float]:
    """The best numbers of drafts for requests that share a step, and its tokens per ms.

    Each request in turn takes what is best at the present price of time, which is then set anew:
    it starts low, at that of a step without drafts, and rises.

    Args:
        gain: per request, tokens that 0, 1, ... drafts add.
        curve: ms of a step by its rows.
        beside: ms that come on top.
    """
    if len(gain) == 1:
        k, rate = best(gain[0], curve[1:], beside)
        return [k], rate
    counts = [0] * len(gain)
    rows, tokens = len(gain), float(len(gain))
    rate = tokens / (curve[rows] + beside)
    for _ in range(4):
        before = list(counts)
        for i, g in enumerate(gain):
            rest = rows - counts[i]
            value = [t - rate * curve[rest + k] for k, t in enumerate(g)]
            k = max(range(len(g)), key=value.__getitem__)
            rows, tokens, counts[i] = rest + k, tokens + g[k] - g[counts[i]], k
        rate = tokens / (curve[rows] + beside)
        if counts == before:
            break
    return counts, rate


def ration(gain: Sequence[Sequence[float]], budget: int) -> list[int]:
    """Most drafts of each request if they may be `budget` together: the likeliest by the past."""
    counts = [0] * len(gain)
    if sum(len(g) - 1 for g in gain) <= budget:
        return [len(g) - 1 for g in gain]
    heap = [(g[0] - g[1], at) for at, g in enumerate(gain) if len(g) > 1]
    heapq.heapify(heap)
    for _ in range(budget):
        if not heap:
            break
        _, at = heap[0]
        k = counts[at] = counts[at] + 1
        if k + 1 < len(gain[at]):
            heapq.heapreplace(heap, (gain[at][k] - gain[at][k + 1], at))
        else:
            heapq.heappop(heap)
    return counts


def _chance(score: float) -> float:
    return min(max(score, 0.0), 1.0)


class _Tally:
    """Hits and expected hits, both forgotten at the same pace."""

    __slots__ = ("expected", "hits")

    def __init__(self, start: float = 0.0) -> None:
        self.hits = self.expected = start

    def enter(self, hit: float, expected: float, keep: float) -> None:
        self.hits = self.hits * keep + hit
        self.expected = self.expected * keep + expected

    def ratio(self, prior: float = 0.0, base: float = 0.0) -> float:
        return (self.hits + prior * base) / (self.expected + prior)


class _Odds:
    """Hits over what was expected: of a source after a run of hits, times that of a position.

    What was only seen elsewhere is believed to be as it is there: a context like the source as a
    whole, a position like the others.
    """

    def __init__(self, keep: float, prior: float, pace: float, weight: float) -> None:
        self._keep, self._prior = keep, prior
        self._pace, self._weight = pace, weight  # the same for positions, which change slowly
        self._whole: dict[int, _Tally] = {}
        self._context: dict[tuple[int, int], _Tally] = {}
        self._position: dict[tuple[int, int], _Tally] = {}

    def enter(self, source: int, context: int, position: int, hit: float, expected: float) -> None:
        level = self.level(source, context)
        if source not in self._whole:
            self._whole[source] = _Tally(self._prior)  # forgotten like the rest
        self._whole[source].enter(hit, expected, self._keep)
        self._context.setdefault((source, context), _Tally()).enter(hit, expected, self._keep)
        at = self._position.setdefault((source, position), _Tally())
        at.enter(hit, min(1.0, expected * level), self._pace)

    def level(self, source: int, context: int) -> float:
        whole = self._whole.get(source)
        base = whole.ratio() if whole else 1.0
        seen = self._context.get((source, context))
        return seen.ratio(self._prior, base) if seen else base

    def shape(self, source: int, position: int) -> float:
        seen = self._position.get((source, position))
        return seen.ratio(self._weight, 1.0) if seen else 1.0


class Acceptance:
    """How one request's drafts turn out, by source and position.

    Twice: against their scores, to correct those of the next drafts, and by themselves, to
    expect something of drafts that are not there yet. Both know how many drafts of the source
    stood in a row before the step: copying comes in long stretches, and a stretch should be
    believed as soon as it has begun. A block that stood as a whole counts as part of a hit more,
    since its end was ours and not the text's.

    Args:
        keep: what remains of the past after one more draft.
        prior: drafts' worth of belief in what one starts with.
        credit: hits for a block that stood as a whole.
    """

    def __init__(self, keep: float = 0.97, prior: float = 2.0, credit: float = 0.1) -> None:
        self._credit = credit
        self._scored = _Odds(keep, prior, 0.98, 8.0)
        self._plain = _Odds(keep, prior, 0.98, 4.0)
        self._run: dict[int, int] = {}

    def update(self, scores: Sequence[float], sources: Sequence[int], accepted: int) -> None:
        """Enter a verified span.

        Args:
            scores: of the verified drafts, uncorrected.
            sources: of the verified drafts.
            accepted: how many of them stood.
        """
        contexts = {source: self.context(source) for source in sources}
        runs = self._run
        self._run = {}
        for at, (score, source) in enumerate(zip(scores, sources, strict=True)):
            if at > accepted:
                break
            self._enter(source, contexts[source], at, float(at < accepted), _chance(score))
            run = self._run.get(source, runs.get(source, 0))
            self._run[source] = run + 1 if at < accepted else 0
        if scores and accepted == len(scores) and self._credit:
            source, part, score = sources[-1], self._credit, _chance(scores[-1])
            self._enter(source, contexts[source], len(scores), part, score * part, part)

    def context(self, source: int) -> int:
        """How well the source runs: 0, or more after drafts that stood in a row."""
        return sum(self._run.get(source, 0) >= least for least in RUNS)

    def factor(self, source: int) -> float:
        """Hits over expected hits of a source; 1 for one that has not been tried."""
        return self._scored.level(source, self.context(source))

    def correct(self, scores: Sequence[float], sources: Sequence[int]) -> list[float]:
        """Scores times their sources' factors, kept within 0 and 1."""
        factors = {source: self.factor(source) for source in set(sources)}
        return [
            _chance(_chance(score) * factors[source] * self._scored.shape(source, at))
            for at, (score, source) in enumerate(zip(scores, sources, strict=True))
        ]

    def chances(self, source: int, most: int) -> list[float]:
        """Expected chance of each position of a source's next block, from the past alone."""
        level = EXPECT * self._plain.level(source, self.context(source))
        return [_chance(level * self._plain.shape(source, at)) for at in range(most)]

    def _enter(
        self, source: int, context: int, at: int, hit: float, score: float, part: float = 1.0
    ) -> None:
        self._scored.enter(source, context, at, hit, score)
        self._plain.enter(source, context, at, hit, EXPECT * part)


class Probe:
    """When to try again what has not paid: later and later while it fails, soon after a hit."""

    __slots__ = ("_idle", "_wait")

    def __init__(self, wait: int = 4) -> None:
        self._wait, self._idle = wait, 0

    def due(self, longest: int, least: int = 0) -> bool:
        """A step passes without it; True: this one should not.

        Args:
            longest: steps after which it is due however often it failed.
            least: steps before which it is not due however well it did.
        """
        self._idle += 1
        if self._idle < min(max(self._wait, least), longest):
            return False
        self._idle = 0
        self._wait = min(self._wait, longest)
        return True

    def enter(self, hit: bool) -> None:
        """It was tried."""
        self._idle = 0
        self._wait = max(1, self._wait // 4) if hit else min(2 * self._wait, 1 << 20)


class Asks:
    """Which drafters one request asks, and for how many drafts.

    Sources that cost nothing are always asked; for the others it compares the tokens per ms with
    each of them, with all that pay together, and with none. The fusion gives the block to one
    source: how often to which, is counted by who was asked and by how well a free source runs,
    so that nobody is asked beside a copy that goes on.

    Args:
        share: part of the time without drafts that trying one source again may take.
    """

    def __init__(self, share: float = 0.005) -> None:
        self._share = share
        self._probes: dict[int, Probe] = {}
        self._trial: int | None = None  # the source that the drafts now due are a probe of
        self._given: dict[int, int] = {}  # what the drafts now due were asked for
        self._state = 0  # and how well a free source ran then
        self._wins: dict[tuple[tuple[int, ...], int], dict[int, float]] = {}

    def choose(
        self,
        acceptance: Acceptance,
        source: int | None,
        prices: Mapping[int, Sequence[float]],
        cost: Sequence[float],
        rate: float | None = None,
    ) -> dict[int, int]:
        """Drafts to ask for, of the sources that cost something; those left out are not asked.

        Args:
            source: of the drafts that this step verifies; None: there are none.
            prices: by source, ms for 0, 1, ... drafts.
            cost: ms of the request's part of a step with 0, 1, ... drafts.
            rate: tokens per ms that time is worth to the others of the step; None: it is alone.
        """
        free = source is not None and source not in prices
        state = 1 + acceptance.context(source) if source is not None and free else 0
        self._trial = None
        top = self._worth(*self._step(acceptance, (), state, {}, prices, cost), rate)
        none, pick = top, {}
        single: dict[int, tuple[float, int]] = {}
        for s, price in prices.items():
            most = min(len(cost), len(price)) - 1
            if most > 0:
                single[s] = self._single(acceptance, s, most, state, prices, cost, rate)
                if single[s][0] > top:
                    top, pick = single[s][0], {s: single[s][1]}
        every = {s: k for s, (worth, k) in single.items() if worth > none}
        if len(every) > 1:
            together = self._step(acceptance, tuple(every), state, every, prices, cost)
            if self._worth(*together, rate) > top:
                pick = every
        if state <= 1:
            tokens, time = self._step(acceptance, tuple(pick), state, pick, prices, cost)
            pick = self._retry(single, pick, prices, cost, time / tokens)
        self._given, self._state = pick, state
        return pick

    def enter(self, sources: Sequence[int]) -> None:
        """The drafts that were asked for are here: the source of each."""
        wins = self._wins.setdefault((tuple(sorted(self._given)), self._state), {})
        for key in wins:
            wins[key] *= 0.9
        first = sources[0] if sources else -1
        wins[first] = wins.get(first, 0.0) + 1.0
        if self._trial not in (None, first):
            self._probe(self._trial).enter(False)  # it did not even get the block

    def expected(self, source: int, most: int) -> int:
        """Drafts that the source can have made of the block now due, up to `most`."""
        return min(most, self._given.get(source, most))

    @property
    def given(self) -> Mapping[int, int]:
        """What the drafts now due were asked for."""
        return self._given

    def probe(self, source: int, chosen: int, longest: int) -> int:
        """The number chosen, or 1 where it is 0 and the source should be tried again."""
        if chosen:
            return chosen
        if self._trial == source:
            return 1
        return int(self._probe(source).due(longest))

    def verified(self, source: int, hit: bool) -> None:
        """The first draft of a source was verified."""
        self._probe(source).enter(hit)

    def longest(self, extra: float, step: float) -> int:
        """Steps between two probes that cost `extra` ms each, where a step takes `step`."""
        return max(8, int(extra / (self._share * step)) + 1)

    def _probe(self, source: int) -> Probe:
        return self._probes.setdefault(source, Probe())

    def _retry(
        self,
        single: Mapping[int, tuple[float, int]],
        pick: dict[int, int],
        prices: Mapping[int, Sequence[float]],
        cost: Sequence[float],
        pace: float,
    ) -> dict[int, int]:
        """What is asked, or a source to try again in its place.

        Args:
            pace: ms that a token takes with what is asked.
        """
        for s in single:
            if s in pick:
                continue
            count, price = self._wide(1, len(prices[s]) - 1, prices[s], cost), prices[s]
            # At worst it brings the one token that comes without drafts.
            longest = self.longest(max(0.0, cost[1] + price[count] - pace), cost[0])
            # While another source pays, one that stands now and then has nothing to tell.
            if self._probe(s).due(longest, longest if pick else 0):
                self._trial = s
                return {s: count}
        return pick

    @staticmethod
    def _wide(count: int, most: int, price: Sequence[float], cost: Sequence[float]) -> int:
        """`count`, or more where one more costs next to nothing: the scores may decide then."""
        while count < most and price[count + 1] - price[count] < 0.01 * cost[0]:
            count += 1
        return count

    @staticmethod
    def _worth(tokens: float, time: float, rate: float | None) -> float:
        return tokens / time if rate is None else tokens - rate * time

    def _single(
        self,
        acceptance: Acceptance,
        source: int,
        most: int,
        state: int,
        prices: Mapping[int, Sequence[float]],
        cost: Sequence[float],
        rate: float | None,
    ) -> tuple[float, int]:
        """What a step with one source is worth, at its best number of drafts; and that number."""
        shares = self._shares((source,), state)
        own = shares.pop(source, 0.0)
        tokens, time = self._yield(acceptance, shares, {}, cost)
        gain, price = gains(acceptance.chances(source, most)), prices[source]
        found = [
            self._worth(tokens + own * (1 + gain[k]), time + own * cost[k] + price[k], rate)
            for k in range(1, most + 1)
        ]
        k = max(range(most), key=found.__getitem__)
        return found[k], self._wide(k + 1, most, price, cost)

    def _step(
        self,
        acceptance: Acceptance,
        asked: tuple[int, ...],
        state: int,
        counts: Mapping[int, int],
        prices: Mapping[int, Sequence[float]],
        cost: Sequence[float],
    ) -> tuple[float, float]:
        """Expected tokens and ms of a step for which these are asked."""
        shares = self._shares(tuple(sorted(asked)), state)
        tokens, time = self._yield(acceptance, shares, counts, cost)
        return tokens, time + sum(prices[s][counts[s]] for s in asked)

    def _yield(
        self,
        acceptance: Acceptance,
        shares: Mapping[int, float],
        counts: Mapping[int, int],
        cost: Sequence[float],
    ) -> tuple[float, float]:
        """Expected tokens and ms of a step, over who may get the block."""
        tokens = time = 0.0
        for source, part in shares.items():
            gain = [0.0]
            if source >= 0:
                gain = gains(acceptance.chances(source, counts.get(source, len(cost) - 1)))
            k, _ = best(gain, cost)
            tokens, time = tokens + part * (1 + gain[k]), time + part * cost[k]
        return tokens, time

    def _shares(self, asked: tuple[int, ...], state: int) -> dict[int, float]:
        """How likely each source gets the block, if these and the free ones are asked; -1: none.

        With little seen, what free sources got in this state whoever else was asked.
        """
        seen = self._wins.get((asked, state), {})
        free: dict[int, float] = {}
        total = 0.25
        for (others, when), wins in self._wins.items():
            if when == state:
                total += sum(wins.values())
                for source, weight in wins.items():
                    if source >= 0 and source not in others:
                        free[source] = free.get(source, 0.0) + weight
        prior = {source: weight / total for source, weight in free.items()}
        rest = 1.0 - sum(prior.values())
        for source in asked or (-1,):
            prior[source] = prior.get(source, 0.0) + rest / len(asked or (-1,))
        weight = sum(seen.values()) + 1.0
        return {s: (seen.get(s, 0.0) + prior.get(s, 0.0)) / weight for s in {*seen, *prior}}
