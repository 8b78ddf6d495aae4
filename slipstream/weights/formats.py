"""Storage formats of one linear weight: what lies in the file, to canonical form and back.

Owns bit layouts. Knows no model and no kernel; the canonical forms are `kernels.types.Packed`.
Which format a module has is decided by the tensors that are present; the config is asked only for
what the tensors do not say, because ``ignore`` lists of real checkpoints are incomplete.

Sources: the compressed-tensors library for ``pack-quantized`` and ``int-quantized``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream.kernels.types import Dense, Int4, Int8, Packed
from slipstream.weights.reader import Checkpoint, CheckpointError

FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Stored:
    """A module's weight in canonical form, with what it took on disk."""

    packed: Packed
    bits: int | None  # of the codes; None: as the file's own floating point or block format has it
    nbytes: int


class Format(Protocol):
    """One way a checkpoint stores a linear weight."""

    @property
    def name(self) -> str: ...

    def load(self, checkpoint: Checkpoint, module: str) -> Stored | None:
        """Read ``module`` if it is stored this way; None if it is not."""
        ...

    def pack(self, packed: Packed) -> dict[str, Tensor]:
        """The tensors that `load` turns into ``packed``, by suffix."""
        ...


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """[K, N] integer codes -> [K*bits/32, N] int32, field j of word r = row 8r+j (4r+j), low first.

    Raises:
        ValueError: K does not fill whole words.
    """
    fields = 32 // bits
    k, n = codes.shape
    if k % fields:
        raise ValueError(f"{k} rows do not fill words of {fields} codes")
    shifts = torch.arange(0, 32, bits, device=codes.device)
    # Disjoint fields: the sum is the bitwise or. int64 keeps the top field's sign out of the way.
    wide = codes.reshape(k // fields, fields, n).to(torch.int64)
    placed = torch.bitwise_left_shift(wide, shifts[None, :, None])
    return _to_int32(placed.sum(1))


def unpack_codes(words: Tensor, bits: int) -> Tensor:
    """[R, N] int32 -> [R*32/bits, N] uint8, the inverse of `pack_codes`."""
    fields = 32 // bits
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    fielded = torch.bitwise_right_shift(words[:, None, :], shifts[None, :, None])
    codes = torch.bitwise_and(fielded, 2**bits - 1)
    return codes.to(torch.uint8).reshape(words.shape[0] * fields, words.shape[1])


def _to_int32(words: Tensor) -> Tensor:
    """int64 words below 2^32 as int32 of the same bits."""
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@dataclass(frozen=True)
class FloatingPoint:
    """``X.weight`` in floating point; block formats of GGUF arrive here already dequantized."""

    name: str = "floating point"

    def load(self, checkpoint: Checkpoint, module: str) -> Stored | None:
        name = f"{module}.weight"
        if not checkpoint.has(name):
            return None
        entry = checkpoint.entry(name)
        if checkpoint.has(f"{module}.weight_scale") or entry.stored.startswith(
            ("I", "U", "BOOL", "F8")
        ):
            return None
        return Stored(Dense(checkpoint.tensor(name)), None, entry.nbytes)

    def pack(self, packed: Packed) -> dict[str, Tensor]:
        if not isinstance(packed, Dense):
            raise TypeError("floating point cannot hold codes")
        return {"weight": packed.weight}


@dataclass(frozen=True)
class CompressedTensors:
    """compressed-tensors integers of 4 or 8 bits, symmetric or not, by group or by channel.

    ``pack-quantized``: ``weight_packed`` int32 [N, ceil(K*bits/32)], element k in word
    k // (32/bits), field k % (32/bits), low bits first, stored as q + 2^(bits-1);
    ``weight_scale`` [N, K/G] ([N, 1] by channel); ``weight_shape`` [2];
    ``weight_zero_point`` int32 [ceil(N*bits/32), K/G], packed along the rows, or int8 [N, K/G];
    ``weight_g_idx`` [K] if activations were reordered.
    ``int-quantized``: ``weight`` int8 [N, K] beside ``weight_scale``.
    """

    name: str = "compressed-tensors"

    def load(self, checkpoint: Checkpoint, module: str) -> Stored | None:
        packed = checkpoint.has(f"{module}.weight_packed")
        if not packed and not (
            checkpoint.has(f"{module}.weight")
            and checkpoint.has(f"{module}.weight_scale")
            and checkpoint.entry(f"{module}.weight").stored == "I8"
        ):
            return None
        suffixes = (
            "weight_packed",
            "weight",
            "weight_scale",
            "weight_shape",
            "weight_zero_point",
            "weight_g_idx",
        )
        nbytes = sum(
            checkpoint.entry(f"{module}.{s}").nbytes
            for s in suffixes
            if checkpoint.has(f"{module}.{s}")
        )
        if packed:
            bits, codes = self._packed_codes(checkpoint, module)
        else:
            bits, codes = (
                8,
                (checkpoint.tensor(f"{module}.weight").to(torch.int16) + 128).to(torch.uint8),
            )
        n, k = codes.shape
        scales = checkpoint.tensor(f"{module}.weight_scale")
        group = self._group(module, scales, n, k)
        self._order(checkpoint, module, k, group)
        zeros = self._zeros(checkpoint, module, bits, n, k // group)
        fields = 32 // bits
        if k % fields:
            raise CheckpointError(
                f"{module} has {k} inputs, which do not fill words of {fields} codes: requantize it with "
                f"a multiple of {fields}, or load it unquantized"
            )
        words = pack_codes(codes.T, bits)
        kind = Int4 if bits == 4 else Int8
        return Stored(kind(words, scales.T.contiguous(), zeros, group), bits, nbytes)

    def _packed_codes(self, checkpoint: Checkpoint, module: str) -> tuple[int, Tensor]:
        """Bits, and codes [N, K] uint8 with the padding of the last word cut off."""
        name = f"{module}.weight_packed"
        words = checkpoint.tensor(name)
        shape = checkpoint.tensor(f"{module}.weight_shape").flatten().tolist()
        if words.dtype != torch.int32 or words.dim() != 2 or len(shape) != 2 or min(shape) < 1:
            raise CheckpointError(
                f"{name} is {words.dtype} {list(words.shape)} with weight_shape {shape}: a 2-dimensional "
                f"int32 tensor is needed, quantize it again with pack-quantized"
            )
        n, k = (int(size) for size in shape)
        for bits in (4, 8):
            if tuple(words.shape) == (n, -(-k * bits // 32)):
                return bits, unpack_codes(words.T, bits).T[:, :k]
        raise CheckpointError(
            f"{name} has shape {list(words.shape)}, which is neither 4 nor 8 bits of {[n, k]}: "
            f"quantize it again with num_bits 4 or 8"
        )

    @staticmethod
    def _group(module: str, scales: Tensor, n: int, k: int) -> int:
        if (
            scales.dim() != 2
            or scales.shape[0] != n
            or scales.shape[1] < 1
            or k % scales.shape[1]
            or not scales.is_floating_point()
        ):
            raise CheckpointError(
                f"{module}.weight_scale is {scales.dtype} {list(scales.shape)}, which does not divide a weight "
                f"{[n, k]} into groups: quantize it with a group size that divides {k}"
            )
        return k // scales.shape[1]

    @staticmethod
    def _order(checkpoint: Checkpoint, module: str, k: int, group: int) -> None:
        name = f"{module}.weight_g_idx"
        if not checkpoint.has(name):
            return
        order = checkpoint.tensor(name).flatten().to(torch.int64)
        plain = torch.arange(k) // group
        # -1 everywhere is what the library writes before it has decided on an order.
        if not (torch.equal(order, plain) or bool((order == -1).all())):
            raise CheckpointError(
                f"{module} has its inputs reordered by activation (weight_g_idx), which is not supported: "
                f"quantize it with actorder off or 'weight'"
            )

    @staticmethod
    def _zeros(
        checkpoint: Checkpoint, module: str, bits: int, n: int, groups: int
    ) -> Tensor | None:
        name = f"{module}.weight_zero_point"
        if not checkpoint.has(name):
            return None
        stored = checkpoint.tensor(name)
        half = 2 ** (bits - 1)
        if stored.dtype == torch.int32 and tuple(stored.shape) == (-(-n * bits // 32), groups):
            zeros = unpack_codes(stored, bits)[:n]
        elif stored.dtype == torch.int8 and tuple(stored.shape) == (n, groups):
            zeros = (stored.to(torch.int16) + half).to(torch.uint8)
        else:
            raise CheckpointError(
                f"{name} is {stored.dtype} {list(stored.shape)} for {n} outputs in {groups} groups: "
                f"quantize it again with pack-quantized"
            )
        return None if bool((zeros == half).all()) else zeros.T.contiguous()

    def pack(self, packed: Packed) -> dict[str, Tensor]:
        if isinstance(packed, Dense):
            raise TypeError("compressed-tensors holds codes: quantize first")
        bits = 4 if isinstance(packed, Int4) else 8
        n = packed.codes.shape[1]
        k = packed.codes.shape[0] * 32 // bits
        out = {
            "weight_packed": packed.codes.T.contiguous(),
            "weight_scale": packed.scales.T.contiguous(),
            "weight_shape": torch.tensor([n, k]),
        }
        if packed.zeros is not None:
            fields = 32 // bits
            padded = torch.zeros(-(-n // fields) * fields, packed.zeros.shape[0], dtype=torch.uint8)
            padded[:n] = packed.zeros.T
            out["weight_zero_point"] = pack_codes(padded, bits)
        return out


FORMATS: tuple[Format, ...] = (FloatingPoint(), CompressedTensors())


def load_one(checkpoint: Checkpoint, module: str) -> Stored:
    """Read one module's weight in whatever format it is stored.

    Raises:
        CheckpointError: it is missing, or stored in a way no format here reads.
    """
    for form in FORMATS:
        stored = form.load(checkpoint, module)
        if stored is not None:
            return stored
    found = sorted(n for n in checkpoint.names() if n.startswith(f"{module}."))
    if not found:
        checkpoint.entry(f"{module}.weight")  # raises, with close names
    method = (checkpoint.config.get("quantization_config") or {}).get(
        "quant_method", "no method named"
    )
    raise CheckpointError(
        f"{module} is stored as {', '.join(f'{n} ({checkpoint.entry(n).stored})' for n in found)} "
        f"({method}), which is none of {', '.join(f.name for f in FORMATS)}: convert the checkpoint to one of them"
    )
