"""The byte plan: what everything will take, from sizes alone, before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slipstream import models
from slipstream.config import Config, ConfigError
from slipstream.draft.loading import Found, Heads, Refuse, find, load
from slipstream.draft.lookup import Lookup
from slipstream.engine.batch import Limits
from slipstream.engine.cache import page_bytes, slot_bytes
from slipstream.kernels.types import DTYPES, PAGE
from slipstream.models.blocks import Outline
from slipstream.models.stores import PerSlot, Store
from slipstream.weights.reader import Checkpoint, CheckpointError
from slipstream.weights.sources import open_checkpoint, resolve

GIB = 2**30
_MOST = 65536  # GiB
LONGEST = 32768  # positions planned for when the config leaves the context to us


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the plan."""

    name: str
    bytes: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be allocated. ``str(plan)`` is the table that `slipstream plan` prints."""

    model: str
    dtype: str
    device: str
    seqs: int
    context: int
    pages: int  # page 0 included
    rows: tuple[Row, ...]
    total: int  # bytes on the device
    host: int  # bytes of host memory that snapshots and lookup may take
    lookup: int  # bytes of that for the index of lookup

    @property
    def line(self) -> str:
        """The plan in one line."""
        parts = ", ".join(f"{r.name} {_size(r.bytes)}" for r in self.rows if r.bytes >= 2**20)
        return f"memory: {_size(self.total)} planned ({parts})"

    def __str__(self) -> str:
        lines = [
            f"memory plan for {self.model} ({self.dtype} on {self.device})",
            *(f"  {r.name:<22}{_size(r.bytes):>12}  {r.note}".rstrip() for r in self.rows),
            f"  {'total':<22}{_size(self.total):>12}",
        ]
        if self.host:
            snapshots = self.host - self.lookup
            lines.append(f"  {'snapshots (host)':<22}{_size(snapshots):>12}  at most")
            lines.append(f"  {'lookup index (host)':<22}{_size(self.lookup):>12}  at most")
        return "\n".join(lines)


def _size(n: int) -> str:
    return f"{n / GIB:.2f} GiB" if n >= GIB else f"{n / 2**20:.1f} MiB"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Everything `build` allocates by, and the plan that says so."""

    limits: Limits
    pages: int
    dtype: torch.dtype
    device: torch.device
    snapshots: int
    plan: Plan


def plan_for(model: str, config: Config) -> Plan:
    """The plan of a checkpoint, from its headers alone.

    Raises:
        CheckpointError: it cannot be read. ConfigError: a setting cannot work.
    """
    checkpoint = open_checkpoint(resolve(model))
    made = outline(config, checkpoint)
    facts, drafters = made.model, sum(made.heads.sizes)
    return sizes(config, checkpoint, made.stores, facts.nbytes, facts.context, drafters).plan


@dataclass(frozen=True, slots=True)
class Outlined:
    """A model and its drafters, known from headers alone."""

    model: models.OutlineFacts
    found: Found
    heads: Heads
    vocab: int

    @property
    def stores(self) -> tuple[Store, ...]:
        """The model's, then its drafters'."""
        return self.model.stores + self.heads.stores


def outline(
    config: Config,
    checkpoint: Checkpoint,
    vocab: int | None = None,
    refuse: Refuse = lambda name, error: None,
) -> Outlined:
    """What `engine.build` would load.

    Args:
        vocab: real token ids; None: all rows of the head.
        refuse: is told of a drafter that does not fit, and why.

    Raises:
        CheckpointError: the target cannot be loaded.
    """
    dtype, device = number_format(config), device_of(config)
    facts = models.outline(checkpoint, dtype, device)
    vocab = min(vocab or facts.model.vocab, facts.model.vocab)
    speculation = config.speculation
    found = Found()
    if speculation.enabled:
        found = find(checkpoint, speculation.mtp, speculation.dflash, refuse)
    heads = load(
        found,
        facts.model,
        _undecided,
        loader=Outline,
        dtype=dtype,
        device=device,
        drafts=min(config.limits.span, 64) - 1,
        vocab=vocab,
        refuse=refuse,
    )
    works = Found(found.mtp if heads.mtp else None, found.dflash if heads.dflash else None)
    return Outlined(facts, works, heads, vocab)


def _undecided(
    ids: Tensor, logits: Tensor, slots: Tensor, position: Tensor, anchor: Tensor
) -> tuple[Tensor, Tensor]:
    raise AssertionError("an outline drafts nothing")


def number_format(config: Config) -> torch.dtype:
    """The computation's format; auto is float32."""
    return torch.float32 if config.dtype == "auto" else DTYPES[config.dtype]


def device_of(config: Config) -> torch.device:
    """The device of the config; until there are GPU kernels, that is the CPU.

    Raises:
        ConfigError: another device.
    """
    if config.device not in ("cpu", "auto"):
        raise ConfigError(
            f"device is {config.device!r}: this version computes on the CPU only, give cpu or auto"
        )
    return torch.device("cpu")


