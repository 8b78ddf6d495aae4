"""The verifier: exact output laws, slow twins, layout, and proof that wrong rules are noticed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from laws import (
    Addressed,
    Proposal,
    block_twin,
    chances,
    coupled_twin,
    distance,
    draft_tables,
    greedy_twin,
    one_batch,
    output_law,
    paths,
    point,
    random_table,
    rejection_twin,
    target_law,
    uniform_params,
)
from torch import Tensor

from slipstream.engine.params import ParamTable
from slipstream.engine.sampler import draw
from slipstream.engine.verify import Rows, Verify
from slipstream.kernels.random import Purpose
from slipstream.kernels.types import Batch, Draft, SpanRows, Verdict
from slipstream.request import SamplingParams

V, K = 3, 3
TARGET = random_table(1, V, K + 1)
LAW = target_law(TARGET, K + 1, V)
SAMPLED = SamplingParams(temperature=1.0, top_k=0, top_p=1.0)
SEEDED = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=1)
GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0)


# Exact laws.


@pytest.mark.parametrize("block", [False, True], ids=["chain", "block"])
@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_law_of_sampled_drafts(block: bool, keep: int, seed: int) -> None:
    """Lists of 1, 2 and all ids."""
    drafter = random_table(seed, V, K, keep)
    assert distance(output_law(TARGET, paths(drafter, K, V), K + 1, V, block), LAW) < 1e-12


@pytest.mark.parametrize("block", [False, True], ids=["chain", "block"])
def test_law_of_sampled_drafts_told_as_point_masses(block: bool) -> None:
    """Wasteful but exact, if it is done whatever was drafted."""
    proposals = [
        p._replace(lists=tuple(point(t, V) for t in p.tokens))
        for p in paths(random_table(2, V, K), K, V)
    ]
    assert distance(output_law(TARGET, proposals, K + 1, V, block), LAW) < 1e-12


@pytest.mark.parametrize("block", [False, True], ids=["chain", "block"])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_law_of_a_copied_draft(block: bool, depth: int) -> None:
    tokens = (1, 2, 0)[:depth]
    proposal = Proposal(1.0, tokens, tuple(point(t, V) for t in tokens))
    assert distance(output_law(TARGET, [proposal], K + 1, V, block), LAW) < 1e-12


@pytest.mark.parametrize("block", [False, True], ids=["chain", "block"])
@pytest.mark.parametrize("token", [-1, V, V + 9, 1], ids=["none", "padding", "beyond", "unlisted"])
def test_law_of_a_draft_that_is_none(block: bool, token: int) -> None:
    """Not a token, or not on its list: a rejection that takes nothing from the target."""
    lists = (point(0, V), point(2, V), point(1, V))
    proposal = Proposal(1.0, (0, token, 1), lists)
    safe = proposal._replace(lists=(lists[0], np.zeros(V), lists[2]), tokens=(0, 1, 1))
    assert chances(TARGET, safe, block)[1] == 0
    # The formulas are those of the same proposal with an empty list at that position.
    law = output_law(TARGET, [safe], K + 1, V, block)
    assert distance(law, LAW) < 1e-12
    logits = torch.tensor(np.array([TARGET((0, 1, 1)[:j]) for j in range(K + 1)])).log()
    params = uniform_params(2, SAMPLED)
    rows = Rows(torch.tensor([0]), torch.tensor([K]), K)
    for seed in range(20):
        params.seed[1] = seed
        a, b = (
            Verify(params, block=block)(logits, draft_tables([x], K, V), one_batch([4], [4]), rows)
            for x in (proposal, safe)
        )
        assert torch.equal(a.tokens, b.tokens) and int(a.added[0]) <= 2


def test_block_accepts_at_least_as_many() -> None:
    drafter = random_table(2, V, K)

    def mean(block: bool) -> float:
        total = 0.0
        for proposal in paths(drafter, K, V):
            h = chances(TARGET, proposal, block)
            for yes in itertools.product((True, False), repeat=K):
                weight = proposal.weight * np.prod(
                    [a if y else 1 - a for y, a in zip(yes, h, strict=True)]
                )
                stands = max((i + 1 for i, y in enumerate(yes) if y), default=0)
                chain = next((i for i, y in enumerate(yes) if not y), K)
                total += weight * (stands if block else chain)
        return total

    assert mean(True) > mean(False) + 0.01


def test_the_enumeration_notices_wrong_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = random_table(2, V, K)
    proposals = list(paths(drafter, K, V))
    # The verifier is told a list that the drafts were not drawn from.
    told = [p._replace(lists=tuple(np.full(V, 1 / V) for _ in range(K))) for p in proposals]
    assert distance(output_law(TARGET, told, K + 1, V), LAW) > 0.01
    # Acceptance slightly off: u * 1.02 q < p.
    monkeypatch.setattr(
        "laws.chances", lambda t, p, b: [min(1.0, h * 0.98) for h in chances(t, p, b)]
    )
    assert distance(output_law(TARGET, proposals, K + 1, V), LAW) > 0.001


# Slow twins on random batches.


def mixed_case(
    seed: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Draft, Batch, Rows, list[Proposal], list[str], ParamTable]:
    """Six slots of every kind; ragged numbers of drafts, some drafts missing or unlisted."""
    rng = np.random.default_rng(seed)
    vocab, kinds = 7, ["greedy", "sampled", "seeded", "sampled", "seeded", "sampled"]
    n = len(kinds)
    params = ParamTable(n + 1)
    proposals = []
    for b, kind in enumerate(kinds):
        wish = {"greedy": GREEDY, "sampled": SAMPLED, "seeded": SEEDED}[kind]
        params.set(b + 1, wish, 0, (), seed * 100 + b)
        k = int(rng.integers(0, K + 1))
        lists, tokens = [], []
        for _ in range(k):
            q = rng.dirichlet(np.full(vocab, 0.5))
            q[rng.permutation(vocab)[rng.integers(1, vocab) :]] = 0
            q /= q.sum()
            lists.append(q)
            tokens.append(
                int(rng.choice(vocab, p=q))
                if rng.random() < 0.8
                else int(rng.integers(-1, vocab + 2))
            )
        proposals.append(Proposal(1.0, tuple(tokens), tuple(lists)))
    lengths = [len(p.tokens) + 1 for p in proposals]
    logits = torch.from_numpy(rng.normal(size=(sum(lengths) + 2, vocab)) * 1.5).to(dtype)
    order = rng.permutation(n)  # spans' rows need not follow in order
    start, row = [0] * n, 1
    for b in order:
        start[b] = row
        row += lengths[b]
    # Make greedy drafts right half of the time.
    tokens = list(proposals[0].tokens)
    for j in range(len(tokens)):
        if rng.random() < 0.7:
            tokens[j] = int(logits[start[0] + j].argmax())
    proposals[0] = proposals[0]._replace(tokens=tuple(tokens))
    positions = rng.integers(0, 50, n).tolist()
    rows = Rows(torch.tensor(start), torch.tensor(lengths) - 1, K)
    return (
        logits,
        draft_tables(proposals, K, vocab),
        one_batch(positions, lengths),
        rows,
        proposals,
        kinds,
        params,
    )


def span_of(verdict: Verdict, b: int) -> tuple[int, ...]:
    return tuple(verdict.tokens[b, : int(verdict.added[b])].tolist())


@pytest.mark.parametrize("block", [False, True], ids=["chain", "block"])
def test_equals_the_slow_twins(block: bool) -> None:
    kept = 0
    for seed in range(25):
        logits, draft, batch, rows, proposals, kinds, params = mixed_case(seed)
        verdict = Verify(params, block=block)(logits, draft, batch, rows)
        for b, (kind, proposal) in enumerate(zip(kinds, proposals, strict=True)):
            first = int(rows.start[b])
            p = torch.softmax(logits[first : first + len(proposal.tokens) + 1], 1).numpy()
            noise = Addressed(seed * 100 + b, int(batch.positions[batch.starts[b]]) + 1, 7)
            if kind == "greedy":
                count, token = greedy_twin(p, proposal.tokens)
            elif kind == "seeded":
                count, token = coupled_twin(p, proposal.tokens, noise)
            elif block:
                count, token = block_twin(p, proposal.tokens, proposal.lists, noise)
            else:
                count, token = rejection_twin(p, proposal.tokens, proposal.lists, noise)
            assert span_of(verdict, b) == (*proposal.tokens[:count], token), (seed, b, kind)
            assert int(verdict.count[b]) == 1 + count
            assert (verdict.tokens[b, count + 1 :] == -1).all()
            kept += count
    assert kept > 40


def test_a_span_decides_the_same_alone_and_in_a_crowd() -> None:
    """Bit for bit in float32: neighbours switch features on, and change nothing."""
    for seed in range(12):
        logits, draft, batch, rows, proposals, _, params = mixed_case(seed, torch.float32)
        crowd = Verify(params)(logits, draft, batch, rows)
        for b, proposal in enumerate(proposals):
            first, count = int(rows.start[b]), len(proposal.tokens)
            position = int(batch.positions[batch.starts[b]])
            alone_batch = one_batch([position], [count + 1])._replace(
                slots=torch.tensor([b + 1]),
                spans=(SpanRows(b + 1, position, count + 1, 0, False, 0),),
            )
            alone = Verify(params)(
                logits[first : first + count + 1],
                draft,
                alone_batch,
                Rows(torch.tensor([0]), torch.tensor([count]), count),
            )
            assert span_of(alone, 0) == span_of(crowd, b)


# Layout.


def test_chunks_and_padding_decide_nothing() -> None:
    vocab = 5
    logits = torch.zeros(3, vocab)
    logits[0, 3] = logits[1, 2] = logits[2, 4] = 9
    params = uniform_params(5, GREEDY)
    # A short span with one draft, a chunk that ends its prompt, one that does not, and padding.
    spans = (
        SpanRows(1, 8, 2, 0, False, 0),
        SpanRows(2, 0, 4, 2, True, 0),
        SpanRows(3, 64, 6, 6, True, 64),
    )
    batch = Batch(
        tokens=torch.zeros(12, dtype=torch.int64),
        positions=torch.tensor([8, 9, 0, 1, 2, 3, *range(64, 70)]),
        starts=torch.tensor([0, 2, 6, 12, 12]),
        slots=torch.tensor([1, 2, 3, 0]),
        row_slots=torch.tensor([1] * 2 + [2] * 4 + [3] * 6),
        places=torch.zeros(0, dtype=torch.int64),
        known=torch.tensor([1, 4, 6, 0]),
        rows=torch.tensor([0, 1, 5]),
        split=2,
        spans=spans,
    )
    draft = draft_tables([Proposal(1, (3,), (point(3, vocab),))] * 4, 3, vocab)
    rows = Rows(torch.tensor([0, 2, 99, -5]), torch.tensor([1, 0, -1, -1]), 1)
    for wish in (GREEDY, SAMPLED):
        params.set(3, wish, 0, (), 1)  # a sampled chunk takes the batch down the general path
        verdict = Verify(params)(logits, draft, batch, rows)
        assert verdict.count.tolist() == [2, 4, 6, 0]
        assert verdict.added.tolist() == [2, 1, 0, 0]
        assert verdict.tokens.tolist() == [[3, 2, -1, -1], [4, -1, -1, -1], [-1] * 4, [-1] * 4]


def test_a_step_of_unfinished_prompts_has_no_logits() -> None:
    draft = draft_tables([Proposal(1, (), ())], 2, 5)
    rows = Rows(torch.tensor([0]), torch.tensor([-1]), 0)
    for wish in (GREEDY, SAMPLED):
        verdict = Verify(uniform_params(2, wish))(
            torch.zeros(0, 5), draft, one_batch([0], [64], [64]), rows
        )
        assert verdict.count.tolist() == [64] and verdict.added.tolist() == [0]
        assert verdict.tokens.tolist() == [[-1, -1, -1]]


def test_padding_columns_are_never_chosen() -> None:
    logits = torch.zeros(1, 8)
    logits[0, 6] = 50
    draft = draft_tables([Proposal(1, (6,), (point(6, 8),))], 1, 8)
    for wish in (GREEDY, SAMPLED, SEEDED):
        verdict = Verify(uniform_params(2, wish), vocab=5)(
            torch.cat([logits, logits]),
            draft,
            one_batch([0], [2]),
            Rows(torch.tensor([0]), torch.tensor([1]), 1),
        )
        assert int(verdict.added[0]) == 1 and 0 <= int(verdict.tokens[0, 0]) < 5


def test_penalties_see_the_drafts_before_a_row() -> None:
    """Greedy with a presence penalty: the draft itself makes its repetition lose."""
    logits = torch.tensor([[0.0, 2.0, 1.5], [0.0, 2.0, 1.5], [0.0, 2.0, 1.5]])
    wish = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, presence_penalty=1.0)
    params = uniform_params(2, wish)
    params.prompt_len[1] = 1
    draft = draft_tables([Proposal(1, (1, 2), (point(1, 3), point(2, 3)))], 2, 3)
    history = torch.zeros(2, 6, dtype=torch.int64)
    verdict = Verify(params)(
        logits, draft, one_batch([0], [3]), Rows(torch.tensor([0]), torch.tensor([2]), 2), history
    )
    assert span_of(verdict, 0) == (1, 2, 1)
    with pytest.raises(ValueError, match="history"):
        Verify(params)(
            logits, draft, one_batch([0], [3]), Rows(torch.tensor([0]), torch.tensor([2]), 2)
        )


# Seeded requests.


def generate(seed: int, drafter: str, steps: np.random.Generator, length: int) -> list[int]:
    """Text of a toy model whose next distribution depends on the last two tokens."""
    vocab = 6
    table = torch.randn(vocab, vocab, vocab, generator=torch.Generator().manual_seed(5)) * 1.5
    wish = SamplingParams(temperature=0.8, top_k=5, top_p=0.95, seed=seed)
    params = ParamTable(2)
    params.set(1, wish, 2, (), seed)
    text = [0, 1]
    while len(text) < length:
        k = int(steps.integers(0, 5)) if drafter != "none" else 0
        tokens: list[int] = []
        for _ in range(k):
            a, b = ([*text, *tokens])[-2:]
            if drafter == "same noise":
                p = torch.softmax(table[a, b] / 0.8, 0)[None]
                position = torch.tensor([len(text) + len(tokens)])
                token = int(draw(p, torch.tensor([seed]), position, Purpose.TARGET, 0))
            elif drafter == "greedy":
                token = int(table[a, b].argmax())
            else:
                token = int(steps.integers(0, vocab))
            tokens.append(token)
        lists = tuple(point(t, vocab) for t in tokens)
        rows = []
        for j in range(k + 1):
            a, b = ([*text, *tokens[:j]])[-2:]
            rows.append(table[a, b])
        verdict = Verify(params)(
            torch.stack(rows),
            draft_tables([Proposal(1, tuple(tokens), lists)], 4, vocab),
            one_batch([len(text) - 1], [k + 1]),
            Rows(torch.tensor([0]), torch.tensor([k]), 4),
        )
        text += span_of(verdict, 0)
    return text[:length]


def test_seeded_text_does_not_depend_on_the_drafter() -> None:
    for seed in range(2):
        plain = generate(seed, "none", np.random.default_rng(0), 24)
        for drafter in ("random", "greedy", "same noise"):
            assert generate(seed, drafter, np.random.default_rng(seed), 24) == plain
    assert generate(2, "none", np.random.default_rng(0), 24) != plain


# Large samples of the vectorized code with its own noise. The seeds are fixed, so these either
# always pass or always fail; the bound is a one in 10^6 event.

N = 30_000
P = np.array([0.4, 0.25, 0.2, 0.1, 0.05, 0.0])
Q = np.array([0.1, 0.5, 0.0, 0.3, 0.1, 0.0])


def chi_square(counts: np.ndarray, law: np.ndarray) -> float:
    assert counts[law == 0].sum() == 0
    want = counts.sum() * law[law > 0]
    return float(((counts[law > 0] - want) ** 2 / want).sum())


def bound(freedom: int) -> float:
    """Chi-square value exceeded with chance about 1e-6 (Wilson and Hilferty 1931)."""
    c = 2 / (9 * freedom)
    return freedom * (1 - c + 4.7534 * c**0.5) ** 3


def sample(
    wish: SamplingParams, block: bool, purpose: Purpose | None, reuse: bool = False
) -> np.ndarray:
    """Counts of the first decided token over N requests that differ in their seeds only."""
    logits = torch.tensor(P).log().repeat(2 * N, 1)
    logits[1::2] = torch.tensor(P[::-1].copy()).log()
    params = ParamTable(N + 1)
    params.set(1, wish, 0, (), 0)
    params.temperature[1:] = 1
    params.coupled[1:] = wish.seed is not None
    params.seed[1:] = torch.arange(N) + 1_000_003
    slots = torch.arange(1, N + 1)
    draft = draft_tables([], 1, 6)
    draft = Draft(*(x.expand(N + 1, *x.shape[1:]).clone() for x in draft))
    k = 0
    if purpose is not None:
        k = 1
        position = torch.full((N,), 10)
        # A request whose noise is shared between draft and residual is the wrong rule.
        key = Purpose.RESIDUAL if reuse else purpose
        anchor = 0 if purpose is Purpose.TARGET else position
        draft.tokens[1:, 0] = draw(
            torch.tensor(Q).expand(N, 6), params.seed[1:], position, key, anchor
        )
        draft.q_ids[:, 0] = torch.arange(6)
        draft.q_prob[:, 0] = torch.tensor(Q)
    batch = Batch(
        tokens=torch.zeros(N * (k + 1), dtype=torch.int64),
        positions=torch.arange(9, 10 + k).repeat(N),
        starts=torch.arange(N + 1) * (k + 1),
        slots=slots,
        row_slots=slots.repeat_interleave(k + 1),
        places=torch.zeros(0, dtype=torch.int64),
        known=torch.ones(N, dtype=torch.int64),
        rows=torch.arange(N * (k + 1)),
        split=N * (k + 1),
        spans=(SpanRows(1, 9, k + 1, 0, False, 0),),
    )
    rows = Rows(torch.arange(N) * 2, torch.full((N,), k), k)
    verdict = Verify(params, block=block)(logits, draft, batch, rows)
    return torch.bincount(verdict.tokens[:, 0], minlength=6).numpy()


CASES = {
    "plain": (SAMPLED, False, None),
    "rejection": (SAMPLED, False, Purpose.DRAFT),
    "block": (SAMPLED, True, Purpose.DRAFT),
    "coupled": (SEEDED, False, Purpose.TARGET),
    "coupled, no draft": (SEEDED, False, None),
}


@pytest.mark.parametrize("name", CASES)
def test_large_sample_follows_the_target(name: str) -> None:
    counts = sample(*CASES[name])
    assert chi_square(counts, P) < bound(4)
    moved = P + np.array([-0.02, 0.02, 0, 0, 0, 0])
    assert chi_square(counts, moved) > bound(4)


def test_large_sample_notices_reused_noise() -> None:
    """Drawing the residual with the noise that drew the draft is the wrong rule."""
    assert chi_square(sample(SAMPLED, False, Purpose.DRAFT, reuse=True), P) > bound(4)
