"""What a step costs: interpolation, the linear model, and measuring."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.costs import Costs, Price

TABLE = Costs(((1, 100.0), (4, 103.0), (8, 150.0), (16, 140.0)), {"mtp": Price(3.0, 2.0)})


def test_between_behind_and_before_the_entries() -> None:
    assert [TABLE.step(n) for n in (1, 2, 4, 6, 8)] == [100, 101, 103, 126.5, 150]
    assert TABLE.step(12) == TABLE.step(16) == TABLE.step(99) == 150  # 140 is noise
    assert TABLE.step(0) == 100
    rising = Costs(((2, 10.0), (4, 14.0)))
    assert [rising.step(n) for n in (1, 2, 3, 4, 5, 10)] == [10, 10, 12, 14, 16, 26]
    assert Costs(((1, 5.0),)).step(50) == 5
    assert TABLE.curve(6) == [TABLE.step(max(1, n)) for n in range(7)]


def test_sources() -> None:
    assert [TABLE.draft("mtp", k) for k in (0, 1, 4)] == [0, 5, 11]
    assert TABLE.draft("lookup", 9) == 0


@given(st.floats(0, 3), st.integers(1, 200))
def test_flat_is_the_linear_model(row_cost: float, rows: int) -> None:
    assert Costs.flat(row_cost).step(rows) == pytest.approx(1 + (rows - 1) * row_cost)


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0.001, 1e4)), min_size=1, max_size=6))
def test_time_never_falls_with_rows(parts: list[tuple[int, float]]) -> None:
    rows, at = [], 0
    for step, ms in parts:
        at += step
        rows.append((at, ms))
    curve = Costs(tuple(rows)).curve(80)
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(curve))


class Watch:
    """A clock that advances when something runs."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, 0

    def __call__(self) -> float:
        return self.now

    def spends(self, fixed: float, each: float):
        def run(n: int) -> None:
            self.calls += 1
            # The first calls are slow, and one later one is.
            hiccup = 9.0 if self.calls < 8 or self.calls == 20 else 0.0
            self.now += (fixed + each * n + hiccup) / 1000

        return run


def test_measuring_finds_what_things_take() -> None:
    watch = Watch()
    costs = Costs.measure(
        watch.spends(40.0, 2.0),
        {"mtp": (watch.spends(0.0, 7.0), 5), "block": (watch.spends(30.0, 0.0), 7),
         "one": (watch.spends(4.0, 1.0), 1), "never": (watch.spends(1.0, 1.0), 0)},
        rows=(1, 2, 8),
        clock=watch,
    )  # fmt: skip
    assert [costs.step(n) for n in (1, 2, 8)] == pytest.approx([42, 44, 56])
    assert costs.draft("mtp", 3) == pytest.approx(21)
    assert costs.draft("block", 7) == pytest.approx(30)
    assert costs.draft("one", 1) == pytest.approx(5)
    assert costs.draft("never", 1) == 0


@pytest.mark.parametrize(
    "rows", [(), ((0, 1.0),), ((2, 1.0), (1, 2.0)), ((1, 0.0),), ((1, float("nan")),)]
)
def test_what_is_no_table(rows: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match=r"ascend|above 0"):
        Costs(rows)


def test_a_negative_price_is_refused() -> None:
    with pytest.raises(ValueError, match="prices"):
        Costs(((1, 1.0),), {"mtp": Price(-1.0, 0.0)})