def sizes(
    config: Config,
    checkpoint: Checkpoint,
    stores: tuple[Store, ...],
    weights: int,
    longest: int,
    drafters: int = 0,
) -> Sizes:
    """Turn settings into sizes.

    Args:
        stores: of the model and all drafters.
        weights: bytes of the model's weights in memory.
        longest: positions the checkpoint was made for.
        drafters: bytes of the drafters' weights.

    Raises:
        ConfigError: a setting cannot work; the message has the numbers.
    """
    limits = _limits(config, longest)
    dtype, device = number_format(config), device_of(config)
    per_page, per_slot = page_bytes(stores, dtype), slot_bytes(stores, limits, dtype)
    pages = _pages(config, limits, per_page)
    stateful = any(isinstance(s, PerSlot) for s in stores)
    snapshots = int(config.cache.snapshots * GIB) if config.cache.prefix and stateful else 0
    vocab = int(checkpoint.config["vocab_size"])  # the outline has checked it
    tables = limits.slots * 8 * (limits.context + limits.pages + 2)
    drafts = limits.slots * max(1, limits.drafts) * 8 * 4
    logits = 3 * 4 * vocab * min(limits.tokens, limits.seqs * limits.span)
    rows = (
        Row("weights", weights, f"{checkpoint.path.name}"),
        *(
            [Row("drafters", drafters, "their own weights; head and embedding are shared")]
            if drafters
            else []
        ),
        Row(
            "pages",
            pages * per_page,
            f"{(pages - 1) * PAGE} tokens, {per_page // PAGE} bytes each",
        ),
        Row("slots", limits.slots * per_slot, f"{limits.seqs} sequences"),
        Row("tables", tables + drafts, "tokens, pages and drafts by slot"),
        Row("scratch", logits, f"logits of a step, {limits.tokens} rows in all"),
    )
    lookup = 0
    if config.speculation.enabled and config.speculation.lookup and limits.drafts:
        lookup = Lookup.host_bytes(limits.context, limits.slots, config.speculation.shared)
    plan = Plan(
        model=config.model if len(config.model) < 60 else Path(config.model).name,
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        seqs=limits.seqs,
        context=limits.context,
        pages=pages,
        rows=rows,
        total=sum(r.bytes for r in rows),
        host=snapshots + lookup,
        lookup=lookup,
    )
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if plan.total + plan.host > physical:
        raise ConfigError(
            f"{_size(plan.total + plan.host)} are planned, and this machine has {_size(physical)}:"
            " lower limits.context, limits.seqs, cache.memory or cache.snapshots"
            f" ({plan.line})"
        )
    return Sizes(limits, pages, dtype, device, snapshots, plan)


def _limits(config: Config, longest: int) -> Limits:
    asked = config.limits
    context = asked.context or min(longest, LONGEST)
    for ok, text in (
        (asked.seqs >= 1, f"limits.seqs is {asked.seqs}: give 1 or more"),
        (asked.seqs <= 1024, f"limits.seqs is {asked.seqs}: give 1024 or less"),
        (asked.tokens <= 2**20, f"limits.tokens is {asked.tokens}: give {2**20} or less"),
        (context >= 2, f"limits.context is {context}: a prompt and its answer need 2 or more"),
        (0 <= config.threads <= 1024, f"threads is {config.threads}: give 0 to 1024"),
        (1 <= asked.span <= 64, f"limits.span is {asked.span}: give 1 to 64"),
        (asked.context >= 0, f"limits.context is {asked.context}: give 0 or more"),
        (
            context <= longest,
            f"limits.context is {context}, but the checkpoint was made for {longest} positions:"
            f" give {longest} or less",
        ),
        (
            asked.tokens >= asked.seqs + PAGE,
            f"limits.tokens is {asked.tokens}: {asked.seqs} sequences and one prompt page need"
            f" {asked.seqs + PAGE} rows a step, give that or more",
        ),
        (
            config.cache.snapshot_every >= 0 and config.cache.snapshot_every % PAGE == 0,
            f"cache.snapshot_every is {config.cache.snapshot_every}: give a multiple of {PAGE},"
            " or 0 for none",
        ),
        (
            0 <= config.cache.memory <= _MOST,
            f"cache.memory is {config.cache.memory}: give 0 to {_MOST} GiB",
        ),
        (
            0 <= config.cache.snapshots <= _MOST,
            f"cache.snapshots is {config.cache.snapshots}: give 0 to {_MOST} GiB",
        ),
        (
            config.speculation.shared == 0 or 256 <= config.speculation.shared <= 2**26,
            f"speculation.shared is {config.speculation.shared}: give 256 to {2**26} tokens, or 0",
        ),
        (
            0 <= config.speculation.length <= 63,
            f"speculation.length is {config.speculation.length}: give 1 to 63, or 0 for as many as"
            " pay",
        ),
        (
            0 <= config.speculation.row_cost < float("inf"),
            f"speculation.row_cost is {config.speculation.row_cost}: give 0 or more",
        ),
    ):
        if not ok:
            raise ConfigError(text)
    return Limits(asked.seqs, asked.tokens, asked.span, context)


def _pages(config: Config, limits: Limits, per_page: int) -> int:
    """Pages of the pool; page 0 and one spare come on top."""
    least = limits.pages + 2
    if not config.cache.memory:
        return max(least, min(limits.seqs, 2) * limits.pages + 2)
    pages = int(config.cache.memory * GIB) // max(1, per_page)
    if pages < least:
        fits = max(0, pages - 2) * PAGE
        lower = f"lower limits.context to {fits}, or " if fits else ""
        raise ConfigError(
            f"cache.memory is {config.cache.memory} GiB, which holds {fits} tokens, but"
            f" limits.context is {limits.context}: {lower}give"
            f" {least * per_page / GIB:.3f} GiB"
        )
    return min(pages, limits.seqs * limits.pages + 2)


def check(plan: Plan, actual: dict[str, int]) -> None:
    """Compare what was allocated, by line of the plan, with what was planned.

    Raises:
        CheckpointError: more than 1 % and 1 MiB off; a fault of ours or an unusual checkpoint.
    """
    planned = {r.name: r.bytes for r in plan.rows}
    for name, taken in actual.items():
        if abs(taken - planned[name]) > max(2**20, planned[name] // 100):
            raise CheckpointError(
                f"{name} took {_size(taken)} where {_size(planned[name])} were planned: report"
                " this with the checkpoint's config.json"
            )
