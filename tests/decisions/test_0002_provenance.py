"""Decision 0002: how a position is computed leaves a mark in its bits.

As a program it prints the table of the record; the counts of library calls vary by machine.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream import kernels
from slipstream.kernels.types import Dense

WIDTH, INNER, VOCAB, LAYERS, TEXT = 256, 704, 512, 4, 64


def weights() -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = [(INNER, WIDTH), (WIDTH, INNER)] * LAYERS + [(VOCAB, WIDTH)]
    return [torch.randn(*s, generator=g) / s[1] ** 0.5 for s in shapes]


def logits(x: Tensor, group: int, how: str) -> Tensor:
    """A residual network of matrices, the text cut into calls of ``group`` rows.

    ``how``: "linear" is the library's x W^T, "swapped" its W x^T, "op" the definition in
    `kernels.reference`, which pads rows to a multiple of 4.
    """
    w = weights()

    def product(a: Tensor, b: Tensor) -> Tensor:
        if how == "linear":
            return F.linear(a, b)
        if how == "swapped":
            return torch.mm(b, a.T).T
        with kernels.use(matmul="reference"):
            return kernels.matmul(a, Dense(b), a.shape[0])

    out = []
    for part in x.split(group):
        h = part
        for up, down in zip(w[0:-1:2], w[1:-1:2], strict=True):
            h = h + product(F.silu(product(F.layer_norm(h, (WIDTH,)), up)), down)
        out.append(product(F.layer_norm(h, (WIDTH,)), w[-1]))
    return torch.cat(out)


def text() -> Tensor:
    return torch.randn(TEXT, WIDTH, generator=torch.Generator().manual_seed(1))


def compare(a: Tensor, b: Tensor) -> tuple[int, int, float, int]:
    """Rows that differ, entries that differ, largest difference, other choices of token."""
    differs = a != b
    return (
        int(differs.any(1).sum()),
        int(differs.sum()),
        float((a - b).abs().max()),
        int((a.argmax(1) != b.argmax(1)).sum()),
    )


def test_short_rows_have_the_same_bits_in_any_grouping() -> None:
    """Decode, a verify block, and several requests at once: groups of 1 to 16 rows."""
    x = text()
    alone = logits(x, 1, "op")
    for group in (2, 3, 4, 5, 8, 16):
        assert torch.equal(logits(x, group, "op"), alone)


def test_the_comparison_notices_a_single_bit() -> None:
    a = logits(text(), 64, "linear")
    b = a.clone()
    b[3, 5] = torch.nextafter(b[3, 5], torch.tensor(9.0))
    assert compare(a, b)[:2] == (1, 1)


def test_different_ways_agree_up_to_rounding() -> None:
    x = text()
    for how, group in (("linear", 1), ("linear", 3), ("short", 1)):
        assert compare(logits(x, group, how), logits(x, 64, "linear"))[2] < 1e-4


if __name__ == "__main__":
    x = text()
    whole = logits(x, TEXT, "linear")
    print(f"64 positions, 4 layers, {VOCAB} logits, float32; against x W^T on all 64 rows at once")
    print("calls of             rows that differ   logits that differ   largest   other tokens")
    for how in ("linear", "swapped", "op"):
        for group in (1, 2, 3, 4, 5, 8, 9, 16, 32, 64):
            r, e, d, t = compare(logits(x, group, how), whole)
            print(f"{how:8s}{group:4d} rows {r:15d} of 64 {e:12d} of {64 * VOCAB} {d:12.1e} {t:8d}")
