"""What a layer must remember between steps: declared here, allocated by the cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Paged:
    """Keys and values per position, in pages under the one page table."""

    heads: int
    dim: int


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a per-slot store.

    A ring keeps rows by absolute position (row p % ring length); ``history`` says how many rows
    before the slot's fold the next step still reads (a snapshot keeps those).
    """

    name: str
    shape: tuple[int, ...]  # of one slot, or of one ring row
    dtype: torch.dtype | None = None  # None: the model's
    ring: bool = False
    history: int = 0


@dataclass(frozen=True, slots=True)
class PerSlot:
    """Memory of fixed size per sequence: recurrent state, rings, windows."""

    fields: tuple[Field, ...]


Store = Paged | PerSlot


def gated_delta(
    heads: int,
    key_dim: int,
    value_dim: int,
    channels: int,
    taps: int,
    *,
    state: torch.dtype,
    gates: torch.dtype,
) -> PerSlot:
    """The store of one Gated-DeltaNet layer (see `kernels.types.GdnState`).

    heads: value heads; channels: convolution channels; taps: convolution length; state and
    gates: number formats of S and of g and beta.
    """
    return PerSlot(
        (
            Field("state", (heads, key_dim, value_dim), state),
            Field("u", (channels,), ring=True, history=taps - 1),
            Field("g", (heads,), gates, ring=True),
            Field("beta", (heads,), gates, ring=True),
        )
    )
