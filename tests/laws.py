"""Exact output laws: what the verifier emits, as a distribution, without sampling noise.

`output_law` runs the real verifier once for every draft a drafter can propose and for every
pattern of acceptance. Random decisions come from `Scripted`, which plays a pattern just at the
edges of its interval, so a threshold anywhere else changes the result, and which records the
weights of the last draw. The sum over patterns is the law of the emitted text.

Also here: a slow twin of each verification rule in plain Python.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.params import ParamTable
from slipstream.engine.verify import Rows, Verify
from slipstream.kernels.random import Purpose, exponential, uniform
from slipstream.kernels.types import Batch, Draft, SpanRows
from slipstream.request import SamplingParams

Text = tuple[int, ...]
Table = Callable[[Text], np.ndarray]  # text so far -> distribution of the next token
Law = dict[Text, float]

EDGE = 1e-9


class Proposal(NamedTuple):
    """One thing that may be proposed, and how often."""

    weight: float
    tokens: Text
    lists: tuple[np.ndarray, ...]  # [V] each: what the verifier is told it was drawn from


def random_table(seed: int, vocab: int, depth: int, keep: int | None = None) -> Table:
    """Dirichlet distributions for every text up to ``depth`` tokens; ``keep`` ids are positive."""
    rng = np.random.default_rng(seed)
    rows: dict[Text, np.ndarray] = {}
    for size in range(depth + 1):
        for text in itertools.product(range(vocab), repeat=size):
            row = rng.dirichlet(np.full(vocab, 0.7))
            if keep is not None:
                row[rng.permutation(vocab)[keep:]] = 0
                row = row / row.sum()
            rows[text] = row
    return rows.__getitem__


def point(token: int, vocab: int) -> np.ndarray:
    return np.eye(vocab)[token]


def paths(drafter: Table, depth: int, vocab: int) -> Iterable[Proposal]:
    """All that a sampling drafter can propose."""
    for tokens in itertools.product(range(vocab), repeat=depth):
        lists = tuple(drafter(tokens[:j]) for j in range(depth))
        weight = float(np.prod([q[t] for q, t in zip(lists, tokens, strict=True)]))
        if weight > 0:
            yield Proposal(weight, tokens, lists)


def target_law(target: Table, length: int, vocab: int) -> Law:
    law = {}
    for text in itertools.product(range(vocab), repeat=length):
        law[text] = float(np.prod([target(text[:j])[text[j]] for j in range(length)]))
    return law


def distance(a: Law, b: Law) -> float:
    """Total variation."""
    return 0.5 * sum(abs(a.get(text, 0.0) - b.get(text, 0.0)) for text in {*a, *b})


class Scripted:
    """Noise that plays given uniform numbers and records what would be drawn from."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers  # [B, D] float64
        self.weights: Tensor | None = None

    def uniform(self, seed: Tensor, position: Tensor, anchor: Tensor) -> Tensor:
        return self.numbers[:, : position.shape[1]]

    def draw(
        self,
        weights: Tensor,
        seed: Tensor,
        position: Tensor,
        purpose: Tensor | int,
        anchor: Tensor | int,
        support: int,
    ) -> Tensor:
        self.weights = weights
        return torch.zeros(len(weights), dtype=torch.int64)


def chances(target: Table, proposal: Proposal, block: bool) -> list[float]:
    """The chance with which each uniform number accepts, from the formulas."""
    tokens, lists = proposal.tokens, proposal.lists
    depth, out, r = len(tokens), [], 1.0
    for i in range(1, depth + 1):
        p, q, x = target(tokens[: i - 1]), lists[i - 1], tokens[i - 1]
        ratio = p[x] / q[x] if q[x] > 0 else 0.0
        if not block:
            out.append(min(1.0, ratio))
            continue
        r = min(1.0, r * ratio)
        if i == depth:
            out.append(r)
            continue
        following = tokens[i]
        q = lists[i] if lists[i][following] > 0 else np.zeros_like(lists[i])
        m = float(np.maximum(r * target(tokens[:i]) - q, 0).sum())
        out.append(m / (m + 1 - r) if m + 1 - r > 0 else 1.0)
    return out


