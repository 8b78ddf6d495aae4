"""Model families: the mathematics of each, in terms of kernels. None sees a Sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from slipstream.models.blocks import Loader, Outline
from slipstream.models.llama import Llama
from slipstream.models.qwen35 import Qwen35
from slipstream.models.stores import Store
from slipstream.weights.reader import Checkpoint, CheckpointError

if TYPE_CHECKING:
    AnyModel = Llama | Qwen35

FAMILIES: dict[str, type[Llama] | type[Qwen35]] = {
    "llama": Llama,
    "qwen3_5": Qwen35,
    "qwen3_5_text": Qwen35,
}


def build(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    sizes: list[int] | None = None,
) -> AnyModel:
    """The model of a checkpoint, its weights read and checked.

    Args:
        sizes: takes the bytes of every tensor read.

    Raises:
        CheckpointError: unknown family; a tensor missing, unread or of the wrong shape.
    """
    load = Loader(checkpoint, dtype, device, [] if sizes is None else sizes)
    model = _family(checkpoint)(load)
    checkpoint.finish()
    return model


@dataclass(frozen=True, slots=True)
class OutlineFacts:
    """What a model declares, known without reading a weight."""

    stores: tuple[Store, ...]
    nbytes: int  # of its weights in memory
    context: int


def outline(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> OutlineFacts:
    """What `build` would make of a checkpoint, from its config alone.

    Raises:
        CheckpointError: unknown family, or a config that lacks something.
    """
    load = Outline(checkpoint, dtype, device)
    model = _family(checkpoint)(load)
    return OutlineFacts(model.stores, sum(load.sizes), model.context)


def _family(checkpoint: Checkpoint) -> type[Llama] | type[Qwen35]:
    kind = checkpoint.config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise CheckpointError(
            f"{checkpoint.path} is of model_type {kind!r}; this version runs"
            f" {', '.join(FAMILIES)}: use a checkpoint of one of these"
        )
    return family
