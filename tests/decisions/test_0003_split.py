"""Decision 0003: short rows and chunk rows share a batch and never a kernel call.

As a program it prints the table of the record; the counts of library calls vary by machine.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream import kernels
from slipstream.kernels.types import Dense

SHORT, CHUNKS = 5, (1, 2, 3, 11, 27, 59, 64, 123, 507)


def operands(chunk: int, inner: int = 1024, out: int = 768) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(out, inner, generator=g) / inner**0.5
    rows = torch.randn(SHORT + max(CHUNKS), inner, generator=g)
    return rows[: SHORT + chunk], weight


def changed(chunk: int, split: bool) -> int:
    """Entries of the 5 short rows that a chunk beside them changes."""
    alone, weight = operands(0)
    both, _ = operands(chunk)
    if split:
        a = kernels.matmul(alone, Dense(weight), SHORT)
        b = kernels.matmul(both, Dense(weight), SHORT)
    else:
        a, b = F.linear(alone, weight), F.linear(both, weight)
    return int((a[:SHORT] != b[:SHORT]).sum())


def test_a_chunk_beside_them_does_not_change_short_rows() -> None:
    assert [changed(chunk, True) for chunk in CHUNKS] == [0] * len(CHUNKS)


def test_short_rows_beside_it_do_not_change_a_chunk() -> None:
    for chunk in (64, 128):
        rows, weight = operands(chunk)
        alone = kernels.matmul(rows[SHORT:], Dense(weight), 0)
        assert torch.equal(kernels.matmul(rows, Dense(weight), SHORT)[SHORT:], alone)


if __name__ == "__main__":
    print("5 short rows, 768 columns, float32: entries a chunk beside them changes")
    print("rows of the chunk   one call for all rows   split call")
    for chunk in CHUNKS:
        print(f"{chunk:10d} {changed(chunk, False):15d} of 3840 {changed(chunk, True):15d}")
