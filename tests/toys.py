"""Drafters that need no training, for proving what the engine does with drafts."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from slipstream.kernels.types import Batch, Draft, Hidden, Verdict


class Oracle:
    """Knows how each text goes on, and errs on purpose.

    Every position's list has `width` ids; the draft is drawn from it, so a list that puts most of
    its mass on the true token is right that often. ``texts`` maps a prompt to prompt and answer.
    """

    stores: tuple[()] = ()
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        history: Tensor,
        length: Tensor,
        k: int,
        texts: list[list[int]],
        *,
        right: float,
        width: int = 3,
        vocab: int = 97,
        seed: int = 0,
        name: str = "oracle",
    ) -> None:
        self.history, self.length, self.texts = history, length, texts
        self.max_len, self.width, self.vocab, self.right = k, width, vocab, right
        self.names = (name,)
        self.random = random.Random(seed)

    reach = 0

    def bind(self, cache: object, first: int) -> None:
        pass

    def reset(self, slot: int, scope: str = "", share: bool = True) -> None:
        pass

    def observe(self, batch: Batch, hidden: Hidden, verdict: Verdict) -> None:
        pass

    def propose(self, batch: Batch, verdict: Verdict, out: Draft) -> None:
        for b, span in enumerate(batch.spans):
            out.count[span.slot] = 0
            if not int(verdict.added[b]):
                continue
            known = self.history[span.slot, : int(self.length[span.slot])].tolist()
            true = next((t[len(known) :] for t in self.texts if t[: len(known)] == known), [])
            count = self.random.randint(0, self.max_len)
            out.count[span.slot] = count
            for j in range(count):
                ids = self.random.sample(range(self.vocab), self.width)
                if j < len(true):
                    ids[0] = true[j]
                    ids[1:] = [i if i != ids[0] else (i + 1) % self.vocab for i in ids[1:]]
                    if self.width > 2 and len(set(ids)) < self.width:
                        ids = [ids[0], *random_others(ids[0], self.width - 1, self.vocab)]
                rest = (1 - self.right) / max(1, self.width - 1)
                prob = [self.right] + [rest] * (self.width - 1)
                if self.width == 1:
                    prob = [1.0]
                out.q_ids[span.slot, j] = 0
                out.q_prob[span.slot, j] = 0
                out.q_ids[span.slot, j, : self.width] = torch.tensor(ids)
                out.q_prob[span.slot, j, : self.width] = torch.tensor(prob)
                out.tokens[span.slot, j] = self.random.choices(ids, prob)[0]
                out.score[span.slot, j] = self.right
                out.source[span.slot, j] = 0


def random_others(first: int, count: int, vocab: int) -> list[int]:
    """`count` ids that are not `first` and differ."""
    return [(first + 1 + i) % vocab for i in range(count)]
