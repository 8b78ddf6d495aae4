"""Fusion of drafters: laws of the real code by enumeration, and the rules it must not follow."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from laws import (
    Proposal,
    Text,
    distance,
    one_batch,
    output_law,
    paths,
    random_table,
    rule_distance,
    rules,
    target_law,
)

from slipstream.draft.fuse import Fuse
from slipstream.draft.lookup import Lookup
from slipstream.draft.table import empty
from slipstream.engine.lengths import choose
from slipstream.kernels.types import Batch, Draft, Hidden, Verdict
from slipstream.models.stores import Store

V, K = 3, 3
TARGET = random_table(1, V, K + 1)
LAW = target_law(TARGET, K + 1, V)
DRAFTER = random_table(2, V, K)


class Fixed:
    """A child that proposes what it is told, slot by slot."""

    stores: tuple[Store, ...] = ()
    width = V

    def __init__(self, name: str, depth: int, taps: tuple[int, ...] = ()) -> None:
        self.names: tuple[str, ...] = (name,)
        self.max_len = depth
        self.taps = taps
        self.next: list[Proposal] = []
        self.scores: list[Sequence[float]] = []
        self.heard = 0
        self.resets: list[int] = []

    reach = 0

    def bind(self, cache: object, first: int) -> None:
        pass

    def reset(self, slot: int, scope: str = "", share: bool = True) -> None:
        self.resets.append(slot)

    def observe(self, batch: Batch, hidden: Hidden, verdict: Verdict) -> None:
        self.heard += 1

    def propose(self, batch: Batch, verdict: Verdict, out: Draft) -> None:
        for slot, proposal, scores in zip(
            batch.slots.tolist(), self.next, self.scores, strict=True
        ):
            n = len(proposal.tokens)
            out.count[slot] = n
            out.tokens[slot, :n] = torch.tensor(proposal.tokens, dtype=torch.int64)
            out.q_prob[slot] = 0
            for j, q in enumerate(proposal.lists):
                out.q_ids[slot, j, :V] = torch.arange(V)
                out.q_prob[slot, j, :V] = torch.from_numpy(q)
            out.score[slot, :n] = torch.tensor(scores, dtype=out.score.dtype)
            out.source[slot] = 0


def doubled(draft: Draft) -> Draft:
    return draft._replace(q_prob=draft.q_prob.double(), score=draft.score.double())


HIDDEN = Hidden(torch.zeros(1, 1))


def verdict_of(n: int) -> Verdict:
    return Verdict(
        torch.ones(n, dtype=torch.int64),
        torch.zeros(n, 1, dtype=torch.int64),
        torch.ones(n, dtype=torch.int64),
    )


def fused(
    model: Sequence[Proposal],
    scores: Sequence[Sequence[float]],
    block: int,
    text: Text,
    tail: bool,
    length: Callable[[Sequence[float]], int] = len,
) -> list[Proposal]:
    """What the real Fuse of a model drafter and a real Lookup proposes for each case."""
    n = len(model)
    history = torch.tensor([text] * (n + 1))
    lookup = Lookup(history, torch.full((n + 1,), len(text)), K, levels=(1, 2))
    child = Fixed("model", block)
    child.next, child.scores = list(model), list(scores)
    fuse = Fuse(lookup, child, slots=n + 1, tail=lookup if tail else None)
    fuse._drafts = [doubled(d) for d in fuse._drafts]
    out = doubled(empty(n + 1, K, V))
    fuse.propose(one_batch([9] * n, [1] * n), verdict_of(n), out)
    result = []
    for slot, proposal in enumerate(model, 1):
        count = min(length(out.score[slot, : int(out.count[slot])].tolist()), K)
        lists = []
        for j in range(count):
            q = np.zeros(V)
            np.add.at(q, out.q_ids[slot, j].numpy(), out.q_prob[slot, j].numpy())
            lists.append(q)
        tokens = tuple(out.tokens[slot, :count].tolist())
        result.append(Proposal(proposal.weight, tokens, tuple(lists)))
    return result


def top_mass(proposals: Sequence[Proposal]) -> list[list[float]]:
    """A score that is a property of each list."""
    return [[float(q.max()) for q in p.lists] for p in proposals]


@pytest.mark.parametrize("text", [(0, 1, 2), (0, 1, 0), (2, 1, 2, 1), (0, 0, 1, 2, 0)])
@pytest.mark.parametrize("block", [1, 2, 3])
@pytest.mark.parametrize("tail", [False, True])
def test_law_of_the_real_fusion(text: Text, block: int, tail: bool) -> None:
    """Source by text, tail by lookup behind sampled drafts, lengths from the scores."""
    model = list(paths(DRAFTER, block, V))
    for length in (len, lambda s: choose(s, K, 0.3), lambda s: choose(s, 2, 0.1)):
        proposals = fused(model, top_mass(model), block, text, tail, length)
        assert distance(output_law(TARGET, proposals, K + 1, V), LAW) < 1e-12


def test_fusion_uses_both_sources() -> None:
    """The laws above would hold for a fusion that never drafts, too."""
    model = list(paths(DRAFTER, 1, V))
    low = fused(model, [[0.01]] * len(model), 1, (2, 1, 2, 1), True)
    assert all(p.tokens == (2, 1, 2) for p in low)
    high = fused(model, [[0.99]] * len(model), 1, (0, 1, 2, 0, 1), True)
    assert [p.tokens[:1] for p in high] == [p.tokens for p in model]
    # Text 0 1 2 0 1, then the draft: what followed its longest suffix last time.
    assert [p.tokens for p in high] == [(0, 1, 0), (1, 1, 1), (2, 0, 1)]
    assert all((p.lists[1].max(), p.lists[2].max()) == (1, 1) for p in high)


def test_positions_of_one_block_come_from_different_drafters() -> None:
    """Scores that favour now one, now the other; the law holds all the same."""
    model = list(paths(DRAFTER, 3, V))
    for scores in ([0.9, 0.1, 0.9], [0.1, 0.9, 0.9], [0.9, 0.9, 0.1]):
        text = (0, 1, 2, 0, 1)
        made = fused(model, [scores] * len(model), 3, text, True)
        kinds = {tuple(float(q.max()) == 1.0 for q in p.lists) for p in made}
        assert (
            (False, True, True) in kinds
            or (True, False, False) in kinds
            or (
                False,
                False,
                True,
            )
            in kinds
        ), kinds
        assert distance(output_law(TARGET, made, K + 1, V), LAW) < 1e-12


@pytest.mark.parametrize("name", rules())
def test_which_rules_are_exact(name: str) -> None:
    if rules()[name][1]:
        for seed, block in itertools.product((2, 3), (False, True)):
            assert rule_distance(name, seed, block) < 1e-12
    else:
        assert max(rule_distance(name, seed) for seed in (2, 3, 4, 5)) > 0.005


def test_two_token_example_of_the_inclusion_rule() -> None:
    """p = (.5, .5), q = (.9, .1), verified if q(x) >= .5: the law becomes (.55, .45)."""
    p, q = np.array([0.5, 0.5]), np.array([0.9, 0.1])

    def law(keep: Callable[[int], bool]) -> np.ndarray:
        cases = [
            Proposal(float(q[x]), (x,), (q,)) if keep(x) else Proposal(float(q[x]), (), ())
            for x in range(2)
        ]
        got = output_law(lambda text: p, cases, 1, 2)
        return np.array([got[(0,)], got[(1,)]])

    assert np.allclose(law(lambda x: bool(q[x] >= 0.5)), [0.55, 0.45], atol=1e-12)
    assert np.allclose(law(lambda x: True), p, atol=1e-12)


def test_records_of_the_children_are_joined() -> None:
    a, b = Fixed("a", 2, taps=(5, 1)), Fixed("b", 3, taps=(1, 9))
    fuse = Fuse(a, b, slots=3)
    assert (fuse.max_len, fuse.width, fuse.names, fuse.taps) == (3, V, ("a", "b"), (1, 5, 9))
    fuse.reset(2)
    assert a.resets == b.resets == [2]
    batch = one_batch([4, 4], [1, 1])
    fuse.observe(batch, HIDDEN, verdict_of(2))
    assert a.heard == b.heard == 1
    q = (0.5, 0.25, 0.25)
    two = Proposal(1, (0, 1), (np.array(q), np.array(q)))
    three = Proposal(1, (2, 2, 2), (np.array(q),) * 3)
    none = Proposal(1, (), ())
    a.next, a.scores = [two, none], [(0.5, 0.9), ()]
    b.next, b.scores = [three, three], [(0.5, 0.1, 0.1), (0.0, 0.0, 0.0)]
    out = empty(3, 5, V + 1)
    out.tokens.fill_(77)
    fuse.propose(batch, verdict_of(2), out)
    # Equal first scores: the earlier child. A child without drafts never wins.
    assert out.count.tolist() == [0, 2, 3]
    assert out.tokens[1, :2].tolist() == [0, 1] and out.tokens[2, :3].tolist() == [2, 2, 2]
    assert out.source[1, 0] == 0 and out.source[2, 0] == 1
    assert out.q_prob[1, 0, :V].tolist() == list(q)
    assert float(out.q_prob[1, 2:].sum()) == 0 and float(out.q_prob[:, :, V:].sum()) == 0
    with pytest.raises(ValueError, match="lookup"):
        Fuse(a, slots=3, tail=Lookup(torch.zeros(3, 4), torch.zeros(3), 2))
    with pytest.raises(ValueError, match="at least one"):
        Fuse(slots=3)
