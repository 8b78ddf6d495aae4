"""W4A16 by GPTQ, int8 for embedding and head, and the compressed-tensors container.

GPTQ: Frantar et al. 2023, arXiv:2210.17323. A layer's columns are rounded one after another and the
rounding error is spread over the columns still to come, by the inverse of the inputs' second moments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

GROUP = 128


def group_scale(w: Tensor, bits: int, grid: int = 24) -> Tensor:
    """Scale of each row of a group ``[N, G]``: the best of some clippings by squared error. ``[N, 1]``."""
    top = 2 ** (bits - 1)
    full = w.abs().amax(1, keepdim=True).clamp(min=1e-8)
    best = full / (top - 0.5)
    error = torch.full_like(full, float("inf"))
    for i in range(grid):
        scale = (full * (1 - i * 0.5 / grid) / (top - 0.5)).to(torch.bfloat16).float()
        e = (round_to(w, scale, bits) * scale - w).pow(2).sum(1, keepdim=True)
        best = torch.where(e < error, scale, best)
        error = torch.minimum(e, error)
    return best.to(torch.bfloat16).float()


def round_to(w: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Integers ``round(w / scale)`` in the signed range of ``bits``."""
    top = 2 ** (bits - 1)
    return (w / scale).round().clamp(-top, top - 1)


def nearest(w: Tensor, bits: int, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """Round to nearest: codes int8 ``[N, K]`` and scales ``[N, K / group]``."""
    rows = w.float().reshape(-1, group)
    scale = group_scale(rows, bits, 24 if bits == 4 else 1)
    return round_to(rows, scale, bits).to(torch.int8).view_as(w), scale.view(w.shape[0], -1)


def gptq(
    w: Tensor, second: Tensor, bits: int = 4, group: int = GROUP, damp: float = 0.01
) -> tuple[Tensor, Tensor]:
    """GPTQ of ``w [N, K]`` with input second moments ``second [K, K]``; codes and scales as `nearest`.

    Columns keep their order (no activation reordering), so a group is a run of columns.
    """
    k = w.shape[1]
    hessian = second.double()
    dead = hessian.diagonal() == 0
    hessian[dead, dead] = 1
    hessian = hessian + damp * hessian.diagonal().mean() * torch.eye(
        k, dtype=torch.float64, device=w.device
    )
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    upper = torch.linalg.cholesky(inverse, upper=True).float()
    rest = w.float().clone()
    codes = torch.zeros(w.shape, dtype=torch.int8, device=w.device)
    scales = torch.zeros(w.shape[0], k // group, device=w.device)
    for start in range(0, k, group):
        scale = group_scale(rest[:, start : start + group], bits)
        scales[:, start // group] = scale[:, 0]
        errors = torch.zeros(w.shape[0], group, device=w.device)
        for i in range(group):
            column = start + i
            q = round_to(rest[:, column : column + 1], scale, bits)
            codes[:, column] = q[:, 0].to(torch.int8)
            error = (rest[:, column] - (q * scale)[:, 0]) / upper[column, column]
            errors[:, i] = error
            rest[:, column : start + group] -= (
                error[:, None] * upper[column, column : start + group]
            )
        rest[:, start + group :] -= errors @ upper[start : start + group, start + group :]
    return codes, scales


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """``codes * scale`` in fp32, ``[N, K]``."""
    group = codes.shape[1] // scales.shape[1]
    return codes.float() * scales.float().repeat_interleave(group, 1)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Signed codes ``[N, K]`` to int32 ``[N, K * bits / 32]``: offset by half the range, low bits first."""
    per = 32 // bits
    unsigned = (codes.to(torch.int64) + 2 ** (bits - 1)).view(codes.shape[0], -1, per)
    shifts = torch.arange(per, device=codes.device) * bits
    words = (unsigned << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`: int8 ``[N, K]``."""
    shifts = torch.arange(32 // bits, device=packed.device) * bits
    fields = (packed.to(torch.int64)[..., None] >> shifts) & (2**bits - 1)
    return (fields - 2 ** (bits - 1)).to(torch.int8).flatten(1)


def packed_tensors(name: str, codes: Tensor, scales: Tensor, bits: int) -> dict[str, Tensor]:
    """The three tensors of a quantized matrix in the compressed-tensors ``pack-quantized`` container."""
    return {
        f"{name}.weight_packed": pack(codes, bits),
        f"{name}.weight_scale": scales.to(torch.bfloat16),
        f"{name}.weight_shape": torch.tensor(codes.shape, dtype=torch.int64),
    }


def unpack_checkpoint(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint with every packed matrix as fp32 ``.weight`` and the rest as it is."""
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(".weight_packed"):
            base = name.removesuffix(".weight_packed")
            bits = 32 * tensor.shape[1] // int(tensors[f"{base}.weight_shape"][1])
            plain[f"{base}.weight"] = dequantize(
                unpack(tensor, bits), tensors[f"{base}.weight_scale"]
            )
        elif not name.endswith((".weight_scale", ".weight_shape")):
            plain[name] = tensor
    return plain


def config_block(int4: list[str], int8: list[str], ignore: list[str]) -> dict[str, Any]:
    """``quantization_config`` of a checkpoint with int4 and int8 groups of module names."""

    def scheme(bits: int, targets: list[str]) -> dict[str, Any]:
        weights = {
            "num_bits": bits,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": GROUP,
            "dynamic": False,
            "actorder": None,
        }
        return {
            "targets": targets,
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
        }

    groups = {"group_0": scheme(4, int4)}
    if int8:
        groups["group_1"] = scheme(8, int8)
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


class Moments:
    """Second moments of the inputs of named matrices, summed over calls."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, name: str, x: Tensor) -> None:
        """Adds rows ``x [..., K]`` to the matrix called ``name``."""
        rows = x.reshape(-1, x.shape[-1]).float()
        part = rows.T @ rows
        self.sums[name] = part if name not in self.sums else self.sums[name] + part