def one_batch(
    starts: Sequence[int], lengths: Sequence[int], known: Sequence[int] | None = None
) -> Batch:
    """A batch whose span b belongs to slot b + 1."""
    n = len(starts)
    ends = np.cumsum([0, *lengths]).tolist()
    rows = ends[-1]
    slots = torch.arange(1, n + 1)
    sizes = torch.tensor(lengths, dtype=torch.int64)
    spans = tuple(SpanRows(b + 1, starts[b], lengths[b], ends[b], False, 0) for b in range(n))
    return Batch(
        tokens=torch.zeros(rows, dtype=torch.int64),
        positions=torch.cat([torch.arange(s, s + k) for s, k in zip(starts, lengths, strict=True)]),
        starts=torch.tensor(ends),
        slots=slots,
        row_slots=slots.repeat_interleave(sizes),
        places=torch.zeros(0, dtype=torch.int64),
        known=torch.tensor(known if known is not None else [1] * n),
        rows=torch.arange(rows),
        split=rows,
        spans=spans,
    )


def draft_tables(proposals: Sequence[Proposal], depth: int, vocab: int) -> Draft:
    """Draft tables in float64 with proposal b in slot b + 1."""
    n = len(proposals) + 1
    tokens = torch.full((n, depth), -7)
    q_ids = torch.zeros(n, depth, vocab, dtype=torch.int64)
    q_prob = torch.zeros(n, depth, vocab, dtype=torch.float64)
    for b, proposal in enumerate(proposals, 1):
        for j, (token, q) in enumerate(zip(proposal.tokens, proposal.lists, strict=True)):
            tokens[b, j] = token
            ids = np.flatnonzero(q)[::-1].copy()  # a short list in an order of its own
            q_ids[b, j, : len(ids)] = torch.from_numpy(ids)
            q_prob[b, j, : len(ids)] = torch.from_numpy(q[ids])
    count = torch.tensor([0, *(len(p.tokens) for p in proposals)])
    zero = torch.zeros(n, depth)
    return Draft(tokens, count, q_ids, q_prob, zero, zero.long())


def uniform_params(slots: int, params: SamplingParams, seed: int = 0) -> ParamTable:
    """The same parameters in every slot but 0, seeds counting up."""
    table = ParamTable(slots)
    for slot in range(1, slots):
        table.set(slot, params, 0, (), seed + slot)
    return table


def output_law(
    target: Table,
    proposals: Iterable[Proposal],
    length: int,
    vocab: int,
    block: bool = False,
) -> Law:
    """Law of the first ``length`` tokens if one step verifies a proposal and the target goes on.

    Later steps follow the target if this one does: their noise and drafts are their own.
    """
    cases: list[Proposal] = []
    numbers: list[list[float]] = []
    for proposal in proposals:
        limits = chances(target, proposal, block)
        for accept in itertools.product((True, False), repeat=len(limits)):
            weight, row = proposal.weight, []
            for yes, h in zip(accept, limits, strict=True):
                weight *= h if yes else 1 - h
                row.append(h * (1 - EDGE) if yes else min(h * (1 + EDGE), 1 - 2.0**-53))
            if weight > 0:
                cases.append(Proposal(weight, proposal.tokens, proposal.lists))
                numbers.append(row)
    depth = max(len(c.tokens) for c in cases)
    noise = Scripted(
        torch.tensor([row + [0.0] * (depth - len(row)) for row in numbers], dtype=torch.float64)
    )
    logits = torch.tensor(
        np.array([target(c.tokens[:j]) for c in cases for j in range(len(c.tokens) + 1)]),
        dtype=torch.float64,
    ).log()
    lengths = [len(c.tokens) + 1 for c in cases]
    params = uniform_params(len(cases) + 1, SamplingParams(temperature=1.0, top_k=0, top_p=1.0))
    verdict = Verify(params, block=block, noise=noise)(
        logits,
        draft_tables(cases, max(depth, 1), vocab),
        one_batch([0] * len(cases), lengths),
        Rows(torch.tensor(np.cumsum([0, *lengths])[:-1]), torch.tensor(lengths) - 1, depth),
    )
    assert noise.weights is not None
    last = (noise.weights / noise.weights.sum(1, keepdim=True)).numpy()
    law: Law = {}

    def emit(text: Text, weight: float) -> None:
        if len(text) >= length:
            law[text[:length]] = law.get(text[:length], 0.0) + weight
            return
        for token, chance in enumerate(target(text)):
            emit((*text, token), weight * float(chance))

    for b, case in enumerate(cases):
        kept = int(verdict.added[b]) - 1
        head = tuple(verdict.tokens[b, :kept].tolist())
        assert head == case.tokens[:kept]
        for token, chance in enumerate(last[b]):
            if chance > 0:
                emit((*head, token), case.weight * float(chance))
    return law


