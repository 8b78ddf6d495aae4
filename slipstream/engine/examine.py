"""What a finished engine is asked before its first request: whether its drafters are any good for
this target, and what steps and drafts cost on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import torch

from slipstream.draft.table import empty
from slipstream.engine.batch import Span
from slipstream.engine.costs import ROWS, Costs
from slipstream.engine.engine import Engine
from slipstream.engine.protocols import Drafter
from slipstream.engine.verify import Rows
from slipstream.kernels.types import Batch, Draft, Hidden, Verdict
from slipstream.models.stores import Store
from slipstream.models.view import CacheView
from slipstream.request import Request, SamplingParams

STEPS = 32  # tokens that the drafters are examined on
PLAIN = SamplingParams(temperature=0.0, ignore_eos=True)
LEAST = 0.15  # drafts of the first four that must stand per step, each


class Witness:
    """Lets drafters see and propose, compares with what the target decides, and drafts nothing."""

    names: tuple[str, ...] = ()
    max_len = 0
    width = 1

    def __init__(self, drafter: Drafter, children: Sequence[Drafter], slots: int, k: int) -> None:
        self._drafter, self._children = drafter, children
        self.stores: tuple[Store, ...] = drafter.stores
        self.taps, self.reach = drafter.taps, drafter.reach
        device = torch.device("cpu")
        self._drafts = [empty(slots, k, c.width, device) for c in children]
        self.said: list[int] = []  # what the target decided
        self.guessed: list[list[list[int]]] = []  # by step and child, drafts for what follows

    def bind(self, cache: CacheView, first: int) -> None:
        """The drafters are bound already."""

    def reset(self, slot: int, scope: str = "", share: bool = True) -> None:
        """As the drafter."""
        self._drafter.reset(slot, scope, False)

    def observe(self, batch: Batch, hidden: Hidden, verdict: Verdict) -> None:
        """Note what the step decided."""
        self._drafter.observe(batch, hidden, verdict)
        if batch.spans[0].ready:
            self.said.append(int(verdict.tokens[0, 0]))

    def propose(self, batch: Batch, verdict: Verdict, out: Draft) -> None:
        """Ask every drafter, and keep it from the engine."""
        spans = tuple(s._replace(ask=None) for s in batch.spans)
        for child, draft in zip(self._children, self._drafts, strict=True):
            child.propose(batch._replace(spans=spans), verdict, draft)
        if spans[0].ready:
            slot = spans[0].slot
            self.guessed.append([d.tokens[slot, : d.count[slot]].tolist() for d in self._drafts])
        out.count[batch.slots] = 0

    def lengths(self) -> list[float]:
        """Drafts that stood per step, on average, of each child."""
        total = [0] * len(self._children)
        steps = self.guessed[: len(self.said) - 1]
        for at, guesses in enumerate(steps, 1):
            for i, drafts in enumerate(guesses):
                for guess, token in zip(drafts, self.said[at:], strict=False):
                    if guess != token:
                        break
                    total[i] += 1
        return [n / max(1, len(steps)) for n in total]


def standing(engine: Engine, children: Sequence[Drafter], prompt: Sequence[int]) -> list[float]:
    """How many drafts of each drafter stand per step, on average, decoding greedily.

    Measured on the project's embedded model: its drafters get 1.2 and 1.4; a block drafter that
    reads wrong layers 0.4 to 0.5, one with as much noise as weight 0.1.

    Args:
        children: the drafters to examine, parts of the engine's own.
        prompt: token ids of an ordinary text.

    Returns:
        One number per drafter, over `STEPS` tokens.
    """
    assert engine.drafter is not None
    own = engine.drafter
    k = max(1, engine.limits.drafts)
    witness = Witness(own, children, engine.limits.slots, k)
    room = engine.limits.context - STEPS - 1
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    engine.drafter = witness
    try:
        engine.add(Request("examination", tuple(prompt[-max(1, room) :]), params, "\0examination"))
        while engine.busy:
            engine.step()
    finally:
        engine.drafter = own
        engine.clear()
    return witness.lengths()


def least(drafter: Drafter) -> float:
    """What `standing` must be for a drafter to be of use."""
    return LEAST * min(4, drafter.max_len)


@torch.inference_mode()
def costs(engine: Engine, children: Sequence[Drafter], seconds: float = 0.4) -> Costs:
    """Time steps of some row counts, and each drafter, for about so many seconds.

    Nothing is committed: what the steps write lies behind the text and is gone with it.
    """
    limits = engine.limits
    most = min(max(ROWS), limits.seqs * limits.span, limits.tokens)
    rows = [n for n in ROWS if n <= most]
    count = -(-rows[-1] // limits.span)
    size = max(1, min(60, limits.context - limits.span - 1))  # below a page: nothing is published
    for i in range(count):
        prompt = tuple((7 * i + j) % engine.vocab for j in range(size))
        engine.add(Request(f"costs{i}", prompt, PLAIN, "\0costs"))
    try:
        while engine.scheduler.waiting or any(s.prefilling for s in engine.scheduler.running):
            engine.step()
        for sequence in engine.scheduler.running:
            upto = sequence.computed + limits.span + (engine.drafter.reach if engine.drafter else 0)
            engine.cache.reserve(sequence.slot, min(upto, limits.context))
        begin = perf_counter()
        _step(engine, 1)
        round_time = 1.5 * len(rows) * (perf_counter() - begin)
        return Costs.measure(
            lambda n: _step(engine, n),
            {c.names[0]: (_drafting(engine, c), c.max_len) for c in children},
            rows=rows,
            repeats=min(5, max(1, int(seconds / round_time) - 1)),
        )
    finally:
        engine.clear()


def _fill(engine: Engine, rows: int) -> tuple[Batch, Rows]:
    """A batch of so many short rows over the running sequences."""
    plan = []
    for sequence in engine.scheduler.running:
        n = min(rows, engine.limits.span)
        rows -= n
        if n:
            plan.append(Span(sequence, sequence.computed, n, n - 1, False))
    return engine.inputs.fill(plan, engine.cache, engine.draft)


def _step(engine: Engine, rows: int) -> None:
    batch, where = _fill(engine, rows)
    hidden, logits = engine.run_target(batch)
    verdict = engine.verify(logits, engine.draft, batch, where, engine.inputs.history)
    if engine.drafter:
        engine.drafter.observe(batch, hidden, verdict)
    verdict.count.tolist()  # wait for the device


def _drafting(engine: Engine, child: Drafter) -> Callable[[int], None]:
    batch, _ = _fill(engine, 1)
    slots, k = engine.limits.slots, max(1, engine.limits.drafts)
    table = empty(slots, k, child.width, batch.slots.device)
    one = torch.ones_like(batch.slots)
    verdict = Verdict(one, one[:, None].expand(-1, k + 1), one)

    def run(count: int) -> None:
        spans = tuple(s._replace(ask=(count,) * len(child.names)) for s in batch.spans)
        child.propose(batch._replace(spans=spans), verdict, table)
        table.count.tolist()

    return run
