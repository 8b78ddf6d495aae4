"""A linear weight as the engine uses it, whatever it was on disk.

Owns fusing and the choice of what is kept in memory. Bit layouts are in formats.py, arithmetic in
kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream import kernels
from slipstream.kernels.reference import dequantize
from slipstream.kernels.types import Dense, Int4, Int8, Packed
from slipstream.weights.formats import Stored, load_one
from slipstream.weights.reader import Checkpoint, CheckpointError


class Facts(NamedTuple):
    """What a weight was on disk."""

    bits: float  # per weight, scales and zeros included
    nbytes: int


class Linear:
    """y = x W^T without a bias, or a table of rows: the same bytes serve both.

    Attributes:
        shape: (out, in).
        packed: the weight as kernels take it.
        stored: what it was on disk.
    """

    __slots__ = ("packed", "shape", "stored")

    def __init__(self, packed: Packed, stored: Facts | None = None) -> None:
        self.packed = packed
        self.shape = _shape(packed)
        self.stored = stored or Facts(
            8 * self.nbytes / max(1, self.shape[0] * self.shape[1]), self.nbytes
        )

    def __repr__(self) -> str:
        return f"Linear({self.shape[0]}x{self.shape[1]}, {type(self.packed).__name__}, {self.nbytes} bytes)"

    def __call__(self, x: Tensor, split: int) -> Tensor:
        """[T, in] -> [T, out]; rows before ``split`` belong to short spans, the rest to chunks."""
        return kernels.matmul(x, self.packed, split)

    def gather(self, ids: Tensor) -> Tensor:
        """[T] ids -> [T, in], rows of the weight: the embedding lookup."""
        return kernels.embed(ids, self.packed)

    def dequant(self) -> Tensor:
        """The weight [out, in]: as it is if dense, else float32."""
        return dequantize(self.packed)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(part.nbytes for part in self.packed if isinstance(part, Tensor))


def _shape(packed: Packed) -> tuple[int, int]:
    if isinstance(packed, Dense):
        return (packed.weight.shape[0], packed.weight.shape[1])
    fields = 8 if isinstance(packed, Int4) else 4
    return (packed.codes.shape[1], packed.codes.shape[0] * fields)


def load(
    checkpoint: Checkpoint,
    names: Sequence[str],
    shape: tuple[int, int] | None,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Linear:
    """Read the modules ``names`` (without ``.weight``) as one weight, stacked along the outputs.

    The format of each is found by the tensors present. Floating point becomes ``dtype``. On the
    CPU, codes too are dequantized to ``dtype``: there is no integer kernel there that would gain
    anything. On other devices codes stay codes, with their scales as stored.

    Modules fuse on a device if all are floating point, or all have codes of the same bits; then a
    smaller group among them holds for all, which is exact. Anything else is an error, because
    dequantizing silently would break the memory plan (`fuses` tells beforehand).

    Raises:
        CheckpointError: a module is missing, its format unknown, the whole not of ``shape``
            (out, in), or the parts not fusible.
    """
    device = torch.device(device)
    parts = [load_one(checkpoint, name) for name in names]
    for name, part in zip(names, parts, strict=True):
        if isinstance(part.packed, Dense) and part.packed.weight.dim() != 2:
            raise CheckpointError(
                f"{name}.weight has shape {list(part.packed.weight.shape)} where a matrix is needed: "
                f"check that config.json belongs to these weights"
            )
    shapes = [_shape(part.packed) for part in parts]
    whole = (sum(n for n, _ in shapes), shapes[0][1])
    if len({k for _, k in shapes}) > 1 or (shape is not None and whole != tuple(shape)):
        listed = ", ".join(f"{name} {list(s)}" for name, s in zip(names, shapes, strict=True))
        want = "equal numbers of inputs" if shape is None else f"{list(shape)} in all"
        raise CheckpointError(
            f"{listed}: the config asks for {want}; check that config.json belongs to these weights"
        )
    if device.type == "cpu":
        packed: Packed = _dense([dequantize(part.packed).to(dtype) for part in parts])
    elif all(isinstance(part.packed, Dense) for part in parts):
        packed = _dense([dequantize(part.packed).to(device, dtype) for part in parts])
    else:
        packed = _to(_fuse(names, parts), device)
    nbytes = sum(part.nbytes for part in parts)
    return Linear(packed, Facts(8 * nbytes / (whole[0] * whole[1]), nbytes))


def rows_of(linear: Linear, ids: Tensor) -> Linear:
    """The outputs ``ids`` [n] of a weight, as a smaller one in the same format."""
    packed = linear.packed
    if isinstance(packed, Dense):
        return Linear(Dense(packed.weight[ids.to(packed.weight.device)].contiguous()))
    at = ids.to(packed.codes.device)
    zeros = None if packed.zeros is None else packed.zeros[:, at].contiguous()
    codes, scales = (part[:, at].contiguous() for part in (packed.codes, packed.scales))
    return Linear(type(packed)(codes, scales, zeros, packed.group))


def fuses(checkpoint: Checkpoint, names: Sequence[str], device: torch.device | str) -> bool:
    """Whether `load` can stack these modules on ``device``."""
    if torch.device(device).type == "cpu":
        return True

    kinds, groups = set(), []
    for name in names:
        scaled = checkpoint.has(f"{name}.weight_scale")
        bits = 8 if scaled else 0
        if checkpoint.has(f"{name}.weight_packed"):
            k = int(checkpoint.entry(f"{name}.weight_shape").read().flatten()[-1])
            bits = 32 * checkpoint.shape(f"{name}.weight_packed")[-1] // max(1, k)
        kinds.add(bits)
        if scaled:
            groups.append(checkpoint.shape(f"{name}.weight_scale")[-1])
    # All have the same inputs, so fewer groups must divide the most.
    return len(kinds) == 1 and all(max(groups) % n == 0 for n in groups if n)


def _dense(weights: list[Tensor]) -> Dense:
    return Dense(weights[0].contiguous() if len(weights) == 1 else torch.cat(weights))


def _fuse(names: Sequence[str], parts: list[Stored]) -> Int4 | Int8:
    packed = [part.packed for part in parts]
    quantized = [p for p in packed if not isinstance(p, Dense)]
    if len(quantized) < len(packed) or len({type(p) for p in quantized}) > 1:
        kinds = ", ".join(
            f"{name} {'floating point' if part.bits is None else f'{part.bits} bits'}"
            for name, part in zip(names, parts, strict=True)
        )
        raise CheckpointError(
            f"modules stored in different formats cannot be one weight ({kinds}): load them apart"
        )
    group = min(p.group for p in quantized)
    if any(p.group % group for p in quantized):
        groups = ", ".join(f"{name} {p.group}" for name, p in zip(names, quantized, strict=True))
        raise CheckpointError(
            f"modules with these group sizes cannot be one weight ({groups}): load them apart"
        )
    first = quantized[0]
    half = 8 if isinstance(first, Int4) else 128
    scale_type = first.scales.dtype
    for p in quantized[1:]:
        scale_type = torch.promote_types(scale_type, p.scales.dtype)
    codes = torch.cat([p.codes for p in quantized], dim=1)
    scales = torch.cat(
        [_spread(p.scales, p.group // group).to(scale_type) for p in quantized], dim=1
    )
    zeros = None
    if any(p.zeros is not None for p in quantized):
        zeros = torch.cat(
            [
                torch.full(_spread(p.scales, p.group // group).shape, half, dtype=torch.uint8)
                if p.zeros is None
                else _spread(p.zeros, p.group // group)
                for p in quantized
            ],
            dim=1,
        )
    return type(first)(codes, scales, zeros, group)


def _spread(rows: Tensor, times: int) -> Tensor:
    """Each row of [K/G, N] repeated: the same numbers for groups of G / times."""
    return rows if times == 1 else rows.repeat_interleave(times, dim=0)


def _to(packed: Int4 | Int8, device: torch.device) -> Int4 | Int8:
    zeros = None if packed.zeros is None else packed.zeros.to(device)
    return type(packed)(packed.codes.to(device), packed.scales.to(device), zeros, packed.group)