# Rules of fusion and length on the smallest case that tells them apart.

V, K = 3, 3
COPY: Text = (1, 2, 0)  # what a lookup proposes


def rules() -> dict[str, tuple[Callable[[Proposal], Proposal], bool]]:
    """Rules as functions of what was drafted; True: exact."""
    copy = [point(t, V) for t in COPY]

    def cut(p: Proposal, k: int) -> Proposal:
        return Proposal(p.weight, p.tokens[:k], p.lists[:k])

    def swap(p: Proposal, tokens: Text, lists: Sequence[np.ndarray]) -> Proposal:
        return Proposal(p.weight, tokens, tuple(lists))

    def replaced_prefix(p: Proposal) -> Proposal:
        return swap(p, (COPY[0], *p.tokens[1:]), (copy[0], *p.lists[1:]))

    def tail(p: Proposal) -> Proposal:
        return swap(p, (p.tokens[0], *COPY[1:]), (p.lists[0], *copy[1:]))

    def agree_later(p: Proposal) -> Proposal:
        return tail(p) if p.tokens[0] == COPY[0] else p

    def agree_everywhere(p: Proposal) -> Proposal:
        return swap(p, COPY, copy) if p.tokens[0] == COPY[0] else p

    def while_list_is_sharp(p: Proposal) -> Proposal:
        sharp = [float(q.max()) > 0.6 for q in p.lists]
        return cut(p, next((j for j, yes in enumerate(sharp) if not yes), K))

    def while_earlier_drafts_are_likely(p: Proposal) -> Proposal:
        k = 1
        while k < K and p.lists[k - 1][p.tokens[k - 1]] > 0.4:
            k += 1
        return cut(p, k)

    def while_drafts_are_likely(p: Proposal) -> Proposal:
        k = 0
        while k < K and p.lists[k][p.tokens[k]] > 0.4:
            k += 1
        return cut(p, k)

    def best_by_whole_block(p: Proposal) -> Proposal:
        """Looks ahead: the second list is computed from the first draft."""
        ours = sum(float(q.max()) for q in p.lists)
        return p if ours > 2.2 else swap(p, COPY, copy)

    def best_by_first(p: Proposal) -> Proposal:
        return p if float(p.lists[0].max()) > 0.6 else swap(p, COPY, copy)

    def length_by_look_ahead(p: Proposal) -> Proposal:
        """The best of 0 and 3 drafts where 3 cost as much as 1: the sum decides on the first."""
        survivals = np.cumprod([float(q.max()) for q in p.lists])
        return cut(p, K) if survivals.sum() > 1.3 else cut(p, 0)

    return {
        "drafter alone": (lambda p: p, True),
        "lookup alone": (lambda p: swap(p, COPY, copy), True),
        "tail by lookup": (tail, True),
        "stale drafts after a replaced prefix": (replaced_prefix, True),
        "agreement changes later positions": (agree_later, True),
        "agreement makes point masses everywhere": (agree_everywhere, False),
        "length: while lists are sharp": (while_list_is_sharp, True),
        "length: while earlier drafts are likely": (while_earlier_drafts_are_likely, True),
        "length: while drafts are likely": (while_drafts_are_likely, False),
        "source: first position's list": (best_by_first, True),
        "source: lists of the whole block": (best_by_whole_block, False),
        "length: best total, looking ahead": (length_by_look_ahead, False),
    }


