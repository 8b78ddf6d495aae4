"""Every interface of the engine on one page; read this first.

`models/` and `draft/` implement these by shape and import none of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from slipstream.engine.verify import Rows
from slipstream.kernels.types import Batch, Draft, Hidden, Verdict
from slipstream.models.stores import Store
from slipstream.models.view import CacheView
from slipstream.request import Output, Request


class Model(Protocol):
    """The mathematics of one family. Never sees a Sequence."""

    stores: tuple[Store, ...]  # one per layer; declared, not allocated
    vocab: int
    hidden_size: int
    context: int  # positions the checkpoint was made for

    def forward(self, batch: Batch, cache: CacheView, taps: tuple[int, ...] = ()) -> Hidden:
        """Run all rows; write KV, state and rings."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, h] -> [R, vocab] in float32 (float64 for a float64 model)."""
        ...


class Drafter(Protocol):
    """Proposes tokens with a short list q. Several are one (`draft.fuse.Fuse`)."""

    stores: tuple[Store, ...]
    taps: tuple[int, ...]
    max_len: int
    width: int  # S, entries of its longest list
    names: tuple[str, ...]  # its sources
    reach: int  # positions past the last known token that it writes to pages

    def bind(self, cache: CacheView, first: int) -> None:
        """Its stores are layers ``first``, ``first + 1``, ... of this cache. Called once."""
        ...

    def reset(self, slot: int, scope: str = "", share: bool = True) -> None:
        """The slot belongs to another sequence from now on, of this scope.

        ``share``: its text may help other requests of the scope, and theirs help it.
        """
        ...

    def observe(self, batch: Batch, hidden: Hidden, verdict: Verdict) -> None:
        """Every step, prompt chunks too; also hears of tokens another drafter won.

        ``hidden.taps`` has the drafter's own taps, in its order.
        """
        ...

    def propose(self, batch: Batch, verdict: Verdict, out: Draft) -> None:
        """Write the next drafts of the batch's slots into `out`, at most as many as asked for.

        Every field of ``out`` is written for positions below ``out.count``; slots whose span
        decided nothing get none.
        """
        ...


class Verifier(Protocol):
    """Probabilities, then the verdict; the same call samples when there are no drafts."""

    def __call__(
        self,
        logits: Tensor,
        draft: Draft,
        batch: Batch,
        rows: Rows,
        history: Tensor | None = None,
    ) -> Verdict: ...


class Serving(Protocol):
    """All that HTTP, chat and the offline API need of an engine. Tests pass a fake."""

    def submit(self, request: Request) -> AsyncIterator[Output]:
        """Queue a request; the iterator ends after the Output whose `finish` is set."""
        ...

    def abort(self, id: str) -> None:
        """Stop a request, queued or running; its iterator ends with finish "abort"."""
        ...

    def about(self) -> ServingFacts: ...


@dataclass(frozen=True, slots=True)
class ServingFacts:
    """What a server may tell its clients about the engine behind it."""

    model: str
    context: int
    vocab: int
    running: int = 0
    waiting: int = 0
    preemptions: int = 0  # since the start
    seconds: tuple[tuple[str, float], ...] = ()  # by part of the step, since the start
