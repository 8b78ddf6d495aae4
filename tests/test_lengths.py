"""How many drafts to verify: against brute force, and never by looking ahead."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from slipstream.engine.lengths import Acceptance, choose, share

scores = st.lists(st.floats(0, 1), max_size=6)


def gain(score: list[float], k: int) -> float:
    return sum(math.prod(score[: j + 1]) for j in range(k))


@given(scores, st.integers(0, 7), st.floats(0.001, 1))
def test_choose_is_the_best_number(score: list[float], budget: int, row_cost: float) -> None:
    def pace(k: int) -> float:
        return (1 + gain(score, k)) / (1 + k * row_cost)

    k = choose(score, budget, row_cost)
    assert 0 <= k <= min(len(score), budget)
    best = max(pace(j) for j in range(min(len(score), budget) + 1))
    assert pace(k) >= best * (1 - 1e-12)


@given(st.lists(scores, min_size=1, max_size=3), st.integers(0, 8), st.floats(0.001, 0.6))
def test_share_is_the_best_split(rows: list[list[float]], budget: int, row_cost: float) -> None:
    def pace(ks: tuple[int, ...]) -> float:
        tokens = len(rows) + sum(gain(r, k) for r, k in zip(rows, ks, strict=True))
        return tokens / (1 + sum(ks) * row_cost)

    ks = share(rows, budget, row_cost)
    assert sum(ks) <= budget
    every = itertools.product(*(range(len(r) + 1) for r in rows))
    best = max(pace(k) for k in every if sum(k) <= budget)
    assert pace(tuple(ks)) >= best * (1 - 1e-12)


@given(
    st.lists(scores, min_size=1, max_size=3), st.integers(1, 8), st.floats(0.001, 0.6), st.data()
)
def test_a_position_does_not_depend_on_later_scores(
    rows: list[list[float]], budget: int, row_cost: float, data: st.DataObject
) -> None:
    """Position j of a request stays in or out, whatever its scores after j are."""
    at = data.draw(st.integers(0, len(rows) - 1))
    assume(rows[at])
    before = share(rows, budget, row_cost)
    j = data.draw(st.integers(0, len(rows[at]) - 1))
    changed = [list(r) for r in rows]
    changed[at] = rows[at][: j + 1] + data.draw(scores)
    after = share(changed, budget, row_cost)
    assert (before[at] > j) == (after[at] > j)


def test_examples() -> None:
    assert choose([], 5, 0.1) == 0
    assert choose([0.9] * 15, 15, 0.0) == 15
    assert choose([0.0] * 4, 4, 0.0) == 0
    assert choose([0.9, 0.9], 2, 2.0) == 0
    assert share([[0.9] * 4, [0.5] * 4, []], 4, 0.01) == [4, 0, 0]
    assert share([[0.9] * 4, [0.5] * 4, []], 6, 0.01) == [4, 2, 0]
    assert choose([5.0, -1.0], 2, 0.1) == 1  # scores outside 0..1 are cut


def test_correction_follows_the_source() -> None:
    memory = Acceptance()
    assert memory.correct([0.5, 0.9], [0, 1]) == [0.5, 0.9]
    for _ in range(50):
        memory.update([0.8] * 4, [0] * 4, 0)  # worse than promised
        memory.update([0.4] * 4, [1] * 4, 4)  # better
    assert memory.factor(0) < 0.3 and memory.factor(1) > 1.8
    assert memory.correct([0.8, 0.4], [0, 1])[1] == pytest.approx(0.4 * memory.factor(1))
    assert memory.factor(2) == 1


def test_factor_settles_at_one_when_scores_are_right() -> None:
    """Spans of three drafts that stand with chance 0.7 each, in their exact proportions."""
    memory = Acceptance(keep=0.999)
    for _ in range(10):
        for accepted, times in ((0, 300), (1, 210), (2, 147), (3, 343)):
            for _ in range(times // 10):
                memory.update([0.7] * 3, [0] * 3, accepted)
    # The hit credited to a whole block lifts it a little.
    assert 1.0 < memory.factor(0) < 1.15


def test_lengths_grow_again() -> None:
    memory = Acceptance()
    for _ in range(30):
        memory.update([0.7] * 4, [0] * 4, 0)
    low = choose(memory.correct([0.7] * 8, [0] * 8), 8, 0.2)
    for _ in range(30):
        memory.update([0.7], [0], 1)
    assert low == 0 < choose(memory.correct([0.7] * 8, [0] * 8), 8, 0.2)


def test_a_silent_request_is_probed() -> None:
    memory = Acceptance(probe=4)
    assert [memory.probe(0, 3) for _ in range(9)] == [0, 0, 0, 1, 0, 0, 0, 1, 0]
    assert memory.probe(5, 5) == 5
    assert [memory.probe(0, 0) for _ in range(6)] == [0] * 6
    assert memory.probe(0, 2) == 1