def rule_distance(name: str, seed: int = 2, block: bool = False) -> float:
    """Total variation between the output law under a rule and the target's.

    The target is `random_table(1)` and the drafter `random_table(seed)` over 3 tokens.
    """
    target = random_table(1, V, K + 1)
    proposals = [rules()[name][0](p) for p in paths(random_table(seed, V, K), K, V)]
    law = output_law(target, proposals, K + 1, V, block)
    return distance(law, target_law(target, K + 1, V))


# Slow twins: one span, plain Python. Each returns the accepted count and the token after it.

Rules = Callable[..., tuple[int, int]]


def race(weights: Sequence[float], noise: Sequence[float]) -> int:
    keys = [w / e for w, e in zip(weights, noise, strict=True)]
    return keys.index(max(keys))


class Addressed:
    """The numbers a running engine would use for one request, one at a time."""

    def __init__(self, seed: int, first: int, vocab: int) -> None:
        self.seed = torch.tensor(seed)
        self.first = first  # first position the step decides
        self.vocab = vocab

    def accept(self, i: int) -> float:
        return float(uniform(self.seed, self.first + i, Purpose.ACCEPT, self.first))

    def tokens(self, i: int, purpose: Purpose) -> list[float]:
        anchor = 0 if purpose is Purpose.TARGET else self.first
        ids = torch.arange(self.vocab)
        noise = exponential(self.seed, self.first + i, ids, purpose, anchor, torch.float64)
        return [float(e) for e in noise]


def greedy_twin(p: np.ndarray, tokens: Text) -> tuple[int, int]:
    best = [int(row.argmax()) for row in p]
    kept = 0
    while kept < len(tokens) and tokens[kept] == best[kept]:
        kept += 1
    return kept, best[kept]


def coupled_twin(p: np.ndarray, tokens: Text, noise: Addressed) -> tuple[int, int]:
    kept = 0
    while True:
        own = race(p[kept].tolist(), noise.tokens(kept, Purpose.TARGET))
        if kept == len(tokens) or tokens[kept] != own:
            return kept, own
        kept += 1


def rejection_twin(
    p: np.ndarray, tokens: Text, lists: Sequence[np.ndarray], noise: Addressed
) -> tuple[int, int]:
    for i, (x, q) in enumerate(zip(tokens, lists, strict=True)):
        listed = 0 <= x < len(q) and q[x] > 0
        if listed and noise.accept(i) * q[x] < p[i][x]:
            continue
        weights = np.maximum(p[i] - q, 0) if listed else p[i]
        if weights.max() <= 0:
            weights = p[i]
        return i, race(weights.tolist(), noise.tokens(i, Purpose.RESIDUAL))
    n = len(tokens)
    return n, race(p[n].tolist(), noise.tokens(n, Purpose.BONUS))


def block_twin(
    p: np.ndarray, tokens: Text, lists: Sequence[np.ndarray], noise: Addressed
) -> tuple[int, int]:
    k = len(tokens)
    real = [0 <= x < p.shape[1] and q[x] > 0 for x, q in zip(tokens, lists, strict=True)]
    used = [q if ok else np.zeros_like(q) for q, ok in zip(lists, real, strict=True)]
    r, kept = [1.0], 0
    for i in range(1, k + 1):
        x = tokens[i - 1]
        ratio = p[i - 1][x] / used[i - 1][x] if real[i - 1] else 0.0
        r.append(min(1.0, r[-1] * ratio))
        if i < k:
            m = float(np.maximum(r[i] * p[i] - used[i], 0).sum())
            h = m / (m + 1 - r[i]) if m + 1 - r[i] > 0 else 1.0
        else:
            h = r[k]
        if noise.accept(i - 1) < h:
            kept = i
    if kept == k:
        return k, race(p[k].tolist(), noise.tokens(k, Purpose.BONUS))
    weights = np.maximum(r[kept] * p[kept] - used[kept], 0)
    if weights.max() <= 0:
        weights = p[kept]
    return kept, race(weights.tolist(), noise.tokens(kept, Purpose.RESIDUAL))
