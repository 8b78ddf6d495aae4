"""Losslessness of the real drafters, by exact enumeration on a vocabulary of four.

Every draw a drafter makes is forced once to each of its candidates; the lists it gives the
verifier and the chances of the draws then say what law the output has. It must be the target's,
alone and fused with others, whatever the lengths.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream import models
from slipstream.draft.fuse import Fuse
from slipstream.draft.lookup import Lookup
from slipstream.draft.table import empty
from slipstream.engine.engine import Engine
from slipstream.engine.propose import Proposals
from slipstream.kernels.types import Batch, Draft, Hidden, Verdict
from slipstream.request import Request, SamplingParams
from slipstream.weights.reader import open_directory
from tests import drafters, tiny
from tests.laws import (
    Proposal,
    distance,
    output_law,
    random_table,
    target_law,
)

V, K = 4, 3
TARGET = random_table(1, V, K + 1)
LAW = target_law(TARGET, K + 1, V)


class Forced:
    """Draws what it is told, from the distribution that the engine would draw from."""

    def __init__(self, real: Proposals) -> None:
        self.real = real
        self.path: Sequence[int] = ()
        self.weight, self.at = 1.0, 0

    def start(self, path: Sequence[int]) -> None:
        self.path, self.weight, self.at = path, 1.0, 0

    def __call__(
        self, ids: Tensor, logits: Tensor, slots: Tensor, position: Tensor, anchor: Tensor
    ) -> tuple[Tensor, Tensor]:
        _, prob = self.real(ids, logits.double(), slots, position, anchor)
        token = torch.full_like(slots, self.path[self.at])
        self.at += 1
        self.weight *= float(prob[ids == token[:, None]].sum())
        return token, prob


class Scene:
    """An engine in the middle of a text, and its drafters, ready to propose again and again."""

    def __init__(self, path: Path, params: SamplingParams, prompt: Sequence[int]) -> None:
        self.choose: Forced | None = None
        model = models.build(open_directory(path), torch.float64, torch.device("cpu"))

        def make(inputs: Any, limits: Any, table: Any) -> Any:
            self.choose = Forced(Proposals(table))
            self.heads = drafters.heads(model, path, table, K, vocab=V, choose=self.choose)
            self.lookup = Lookup(inputs.history, inputs.length, K, levels=(1, 2))
            self.slots = limits.slots
            return Fuse(self.lookup, *self.heads.each, slots=limits.slots, tail=self.lookup)

        self.engine: Engine = tiny.engine(model, path, drafter=make, seqs=1, span=K + 1)
        assert self.choose is not None
        self.seen: tuple[Batch, Hidden, Verdict] | None = None
        whole = self.engine.drafter
        assert whole is not None
        observe = whole.observe

        def watched(batch: Batch, hidden: Hidden, verdict: Verdict) -> None:
            observe(batch, hidden, verdict)
            self.seen = batch, hidden, verdict

        whole.observe = watched  # type: ignore[method-assign]
        whole.propose = lambda *_: None  # type: ignore[method-assign]
        self.engine.add(Request("r", tuple(prompt), params))
        self.engine.step()

    def proposals(
        self, drafter: Any, draws: int, length: Callable[[list[float]], int] = len
    ) -> list[Proposal]:
        """All that it may propose here: the drawn lists, with the chances of all draws."""
        assert self.seen is not None and self.choose is not None
        batch, _, verdict = self.seen
        found = []
        for path in itertools.product(range(V), repeat=draws):
            out: Draft = empty(self.slots, K, V)
            out = out._replace(q_prob=out.q_prob.double(), score=out.score.double())
            if isinstance(drafter, Fuse):
                drafter._drafts = [
                    d._replace(q_prob=d.q_prob.double(), score=d.score.double())
                    for d in drafter._drafts
                ]
            self.choose.start(path)
            drafter.propose(batch, verdict, out)
            assert self.choose.at == draws, "draws that were not forced, or forced for nothing"
            slot = batch.spans[0].slot
            count = min(K, length(out.score[slot, : int(out.count[slot])].tolist()))
            lists = []
            for j in range(count):
                q = np.zeros(V)
                np.add.at(q, out.q_ids[slot, j].numpy(), out.q_prob[slot, j].numpy())
                lists.append(q)
            tokens = tuple(out.tokens[slot, :count].tolist())
            if self.choose.weight > 0:
                found.append(Proposal(self.choose.weight, tokens, tuple(lists)))
        assert abs(sum(p.weight for p in found) - 1) < 1e-9
        return found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafters.write(tmp_path_factory.mktemp("four"), vocab=V, mask_token_id=3)


HEAT = [
    SamplingParams(temperature=1.0, top_k=0, top_p=1.0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=3, top_p=0.9, max_tokens=9, ignore_eos=True),
]


def while_sharp(scores: list[float]) -> int:
    """A length that scores decide: up to the first that is low."""
    return next((j for j, s in enumerate(scores) if s < 0.45), len(scores))


@pytest.mark.parametrize("params", HEAT, ids=["1.0", "0.7"])
@pytest.mark.parametrize("block", [False, True], ids=["rejection", "block"])
@pytest.mark.parametrize("length", [len, while_sharp], ids=["whole", "cut"])
def test_every_drafter_alone(
    path: Path, params: SamplingParams, block: bool, length: Callable[[list[float]], int]
) -> None:
    scene = Scene(path, params, (0, 1, 2, 0, 1))
    for head in scene.heads.each:
        made = scene.proposals(head, K, length)
        assert distance(output_law(TARGET, made, K + 1, V, block), LAW) < 1e-12
        assert length is not len or all(len(p.tokens) == K for p in made)


@pytest.mark.parametrize("params", HEAT, ids=["1.0", "0.7"])
@pytest.mark.parametrize("prompt", [(0, 1, 2, 0, 1), (3, 1, 0), (2, 2, 1, 2, 2)])
@pytest.mark.parametrize("length", [len, while_sharp], ids=["whole", "cut"])
def test_every_fusion(
    path: Path,
    params: SamplingParams,
    prompt: tuple[int, ...],
    length: Callable[[list[float]], int],
) -> None:
    scene = Scene(path, params, prompt)
    mtp, dflash = scene.heads.each
    lookup, slots = scene.lookup, scene.slots
    for head in (mtp, dflash):
        for tail in (None, lookup):
            fuse = Fuse(lookup, head, slots=slots, tail=tail)
            made = scene.proposals(fuse, K, length)
            assert distance(output_law(TARGET, made, K + 1, V), LAW) < 1e-12
    # Both heads draw, whichever of the draws is used.
    short = Fuse(dflash, mtp, lookup, slots=slots, tail=lookup)
    mtp.max_len, dflash.max_len = 2, 2
    try:
        made = scene.proposals(short, 4, length)
    finally:
        mtp.max_len = dflash.max_len = K
    assert distance(output_law(TARGET, made, K + 1, V), LAW) < 1e-12


def test_the_enumeration_catches_a_wrong_list(path: Path) -> None:
    """A drafter that says it drew from a slightly different list."""
    scene = Scene(path, HEAT[0], (0, 1, 2, 0, 1))
    made = scene.proposals(scene.heads.each[0], K)

    def bent(q: np.ndarray) -> np.ndarray:
        moved = q.copy()
        moved[int(q.argmax())] -= 0.02
        moved[int(q.argmin())] += 0.02
        return moved

    wrong = [Proposal(p.weight, p.tokens, tuple(bent(q) for q in p.lists)) for p in made]
    assert distance(output_law(TARGET, wrong, K + 1, V), LAW) > 1e-4
