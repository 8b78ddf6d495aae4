"""What one step costs, by rows and by context, beside the time its bytes take.

Every step is the engine's own: plan, forward pass, verdict, drafts. Contexts are filled with
random keys, values and state instead of being computed, since only their size matters here.
"""

from __future__ import annotations

import platform
import statistics
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream import models
from slipstream.bench.machine import copy_bandwidth
from slipstream.config import Config, ConfigError, override
from slipstream.draft.table import Rule
from slipstream.engine import memory
from slipstream.engine.batch import Inputs
from slipstream.engine.build import assemble
from slipstream.engine.cache import page_bytes
from slipstream.engine.engine import Engine
from slipstream.kernels.types import FOLD, PAGE, Batch, Draft, Verdict
from slipstream.request import Request, SamplingParams
from slipstream.weights.sources import open_checkpoint, resolve


@dataclass(frozen=True, slots=True)
class StepCost:
    """One cell of the table."""

    context: int
    rows: int
    sequences: int
    ms: float  # median of the steps
    worst_ms: float
    bytes: int  # weights once, keys and values of every sequence
    floor_ms: float  # bytes at the copy bandwidth measured in the same run


@dataclass(frozen=True, slots=True)
class StepTable:
    """All cells and where they were measured."""

    model: str
    machine: str
    threads: int
    dtype: str
    copy_gb_s: float
    cells: tuple[StepCost, ...]

    def __str__(self) -> str:
        contexts = sorted({c.context for c in self.cells})
        by = {(c.rows, c.context): c for c in self.cells}
        lines = [
            f"{self.model}, {self.dtype}, {self.machine}, {self.threads} threads,"
            f" copy {self.copy_gb_s:.1f} GB/s; milliseconds a step (floor)",
            "| rows | " + " | ".join(f"{c} context" for c in contexts) + " |",
            "|---:|" + "---:|" * len(contexts),
        ]
        for rows in sorted({c.rows for c in self.cells}):
            found = [by[rows, c] for c in contexts]
            lines.append(
                f"| {rows} | " + " | ".join(f"{c.ms:.1f} ({c.floor_ms:.1f})" for c in found) + " |"
            )
        return "\n".join(lines)


class Fixed(Rule):
    """Proposes the same number of arbitrary tokens each step; nearly all fall."""

    names: tuple[str, ...] = ("fixed",)

    def __init__(self, length: Tensor, k: int, vocab: int) -> None:
        self.length, self.max_len, self.count, self.vocab = length, k, k, vocab

    def propose(self, batch: Batch, verdict: Verdict, out: Draft) -> None:
        slots = batch.slots
        steps = torch.arange(out.tokens.shape[1])
        out.tokens[slots] = (self.length[slots, None] * 7919 + steps * 104729) % self.vocab
        out.count[slots] = self.count
        out.q_ids[slots, :, 0] = out.tokens[slots]
        out.q_prob[slots, :, 0] = 1.0
        out.score[slots] = 1.0


def measure(config: Config, contexts: list[int], rows: list[int], steps: int = 12) -> StepTable:
    """Time steps of every combination.

    Args:
        contexts: tokens before the step.
        rows: short rows of the step; a sequence takes at most ``limits.span`` of them.
        steps: per cell, after two that are not counted.
    """
    span = config.limits.span
    seqs = max(-(-r // span) for r in rows)
    uneven = [r for r in rows if r % -(-r // span)]
    if uneven:
        raise ConfigError(
            f"{uneven[0]} rows do not divide evenly over sequences of at most {span}: leave it out"
        )
    longest = max(contexts) + span * (steps + 4)
    checkpoint = open_checkpoint(resolve(config.model))
    dtype, device = memory.number_format(config), memory.device_of(config)
    outline = models.outline(checkpoint, dtype, device)
    if longest > outline.context:
        most = outline.context - span * (steps + 4)
        raise ConfigError(
            f"the checkpoint has {outline.context} positions, and the steps themselves take"
            f" {span * (steps + 4)}: give contexts up to {most}"
        )
    context = longest
    config = override(
        config,
        {
            "limits.seqs": seqs,
            "limits.tokens": max(config.limits.tokens, seqs * span + 64),
            "limits.context": context,
        },
    )
    if config.threads:
        torch.set_num_threads(config.threads)
    sized = memory.sizes(config, checkpoint, outline.stores, outline.nbytes, outline.context)
    sized = replace(sized, pages=seqs * sized.limits.pages + 2)
    model = models.build(checkpoint, dtype, device)
    inputs = Inputs(sized.limits, device)
    drafter = Fixed(inputs.length, sized.limits.drafts, model.vocab)
    engine = assemble(
        model, drafter, sized, inputs, prefix=False, row_cost=0.0, name=config.model, seed=0
    )
    for tensor in engine.cache.tensors():
        if tensor.is_floating_point():
            tensor.normal_(std=0.5)
    bandwidth = copy_bandwidth()
    cells = []
    for size in contexts:
        for wanted in rows:
            used = -(-wanted // span)
            ms = _cell(engine, drafter, size, wanted, used, steps)
            per_token = page_bytes(model.stores, dtype) // PAGE
            moved = outline.nbytes + used * size * per_token
            floor = moved / bandwidth * 1e3
            cells.append(StepCost(size, wanted, used, statistics.median(ms), max(ms), moved, floor))
    return StepTable(
        config.model,
        platform.processor() or platform.machine(),
        torch.get_num_threads(),
        str(dtype).removeprefix("torch."),
        bandwidth / 1e9,
        tuple(cells),
    )


def _cell(
    engine: Engine, drafter: Fixed, context: int, rows: int, sequences: int, steps: int
) -> list[float]:
    """Milliseconds of each step with `rows` rows over `sequences` sequences."""
    drafter.count = rows // sequences - 1
    for i in range(sequences):
        tokens = tuple((j * 31 + i) % (engine.vocab - 2) + 2 for j in range(context))
        engine.add(Request(str(i), tokens, SamplingParams(temperature=0.0, ignore_eos=True)))
        # As if the prompt had been computed, and one token decided.
        sequence = engine.scheduler.waiting.popleft()
        sequence.tokens.append(5)
        admitted = engine.cache.admit(sequence)
        assert admitted is not None, "the pool holds every sequence"
        assert engine.cache.reserve(sequence.slot, context)
        sequence.computed = sequence.cached = context
        engine.cache.fold_of[sequence.slot] = context - context % FOLD
        engine.scheduler.running.append(sequence)
        engine.scheduler.admitted.append(sequence)
    times = []
    for _ in range(steps + 2):
        begin = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - begin) * 1e3)
    for i in range(sequences):
        engine.abort(str(i))
    return times[2:]
