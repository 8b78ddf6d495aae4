"""Logits to probabilities: against a plain twin, edge by edge, and never by what stands beside."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.engine.params import ENDS, Features, ParamTable
from slipstream.engine.sampler import RowInfo, draw, logprobs, probs
from slipstream.kernels.random import Purpose
from slipstream.request import SamplingParams

OFF = SamplingParams(temperature=1.0, top_k=0, top_p=1.0)


def rows_at(
    slots: list[int],
    positions: list[int],
    ahead: list[int] | None = None,
    drafts: list[list[int]] | None = None,
) -> RowInfo:
    n = len(slots)
    return RowInfo(
        torch.tensor(slots),
        torch.tensor(positions),
        torch.tensor(ahead or [0] * n),
        torch.tensor(drafts or [[-1]] * n),
    )


def table_of(*wishes: SamplingParams, prompt: int = 0, eos: tuple[int, ...] = ()) -> ParamTable:
    params = ParamTable(len(wishes) + 1)
    for slot, wish in enumerate(wishes, 1):
        params.set(slot, wish, prompt, eos, slot)
    return params


def one(logits: list[float], wish: SamplingParams, **more: object) -> list[float]:
    """Final distribution of a single row without history."""
    params = table_of(wish)
    row = torch.tensor([logits], dtype=torch.float64)
    vocab = more.get("vocab")
    assert vocab is None or isinstance(vocab, int)
    return [
        float(x)
        for x in probs(row, rows_at([1], [0]), params, params.features([1]), vocab=vocab)[0]
    ]


def twin(
    logits: np.ndarray,
    wish: SamplingParams,
    prompt: list[int],
    output: list[int],
    ends: list[int],
    vocab: int,
) -> np.ndarray:
    """The documented order of operations, one token at a time."""
    x = [float(v) for v in logits]
    for t in range(len(x)):
        if t in prompt or t in output:
            r = wish.repetition_penalty
            x[t] = x[t] / r if x[t] > 0 else x[t] * r
        x[t] -= wish.frequency_penalty * output.count(t)
        x[t] -= wish.presence_penalty * (t in output)
        x[t] += wish.logit_bias.get(t, 0.0)
        if t >= vocab or (len(output) < wish.min_tokens and t in ends):
            x[t] = -math.inf
    order = sorted(range(len(x)), key=lambda t: (-x[t], t))
    assert wish.temperature is not None and wish.top_k is not None and wish.top_p is not None
    if wish.temperature == 0:
        return np.eye(len(x))[order[0]]
    p = {t: math.exp((x[t] - x[order[0]]) / wish.temperature) for t in order}
    if wish.top_k > 0:
        order = order[: wish.top_k]
    total, before, kept = sum(p[t] for t in order), 0.0, []
    for t in order:
        if wish.top_p >= 1 or before < wish.top_p * total:
            kept.append(t)
        before += p[t]
    kept = [t for t in kept if p[t] >= wish.min_p]
    out = np.zeros(len(x))
    out[kept] = [p[t] for t in kept]
    return out / out.sum()


def random_wish(rng: np.random.Generator, width: int) -> SamplingParams:
    def sometimes(value: float, off: float) -> float:
        return float(value) if rng.random() < 0.5 else off

    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.3, 1.0, 2.5])),
        top_k=int(sometimes(rng.integers(1, width + 4), 0)),
        top_p=sometimes(rng.uniform(0.05, 0.99), 1.0),
        min_p=sometimes(rng.uniform(0, 0.5), 0.0),
        repetition_penalty=sometimes(rng.uniform(0.5, 2), 1.0),
        presence_penalty=sometimes(rng.uniform(-1, 1), 0.0),
        frequency_penalty=sometimes(rng.uniform(-1, 1), 0.0),
        logit_bias={int(rng.integers(0, width)): float(rng.normal())} if rng.random() < 0.5 else {},
        min_tokens=int(rng.integers(0, 6)) if rng.random() < 0.5 else 0,
        stop_token_ids=(2,),
    )


def case(
    seed: int, dtype: torch.dtype
) -> tuple[Tensor, RowInfo, ParamTable, Tensor, int, list[SamplingParams], list[list[int]]]:
    """Five slots with two rows each: one after 0 drafts, one after 2."""
    rng = np.random.default_rng(seed)
    width, vocab, prompt, context = 23, 21, 4, 16
    wishes = [random_wish(rng, vocab) for _ in range(5)]
    params = table_of(*wishes, prompt=prompt, eos=(0, 5))
    history = torch.from_numpy(rng.integers(0, vocab, (6, context + 1)))
    slots, positions, ahead, drafts, texts = [], [], [], [], []
    for slot in range(1, 6):
        position = int(rng.integers(prompt - 1, 11))
        two = rng.integers(0, vocab, 2).tolist()
        known = history[slot, : position + 1].tolist()
        for k in (0, 2):
            slots.append(slot)
            positions.append(position + k)
            ahead.append(k)
            drafts.append([*two, -1])
            texts.append(known + two[:k])
    logits = torch.from_numpy(rng.normal(size=(10, width)) * 2).round(decimals=1).to(dtype)
    return (logits, rows_at(slots, positions, ahead, drafts), params, history, vocab, wishes, texts)


def test_equals_the_twin() -> None:
    """Logits rounded to tenths, so that ties occur."""
    for seed in range(60):
        logits, rows, params, history, vocab, wishes, texts = case(seed, torch.float64)
        use = params.features(rows.slot.tolist())
        got = probs(logits, rows, params, use, history, vocab)
        for r, text in enumerate(texts):
            want = twin(
                logits[r].numpy(),
                wishes[int(rows.slot[r]) - 1],
                text[:4],
                text[4:],
                [0, 2, 5],
                vocab,
            )
            assert np.abs(got[r].numpy() - want).max() < 1e-12, (seed, r)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    """Bit for bit in float32, with the features of the crowd or its own."""
    for seed in range(40):
        logits, rows, params, history, vocab, _, _ = case(seed, torch.float32)
        crowd = probs(logits, rows, params, params.features([1, 2, 3, 4, 5]), history, vocab)
        for r in range(len(logits)):
            alone = RowInfo(*(x[r : r + 1] for x in rows))
            use = params.features(alone.slot.tolist())
            single = probs(logits[r : r + 1], alone, params, use, history, vocab)
            assert torch.equal(single[0], crowd[r])


def test_a_large_row_does_not_depend_on_its_neighbours() -> None:
    wishes = (
        OFF,
        SamplingParams(temperature=0.7, top_k=20, top_p=0.95),
        SamplingParams(temperature=1.3, top_k=0, top_p=0.9, min_p=0.01),
    )
    params = table_of(*wishes)
    logits = torch.randn(3, 50_021, generator=torch.Generator().manual_seed(0)) * 3
    slots = [1, 2, 3]
    crowd = probs(logits, rows_at(slots, [5] * 3), params, params.features(slots))
    seeds, positions = torch.tensor([1, 2, 3]), torch.tensor([6, 6, 6])
    tokens = draw(crowd, seeds, positions, Purpose.BONUS, 6)
    for r, slot in enumerate(slots):
        use = params.features([slot])
        single = probs(logits[r : r + 1], rows_at([slot], [5]), params, use)
        assert torch.equal(single[0], crowd[r])
        token = draw(single, seeds[r : r + 1], positions[:1], Purpose.BONUS, 6, use.support)
        assert int(token) == int(tokens[r])


def test_filters_on_paper() -> None:
    log = [math.log(x) for x in (0.5, 0.25, 0.125, 0.125)]
    assert one(log, OFF) == pytest.approx([0.5, 0.25, 0.125, 0.125])
    top_k = SamplingParams(temperature=1.0, top_k=2, top_p=1.0)
    assert one(log, top_k) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    # A tie at the k-th place goes to the lower id.
    top_k = SamplingParams(temperature=1.0, top_k=3, top_p=1.0)
    assert one(log, top_k) == pytest.approx([4 / 7, 2 / 7, 1 / 7, 0])
    # Mass before the second token is exactly 0.5: not less than p, so it goes.
    assert one(log, SamplingParams(temperature=1.0, top_k=0, top_p=0.5)) == [1, 0, 0, 0]
    assert one(log, SamplingParams(temperature=1.0, top_k=0, top_p=0.51))[1] > 0
    # top-p works on the renormalized top-k set: 2/3 before the second.
    both = SamplingParams(temperature=1.0, top_k=2, top_p=0.6)
    assert one(log, both) == [1, 0, 0, 0]
    assert one(log, SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.3)) == (
        pytest.approx([2 / 3, 1 / 3, 0, 0])
    )
    assert one(log, SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=1.0)) == [1, 0, 0, 0]
    assert one(log, SamplingParams(temperature=0.5, top_k=0, top_p=1.0))[0] == pytest.approx(
        0.25 / (0.25 + 0.0625 + 2 * 0.015625)
    )


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    greedy = SamplingParams(temperature=0.0, top_k=0, top_p=1.0)
    assert one([1.0, 3.0, 3.0, 2.0], greedy) == [0, 1, 0, 0]
    assert one([1.0, 3.0, 3.0, 9.0], greedy, vocab=3) == [0, 1, 0, 0]


def test_tiny_temperature_does_not_overflow() -> None:
    cold = SamplingParams(temperature=1e-30, top_k=0, top_p=0.9)
    assert one([1e4, -1e4, 9999.0], cold) == [1, 0, 0]


def test_end_ids_wait_for_min_tokens() -> None:
    wish = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_tokens=2, stop_token_ids=(1,))
    params = table_of(wish, prompt=3, eos=(0,))
    use = params.features([1])
    logits = torch.zeros(3, 4)
    p = probs(logits, rows_at([1, 1, 1], [2, 3, 4]), params, use)
    assert p.tolist() == [[0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5], [0.25] * 4]
    ignoring = SamplingParams(
        temperature=1.0, top_k=0, top_p=1.0, min_tokens=2, stop_token_ids=(1,), ignore_eos=True
    )
    params = table_of(ignoring, prompt=3, eos=(0,))
    p = probs(logits, rows_at([1, 1, 1], [2, 3, 4]), params, params.features([1]))
    assert p[0].tolist() == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])


def test_logits_are_left_alone() -> None:
    logits, rows, params, history, vocab, _, _ = case(1, torch.float32)
    copy = logits.clone()
    probs(logits, rows, params, params.features([1, 2, 3, 4, 5]), history, vocab)
    assert torch.equal(logits, copy)


def test_features_of_a_batch() -> None:
    params = table_of(
        SamplingParams(temperature=0.0, top_k=50, top_p=0.9, min_p=0.2),
        SamplingParams(temperature=1.0, top_k=20, top_p=0.95, seed=3),
        SamplingParams(temperature=1.0, top_k=0, top_p=0.95, logit_bias={1: 2.0}),
    )
    greedy = params.features([1, 0])
    assert greedy == Features(True, False, False, False, 0, 0, False, False, True, 1)
    assert params.features([1, 2]) == Features(
        False, False, False, False, 20, 20, False, True, True, 20
    )
    both = params.features([2, 3])
    assert (both.ordered, both.support, both.bias, both.top_k) == (-1, 0, True, 20)
    params.clear(3)
    assert not params.features([3]).bias and params.features([3]).greedy
    assert float(params.bias_values[3].abs().sum()) == 0


def test_table_takes_any_seed_and_refuses_what_it_cannot_hold() -> None:
    params = ParamTable(2)
    for seed in (2**64 - 1, -1, 2**63, -(2**63)):
        params.set(1, OFF, 0, (), seed)
        assert int(params.seed[1]) % 2**64 == seed % 2**64
    with pytest.raises(ValueError, match="resolved"):
        params.set(1, SamplingParams(temperature=1.0), 0, (), 0)
    with pytest.raises(ValueError, match="end ids"):
        params.set(1, OFF, 0, range(ENDS + 1), 0)


def test_draw_with_a_bound_on_the_support_is_the_same_draw() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(64, 300, generator=generator)
    weights = torch.where(weights >= weights.topk(7, 1).values[:, -1:], weights, 0.0)
    seed, position = torch.arange(64), torch.arange(64) * 3
    full = draw(weights, seed, position, Purpose.BONUS, 5)
    assert torch.equal(full, draw(weights, seed, position, Purpose.BONUS, 5, support=7))
    assert torch.equal(full, draw(weights * 0.01, seed, position, Purpose.BONUS, 5))
    assert len(set(full.tolist())) > 10
    assert (weights.gather(1, full[:, None]) > 0).all()


def test_logprobs() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 99.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    got = logprobs(logits, torch.tensor([2, 3]), 3, vocab=4)
    assert got.rank.tolist() == [1, 3]
    assert got.top_ids.tolist() == [[1, 2, 0], [0, 1, 2]]
    total = math.log(math.e + 2 * math.e**3 + 1)
    assert got.token.tolist() == pytest.approx([3 - total, -math.log(4)])
    assert got.top[0].tolist() == pytest.approx([3 - total, 3 - total, 1 - total])
    none = logprobs(logits, torch.tensor([2, 3]), 0)
    assert none.top.shape == (2, 0) and none.top_ids.shape == (2, 0)
