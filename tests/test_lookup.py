"""Lookup: the index against a scan of the text, in any order of steps; text of other requests."""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import one_batch

from slipstream.draft import lookup as module
from slipstream.draft.lookup import Lookup, SharedText, suffix_match
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
    ask: tuple[int, ...] | None = None,
) -> None:
    """One decoding step of one slot that decides ``new``."""
    have = int(length[slot])
    history[slot, have : have + len(new)] = torch.tensor(new)
    length[slot] = have + len(new)
    batch = one_batch([have - 1], [1])._replace(
        slots=torch.tensor([slot]), spans=(SpanRows(slot, have - 1, 1, 0, False, 0, ask=ask),)
    )
    tokens = torch.full((1, max(K + 1, len(new))), -1)
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
    assert a._next(0) == ([1], [0.4]) and b._next(0) == ([2], [0.4])


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


@contextmanager
def constants(**values: Any) -> Iterator[None]:
    """The module with other sizes, so that small texts reach what large ones do."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


class Bench:
    """A lookup and its tables."""

    def __init__(self, slots: int = 4, context: int = 4096, **settings: Any) -> None:
        self.history = torch.zeros(slots, context + 1, dtype=torch.int64)
        self.length = torch.zeros(slots, dtype=torch.int64)
        self.lookup = Lookup(self.history, self.length, K, **settings)
        self.out = empty(slots, K, 1)

    def begin(self, slot: int, text: list[int], scope: str = "", share: bool = True) -> list[int]:
        """A new request; its prompt is all but the last token of ``text``."""
        self.history[slot, : len(text) - 1] = torch.tensor(text[:-1])
        self.length[slot] = len(text) - 1
        self.lookup.reset(slot, scope, share=share)
        return self.step(slot, text[-1:])

    def step(self, slot: int, new: list[int], ask: tuple[int, ...] | None = None) -> list[int]:
        step(self.lookup, self.history, self.length, self.out, slot, new, ask)
        return self.out.tokens[slot, : int(self.out.count[slot])].tolist()

    def scores(self, slot: int) -> list[float]:
        return self.out.score[slot, : int(self.out.count[slot])].tolist()

    @property
    def shared(self) -> SharedText:
        assert self.lookup.shared
        return self.lookup.shared


def numbers(count: int, seed: int, vocab: int = 100_000) -> list[int]:
    return random.Random(seed).choices(range(vocab), k=count)


@given(
    st.integers(0, 2**32),
    st.integers(1, 3),
    st.integers(0, 60),
    st.booleans(),
    st.sampled_from([0, 24]),
)
def test_index_equals_the_scan_over_long_texts(
    seed: int, vocab: int, prompt: int, shared: bool, short: int
) -> None:
    """Several small indexes, both ways of filling them, and a store that has the same text."""
    rng = random.Random(seed)
    text = rng.choices(range(vocab), k=2)
    for _ in range(12):  # random stretches and copies of earlier ones
        at, size = rng.randrange(len(text)), rng.randrange(1, 30)
        text += text[at : at + size] if rng.random() < 0.6 else rng.choices(range(vocab), k=size)
    with constants(_FIRST=8, _SHORT=short):
        bench = Bench(2, 512, shared=1024 if shared else 0)
        done = min(max(prompt, 2), len(text))
        bench.begin(1, text[:done])
        while True:
            got = bench.out.tokens[1, : int(bench.out.count[1])]
            table, size = torch.tensor([text[:done]]), torch.tensor([done])
            want, level, count = suffix_match(table, size, K)
            assert got.tolist() == want[0, : int(count)].tolist(), f"seed {seed} at {done}"
            if int(count):
                assert bench.lookup.levels[bench.lookup._texts[1].level] == int(level)
            if done == len(text):
                break
            new = text[done : done + rng.randrange(1, 8)]
            bench.step(1, new)
            done += len(new)


def test_equal_hashes_lose_matches_but_make_none_up() -> None:
    """All n-grams under one hash, in scopes that have one key."""

    def constant(h: Any) -> Any:
        return h * 0 + 5

    for seed in range(20):
        with constants(_mix=constant, crc32=lambda _: 0, _SHORT=seed % 2 * 24):
            rng = random.Random(seed)
            bench, text = Bench(3, 256), rng.choices(range(2), k=40)
            bench.begin(2, [7] * 50 + [1] + [8] * 30, scope="other")
            drafts = bench.begin(1, text)
            for _ in range(40):
                if drafts:
                    assert bench.lookup._texts[1].shared is False
                    level = bench.lookup.levels[bench.lookup._texts[1].level]
                    suffix, n = text[-level:], len(text)
                    ends = [e for e in range(level, n) if text[e - level : e] == suffix]
                    copies = [[(text[e:] * K)[i] for i in range(K)] for e in ends]
                    assert drafts in copies, f"seed {seed}"
                new = rng.choices(range(2), k=rng.randrange(1, 3))
                text += new
                drafts = bench.step(1, new)


def test_a_backlog_is_indexed_over_several_steps_and_serves_meanwhile() -> None:
    with constants(BUDGET=200):
        bench = Bench(3, 4096, shared=0)
        text = numbers(2000, 1)
        first, last = text[100:120], text[1800:1820]
        bench.begin(1, [*text, *first])  # a prefix hit: everything is known at once
        index = bench.lookup._texts[1]
        assert index.indexed <= 300
        assert bench.out.tokens[1].tolist() == text[120 : 120 + K]
        # Meanwhile another slot decodes as if there were no backlog.
        assert bench.begin(2, [5, 6, 7, 5, 6])[:2] == [7, 5]
        for at in range(12):
            before = index.indexed
            bench.step(1, [200_000 + at])
            assert index.indexed - before <= 300
        assert index.indexed == int(bench.length[1])
        assert bench.step(1, last) == text[1820 : 1820 + K]


def test_a_periodic_text_runs_on_into_itself() -> None:
    bench = Bench(2)
    assert bench.begin(1, [4, 4, 4]) == [4] * K
    assert bench.begin(1, [1, 2, 3] * 6) == [1, 2, 3, 1, 2, 3]
    assert bench.lookup.extend(1, [1, 2], 5)[0] == [3, 1, 2, 3, 1]
    assert bench.lookup.extend(1, [], 4)[0] == [1, 2, 3, 1]


def test_no_more_drafts_than_asked_for() -> None:
    bench = Bench(2)
    bench.begin(1, [1, 2, 3] * 6)
    for ask, count in (((0,), 0), ((2,), 2), ((99,), K), (None, K)):
        got = bench.step(1, [1, 2, 3], ask)
        assert got == [1, 2, 3, 1, 2, 3][:count] and len(bench.scores(1)) == count


def test_each_level_has_its_rate_and_a_match_grows_along_the_block() -> None:
    bench = Bench(2, shared=0, levels=(2, 4))
    bench.begin(1, [1, 2, 9, 9, 1, 2])
    weak, strong = 2 / 5, 4 / 7
    assert bench.scores(1) == pytest.approx([weak, weak] + [strong] * (K - 2))
    # The text left the copy at once: level 2 is believed less, level 4 as before.
    bench.step(1, [3])
    bench.step(1, [1, 2])
    lower = weak - 0.08 * weak
    assert bench.scores(1) == pytest.approx([lower, lower] + [strong] * (K - 2))
    # It follows for three tokens: two of level 2, one of level 4, then it leaves.
    copy = bench.out.tokens[1].tolist()
    bench.step(1, [*copy[:3], 77])
    bench.step(1, [1, 2])
    once = lower + 0.08 * (1 - lower)
    twice = once + 0.08 * (1 - once)
    third = strong + 0.08 * (1 - strong)
    assert bench.scores(1)[:2] == pytest.approx([twice] * 2)
    assert bench.scores(1)[2:] == pytest.approx([third - 0.08 * third] * (K - 2))


def test_scores_behind_other_drafts_are_those_of_the_match() -> None:
    bench = Bench(2, shared=0, levels=(2, 4))
    bench.begin(1, [1, 2, 3, 4, 5, 6, 7, 8, 1])
    assert bench.out.count[1] == 0
    tokens, scores = bench.lookup.extend(1, [2], 4)
    assert tokens == [3, 4, 5, 6] and scores == pytest.approx([2 / 5, 2 / 5, 4 / 7, 4 / 7])
    assert bench.lookup.extend(1, [9], 4) == ([], [])


PHRASE = numbers(20, 99)


def test_another_request_drafts_at_once_also_while_the_first_one_runs() -> None:
    bench, document = Bench(), numbers(300, 2)
    answer = numbers(30, 3)
    bench.begin(1, [*document, answer[0]])
    assert bench.begin(2, [*document, answer[0]]) == []  # nobody knows how it goes on
    bench.step(1, answer[1:9])
    assert bench.begin(3, [*document, answer[0]]) == answer[1:7]
    assert bench.lookup.extend(3, answer[1:3], 3)[0] == answer[3:6]
    bench.step(1, answer[9:])
    assert bench.step(3, answer[1:9]) == answer[9:15]
    # The first is gone and its slot has been given away.
    bench.begin(1, numbers(50, 4))
    assert bench.step(3, answer[9:20]) == answer[20:26]
    assert bench.scores(3)[0] > 0.75 and bench.lookup._texts[3].shared
    # The document is in the store once.
    assert bench.shared.tokens < 300 + 50 + 5 * 64


def test_own_text_wins_over_a_match_that_is_not_longer() -> None:
    bench = Bench()
    bench.begin(1, [*PHRASE, 1, 2, 3, 4, 5, 6, 7])
    # Level 16 in both: the own continuation.
    assert bench.begin(2, [*PHRASE, 11, 12, *PHRASE])[:2] == [11, 12]
    # Own level 8, shared level 16: the shared one, and of those the most recent.
    assert bench.begin(3, [*PHRASE[-9:], 13, 14, *PHRASE])[:2] == [11, 12]
    # A weak match elsewhere is not believed.
    assert bench.begin(2, [50, *PHRASE[-7:]]) == []
    assert bench.begin(2, [50, *PHRASE[-8:]])[:2] == [13, 14]


def test_who_does_not_share_neither_gives_nor_takes() -> None:
    bench = Bench()
    bench.begin(1, [*PHRASE, 1, 2, 3], share=False)
    assert bench.shared.tokens == 0
    assert bench.begin(2, list(PHRASE)) == []
    bench.step(2, [5, 6, 7])
    assert bench.begin(3, list(PHRASE), share=False) == []
    assert bench.begin(3, list(PHRASE)) != []
    assert Bench(shared=0).lookup.shared is None
    with pytest.raises(ValueError, match="256"):
        Bench(shared=100)


@given(st.integers(0, 2**32), st.booleans())
def test_scopes_never_leak(seed: int, one_key: bool) -> None:
    """Every request says the phrase and then a mark of its own: who may see which mark?"""
    rng = random.Random(seed)
    crc = {"crc32": lambda _: 0} if one_key else {}
    with constants(**crc):
        bench, mark = Bench(4, 1024, shared=rng.choice([256, 512, 4096])), 200_000
        visible: dict[str, set[int]] = {}
        for _ in range(25):
            slot, scope, share = rng.randrange(1, 4), rng.choice(["", "a", "b"]), rng.random() < 0.7
            filler = numbers(rng.randrange(0, 150), rng.randrange(3))
            drafts = bench.begin(slot, [*filler, *PHRASE], scope, share)
            allowed = visible.get(scope, set()) if share else set()
            marks = {t for t in drafts if t >= 200_000}
            assert marks <= allowed, f"seed {seed}"
            mark += 1
            drafts = bench.step(slot, [mark, *PHRASE])
            if share:
                visible.setdefault(scope, set()).add(mark)
            allowed = visible.get(scope, set()) if share else {mark}
            assert {t for t in drafts if t >= 200_000} <= allowed, f"seed {seed}"


def test_drafts_run_on_from_one_part_of_the_store_into_the_next() -> None:
    bench, text = Bench(shared=1024, context=1024), numbers(700, 5)
    bench.begin(1, text[:300])
    for at in range(300, 700, 10):
        bench.step(1, text[at : at + 10])
    held = 0
    bench.begin(2, [300_000, 300_001])
    for at in range(20, 690):
        got = bench.lookup.extend(2, text[at - 16 : at], K)[0]
        assert got in ([], text[at : at + K])
        held += bool(got)
    assert held > 400
    assert bench.shared.tokens <= 1024


def test_evicted_text_is_gone_with_its_index() -> None:
    bench = Bench(shared=2048, context=512)

    def passages() -> int:
        gc.collect()
        return sum(type(o) is module._Passage for o in gc.get_objects())

    bench.begin(1, [*PHRASE, 1, 2, 3, 4, 5, 6])
    assert bench.begin(2, list(PHRASE)) != []
    before, peak = passages(), 0
    tracemalloc.start()
    for seed in range(1000):
        bench.begin(1 + seed % 3, numbers(100, 1000 + seed))
        assert bench.shared.tokens <= 2048
        if seed == 200:
            held, peak = passages(), tracemalloc.get_traced_memory()[0]
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert passages() <= max(held, before) + 16
    assert after < peak * 1.2 + 20_000
    assert bench.begin(2, list(PHRASE)) == []
    # A request that ran all the time goes on in the newest part.
    bench.begin(3, numbers(100, 1))
    for seed in range(100):
        bench.begin(1, numbers(100, 5000 + seed))
    bench.step(3, [*PHRASE, 8, 9])
    assert bench.begin(2, list(PHRASE))[:2] == [8, 9]


def test_what_repeats_an_evicted_text_is_stored_again() -> None:
    bench, text = Bench(shared=1024), numbers(300, 6)
    bench.begin(1, text)
    bench.begin(2, text[:100])
    held = bench.shared.tokens
    bench.step(2, text[100:120])
    assert bench.shared.tokens == held  # it follows the first
    for seed in range(10):
        bench.begin(1, numbers(200, 8000 + seed))
    bench.step(2, text[120:200])
    assert bench.begin(3, [0, *text[150:170]]) == text[170 : 170 + K]


def test_shared_matches_have_rates_of_their_own() -> None:
    bench, text = Bench(), numbers(200, 8)
    bench.begin(1, text)
    bench.begin(2, [5, *text[:20]])
    prior = bench.scores(2)
    assert prior == pytest.approx([16 / 19] * K)
    bench.step(2, [6])  # not what the other text says
    bench.step(2, text[40:60])
    assert bench.lookup._texts[2].shared
    assert bench.scores(2) == pytest.approx([16 / 19 * 0.92] * K)
    assert bench.lookup.extend(2, text[100:120], 2)[1] == pytest.approx([16 / 19 * 0.92] * 2)
    bench.step(2, [7])
    bench.step(2, [5, *text[:20]])  # the own text by now
    assert not bench.lookup._texts[2].shared
    assert bench.scores(2) == pytest.approx(prior)


def test_memory_stays_below_its_estimate() -> None:
    context, shared = 20_000, 16_384
    tracemalloc.start()
    bench = Bench(3, context, shared=shared)
    before = tracemalloc.get_traced_memory()[0]
    for slot in (1, 2):
        bench.begin(slot, numbers(context // 3, slot))
        for at in range(3):
            bench.step(slot, numbers(K, at))
    for seed in range(3):
        bench.begin(0, numbers(context // 2, seed))
    for slot in range(3):
        end = int(bench.length[slot])
        bench.history[slot, end:context] = torch.tensor(numbers(context - end, 7 + slot))
        bench.length[slot] = context - 1
        bench.step(slot, [1])
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    most = Lookup.host_bytes(context, 3, shared)
    assert used < most < 2 * used


def test_levels_must_ascend() -> None:
    for levels in ((), (0, 1), (3, 2), (2, 2)):
        with pytest.raises(ValueError, match="ascend"):
            Lookup(torch.zeros(1, 2), torch.zeros(1), 2, levels)
    with pytest.raises(ValueError, match="host"):
        Lookup(torch.zeros(1, 2, device="meta"), torch.zeros(1), 2)
