"""Lookup: the index against a scan of the text, in any order of steps."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import one_batch

from slipstream.draft.lookup import Lookup, suffix_match
from slipstream.draft.table import empty
from slipstream.kernels.types import Draft, SpanRows, Verdict

LEVELS = (1, 2, 3, 5)
K = 6


def plain_match(text: list[int], k: int, levels: tuple[int, ...]) -> tuple[list[int], int]:
    """The definition, token by token."""
    n = len(text)
    for level in reversed(levels):
        for end in range(n - 1, level - 1, -1):
            if text[end - level : end] == text[n - level :]:
                out: list[int] = []
                for i in range(k):
                    at = end + i
                    out.append(text[at] if at < n else out[at - n])
                return out, level
    return [], 0


texts = st.lists(st.integers(0, 2), min_size=1, max_size=24)


@given(st.lists(texts, min_size=1, max_size=4), st.integers(1, 8))
def test_scan_equals_the_definition(rows: list[list[int]], k: int) -> None:
    """Rows of different lengths, junk behind each."""
    width = max(map(len, rows)) + 2
    table = torch.tensor([r + [1] * (width - len(r)) for r in rows])
    tokens, level, count = suffix_match(table, torch.tensor([len(r) for r in rows]), k, LEVELS)
    for i, row in enumerate(rows):
        want, at = plain_match(row, k, LEVELS)
        assert int(level[i]) == at and int(count[i]) == len(want)
        assert tokens[i, : len(want)].tolist() == want


def step(
    lookup: Lookup,
    history: torch.Tensor,
    length: torch.Tensor,
    out: Draft,
    slot: int,
    new: list[int],
) -> None:
    """One decoding step of one slot that decides ``new``."""
    have = int(length[slot])
    history[slot, have : have + len(new)] = torch.tensor(new)
    length[slot] = have + len(new)
    batch = one_batch([have - 1], [1])._replace(
        slots=torch.tensor([slot]), spans=(SpanRows(slot, have - 1, 1, 0, False, 0),)
    )
    tokens = torch.full((1, K + 1), -1)
    tokens[0, : len(new)] = torch.tensor(new)
    verdict = Verdict(torch.tensor([len(new)]), tokens, torch.tensor([len(new)]))
    lookup.observe(batch, None, verdict)
    lookup.propose(batch, verdict, out)


@given(
    st.lists(st.integers(0, 2), min_size=2, max_size=12),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=8),
    st.booleans(),
)
def test_index_equals_the_scan_however_the_text_came(
    prompt: list[int], steps: list[list[int]], chunked: bool
) -> None:
    history, length = torch.zeros(3, 64, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    lookup = Lookup(history, length, K, LEVELS)
    out = empty(3, K, 1)
    history[2, : len(prompt)] = torch.tensor(prompt)
    length[2] = len(prompt)
    if chunked:  # a chunk that does not end the prompt; the rest may come from a prefix hit
        part = one_batch([0], [len(prompt) - 1])._replace(
            slots=torch.tensor([2]), spans=(SpanRows(2, 0, len(prompt) - 1, 0, True, 0),)
        )
        nothing = Verdict(torch.tensor([1]), torch.full((1, K + 1), -1), torch.tensor([0]))
        lookup.observe(part, None, nothing)
        lookup.propose(part, nothing, out)
        assert int(out.count[2]) == 0
    text = list(prompt)
    for new in steps:
        step(lookup, history, length, out, 2, new)
        text += new
        want, _ = plain_match(text, K, LEVELS)
        n = int(out.count[2])
        assert out.tokens[2, :n].tolist() == want
        assert out.q_ids[2, :n, 0].tolist() == want
        assert out.q_prob[2, :, 0].tolist() == [1.0] * n + [0.0] * (K - n)
        assert (out.score[2, n:] == 0).all()
        assert n == 0 or 0 < float(out.score[2, 0]) < 1
        # Going on behind assumed tokens is the match of the longer text.
        for extra in ([0], [1, 2], [2, 2, 0]):
            assert lookup.extend(2, extra, 3)[0] == plain_match(text + extra, 3, LEVELS)[0]


def test_a_slot_forgets_its_last_request() -> None:
    history, length = torch.zeros(2, 32, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    lookup, out = Lookup(history, length, K, LEVELS), empty(2, K, 1)
    history[1, :3] = torch.tensor([5, 6, 7])
    length[1] = 3
    step(lookup, history, length, out, 1, [5])
    assert out.tokens[1, 0] == 6
    lookup.reset(1)
    history[1, :2] = torch.tensor([8, 9])
    length[1] = 2
    step(lookup, history, length, out, 1, [5])
    assert int(out.count[1]) == 0


def test_scores_follow_what_happened_and_not_the_drafted_token() -> None:
    history, length = torch.zeros(3, 400, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    lookup, out = Lookup(history, length, K, (2, 4)), empty(3, K, 1)
    cycle = [1, 2, 3, 4, 5]
    for slot in (1, 2):
        history[slot, :10] = torch.tensor(cycle * 2)
        length[slot] = 10
    step(lookup, history, length, out, 1, [1])
    step(lookup, history, length, out, 2, [1])
    first = float(out.score[1, 0])
    for at in range(1, 21):
        step(lookup, history, length, out, 1, [cycle[at % 5]])  # the copy goes on
        step(lookup, history, length, out, 2, [(7 * at) % 50 + 10])  # it does not
    assert float(out.score[1, 0]) > first
    history[2, int(length[2])] = 0
    step(lookup, history, length, out, 2, cycle)
    assert 0 < float(out.score[2, 0]) < first
    # Another token copied at the same level has the same score.
    a = Lookup(torch.tensor([[7, 8, 1, 7, 8]]), torch.tensor([5]), 1, (2,))
    b = Lookup(torch.tensor([[7, 8, 2, 7, 8]]), torch.tensor([5]), 1, (2,))
    assert a._next(0) == ([1], 0.5) and b._next(0) == ([2], 0.5)


def test_work_per_step_does_not_grow_with_the_text() -> None:
    def seconds(size: int) -> float:
        history = torch.randint(0, 50, (1, size), generator=torch.Generator().manual_seed(0))
        lookup = Lookup(history, torch.tensor([size]), 15)
        lookup._next(0)
        best = 1.0
        for _ in range(20):
            start = time.perf_counter()
            for extra in range(50):
                lookup.extend(0, [extra], 15)
            best = min(best, time.perf_counter() - start)
        return best

    assert seconds(60_000) < 8 * seconds(1_000) + 1e-3


def test_levels_must_ascend() -> None:
    for levels in ((), (0, 1), (3, 2), (2, 2)):
        with pytest.raises(ValueError, match="ascend"):
            Lookup(torch.zeros(1, 2), torch.zeros(1), 2, levels)
