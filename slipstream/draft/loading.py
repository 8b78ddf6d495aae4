"""The drafters with weights that a target has: its own MTP head, and a block drafter beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from slipstream.draft.dflash import ARCHITECTURES, Dflash
from slipstream.draft.mtp import Mtp, draft_vocabulary
from slipstream.draft.table import Choose
from slipstream.models.blocks import Loader
from slipstream.models.decoder import Decoder
from slipstream.models.stores import Store
from slipstream.weights.reader import Checkpoint, CheckpointError
from slipstream.weights.sources import open_checkpoint, resolve

CHAIN = 4  # drafts of one MTP chain: acceptance falls with depth, and each costs a pass
BESIDE = "draft"  # folder of a checkpoint that holds its block drafter

Refuse = Callable[[str, CheckpointError], None]


@dataclass(slots=True)
class Heads:
    """Drafters with weights, in order of their stores in the cache."""

    mtp: Mtp | None = None
    dflash: Dflash | None = None
    sizes: list[int] = field(default_factory=list)  # bytes of every tensor

    @property
    def each(self) -> list[Mtp | Dflash]:
        """Those that there are."""
        return [head for head in (self.mtp, self.dflash) if head]

    @property
    def stores(self) -> tuple[Store, ...]:
        """What they keep in the cache."""
        return tuple(store for head in self.each for store in head.stores)


@dataclass(frozen=True, slots=True)
class Found:
    """Checkpoints of drafters; None where there is none, or it is not wanted."""

    mtp: Checkpoint | None = None
    dflash: Checkpoint | None = None


def find(target: Checkpoint, mtp: bool, dflash: str, refuse: Refuse) -> Found:
    """Look for a target's drafters.

    Args:
        mtp: use its MTP head if it has one.
        dflash: "auto" takes the folder ``draft`` beside the target's weights if there is one;
            "" takes none; anything else is a path or a hub id.
        refuse: is told what cannot be opened.
    """
    own = target if mtp and any(n.startswith("mtp.fc.") for n in target.names()) else None
    beside = target.directory / BESIDE
    opened = None
    if dflash and (dflash != "auto" or (beside / "config.json").is_file()):
        try:
            opened = open_checkpoint(beside if dflash == "auto" else resolve(dflash))
        except CheckpointError as error:
            refuse("dflash", error)
    return Found(own, opened)


def load(
    found: Found,
    model: Decoder,
    choose: Choose,
    *,
    loader: type[Loader],
    dtype: torch.dtype,
    device: torch.device,
    drafts: int,
    vocab: int,
    refuse: Refuse,
) -> Heads:
    """Read drafters; with `models.blocks.Outline` as ``loader`` only count what would be read.

    Args:
        model: the target, from the same kind of loader.
        drafts: most drafts of one span.
        vocab: real token ids.
        refuse: is told which drafter does not fit this target, and why; the others are loaded.
    """
    heads = Heads()
    if not drafts:
        return heads
    if found.mtp:
        try:
            load = loader(found.mtp, dtype, device, heads.sizes)
            ids = draft_vocabulary(found.mtp, vocab)
            heads.mtp = Mtp(load, model, choose, min(drafts, CHAIN), vocab, ids=ids)
        except CheckpointError as error:
            refuse("mtp", error)
    if found.dflash:
        checkpoint = found.dflash
        try:
            named = checkpoint.config.get("architectures")
            if not isinstance(named, list) or not set(named) & set(ARCHITECTURES):
                raise CheckpointError(
                    f"{checkpoint.path} is of {named!r} where {' or '.join(ARCHITECTURES)} is"
                    " needed: give a drafter made for this model"
                )
            load = loader(checkpoint, dtype, device, heads.sizes)
            heads.dflash = Dflash(load, model, choose, drafts, vocab)
            if loader is Loader:
                checkpoint.finish()
        except CheckpointError as error:
            heads.dflash = None
            refuse("dflash", error)
    return heads
