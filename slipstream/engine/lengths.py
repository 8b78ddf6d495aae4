"""How many drafts to verify: the number that gives most tokens for the time of a step.

A draft's score is the chance that it stands if those before it do, so the chance that position j
is reached and stands is the product of the scores up to j, its survival. A step that verifies k
drafts yields one token more than the sum of their survivals, and takes ``1 + k * row_cost`` steps
without drafts.

The output stays exact only if whether position j is verified does not depend on the draft at j.
Scores of later positions do depend on it: a model drafter's next list is computed from it. So the
rule must never look ahead. It does not have to: survivals only fall along a span, hence the yield
per time rises to one peak, and stopping at the first draft that does not pay is the maximum.
(A cost with steps in it would need a look ahead, and must not be used that way.)
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def choose(score: Sequence[float], budget: int, row_cost: float) -> int:
    """Drafts to verify for one request alone.

    Args:
        score: chance per position, given that all before it stand.
        budget: most drafts.
        row_cost: time of one more row, in steps without drafts; 0 or more.

    Returns:
        0 to ``min(len(score), budget)``.
    """
    return share([score], budget, row_cost)[0]


def share(scores: Sequence[Sequence[float]], budget: int, row_cost: float) -> list[int]:
    """Drafts to verify for each request of a step, from a common budget.

    Drafts are taken in order of survival over all requests, equal ones in the order of the
    requests, until the next one would lower the tokens per time of the whole step.

    Args:
        scores: a sequence per request; see `choose`.
        budget: most drafts in all.
        row_cost: time of one more row, in steps without drafts.

    Returns:
        A number per request.
    """
    counts = [0] * len(scores)
    heap = [(-_chance(score[0]), at) for at, score in enumerate(scores) if score]
    heapq.heapify(heap)
    tokens, time = float(len(scores)), 1.0
    for _ in range(budget):
        if not heap:
            break
        negative, at = heap[0]
        survival = -negative
        if survival * time <= row_cost * tokens:
            break
        counts[at] += 1
        tokens, time = tokens + survival, time + row_cost
        if counts[at] < len(scores[at]):
            following = survival * _chance(scores[at][counts[at]])
            heapq.heapreplace(heap, (-following, at))
        else:
            heapq.heappop(heap)
    return counts


def _chance(score: float) -> float:
    return min(max(score, 0.0), 1.0)


class Acceptance:
    """How one request's drafts turn out against their scores, per source.

    The corrected score of a source is its score times (hits / expected hits), both forgotten at
    the same pace. A block that stood as a whole counts as one hit more, since its end was ours
    and not the text's; so lengths grow again after a hard passage. A request that verifies
    nothing is given one draft now and then, or it would never learn that the text got easier.

    Args:
        keep: what remains of the past after one more draft.
        prior: drafts' worth of belief in the scores as they are.
        probe: steps without a draft before one is tried.
    """

    def __init__(self, keep: float = 0.95, prior: float = 4.0, probe: int = 16) -> None:
        self._keep = keep
        self._prior = prior
        self._probe = probe
        self._idle = 0
        self._sums: dict[int, tuple[float, float]] = {}  # source -> hits, expected

    def update(self, scores: Sequence[float], sources: Sequence[int], accepted: int) -> None:
        """Enter a verified span.

        Args:
            scores: of the verified drafts, uncorrected.
            sources: of the verified drafts.
            accepted: how many of them stood.
        """
        for at, (score, source) in enumerate(zip(scores, sources, strict=True)):
            if at > accepted:
                break
            self._enter(source, float(at < accepted), _chance(score))
        if scores and accepted == len(scores):
            self._enter(sources[-1], 1.0, _chance(scores[-1]))

    def factor(self, source: int) -> float:
        """Hits over expected hits of a source; 1 for one that has not been tried."""
        hits, expected = self._sums.get(source, (0.0, 0.0))
        return (hits + self._prior) / (expected + self._prior)

    def correct(self, scores: Sequence[float], sources: Sequence[int]) -> list[float]:
        """Scores times their sources' factors, kept within 0 and 1."""
        pairs = zip(scores, sources, strict=True)
        return [_chance(_chance(score) * self.factor(source)) for score, source in pairs]

    def probe(self, chosen: int, available: int) -> int:
        """``chosen``, or 1 if it has been 0 for long and a draft is available."""
        if chosen:
            self._idle = 0
            return chosen
        self._idle += 1
        if self._idle < self._probe or not available:
            return 0
        self._idle = 0
        return 1

    def _enter(self, source: int, hit: float, score: float) -> None:
        hits, expected = self._sums.get(source, (0.0, 0.0))
        self._sums[source] = hits * self._keep + hit, expected * self._keep + score
