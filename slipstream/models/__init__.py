"""Model families: the mathematics of each, in terms of kernels. None sees a Sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from slipstream.models.blocks import Loader, Outline
from slipstream.models.decoder import Decoder
from slipstream.models.llama import llama
from slipstream.models.qwen35 import qwen35
from slipstream.models.stores import Store
from slipstream.weights.reader import Checkpoint, CheckpointError

FAMILIES: dict[str, Callable[[Loader], Decoder]] = {
    "llama": llama,
    "qwen3_5": qwen35,
    "qwen3_5_text": qwen35,
}


def build(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    sizes: list[int] | None = None,
) -> Decoder:
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

    model: Decoder  # its weights have shapes only
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
    return OutlineFacts(model, model.stores, sum(load.sizes), model.context)


def _family(checkpoint: Checkpoint) -> Callable[[Loader], Decoder]:
    kind = checkpoint.config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise CheckpointError(
            f"{checkpoint.path} is of model_type {kind!r}; this version runs"
            f" {', '.join(FAMILIES)}: use a checkpoint of one of these"
        )
    return family
