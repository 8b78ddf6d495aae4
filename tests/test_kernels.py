"""Every faster op against its definition, on odd shapes, with garbage where nobody may read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream import kernels
from slipstream.kernels import reference
from slipstream.kernels.types import FOLD, PAGE, Batch, Dense, GdnState, PagedKV, SpanRows


def make_batch(spans: list[tuple[int, int, int, bool, int]], table: Tensor | None = None) -> Batch:
    """spans: (slot, start, length, chunk, folded), short ones first."""
    rows, row = [], 0
    for slot, start, length, chunk, folded in spans:
        rows.append(SpanRows(slot, start, length, row, chunk, folded))
        row += length
    positions = torch.cat([torch.arange(s.start, s.start + s.length) for s in rows])
    lengths = torch.tensor([s.length for s in rows])
    slots = torch.tensor([s.slot for s in rows])
    return Batch(
        tokens=torch.zeros(row, dtype=torch.int64),
        positions=positions,
        starts=torch.tensor([0, *lengths.cumsum(0).tolist()]),
        slots=slots,
        row_slots=slots.repeat_interleave(lengths),
        places=positions
        if table is None
        else table[slots.repeat_interleave(lengths), positions // PAGE] * PAGE + positions % PAGE,
        known=lengths,
        rows=torch.arange(row),
        split=sum(s.length for s in rows if not s.chunk),
        spans=tuple(rows),
    )


class Gdn:
    """One layer's inputs for whole sequences, and its memory as a cache would hold it."""

    def __init__(self, seed: int, dtype: torch.dtype, state: torch.dtype, slots: int = 4) -> None:
        g = torch.Generator().manual_seed(seed)
        self.key_heads, heads, dk, dv, self.taps = 2, 4, 8, 6, 4
        channels = 2 * self.key_heads * dk + heads * dv
        self.conv = torch.randn(channels, self.taps, generator=g, dtype=dtype)
        self.u = torch.randn(slots, 300, channels, generator=g, dtype=dtype)
        self.g = -torch.rand(slots, 300, heads, generator=g, dtype=dtype)
        self.beta = torch.rand(slots, 300, heads, generator=g, dtype=dtype)
        ring = 2 * 16 + FOLD + self.taps
        nan = float("nan")
        self.state = GdnState(
            torch.full((slots, heads, dk, dv), nan, dtype=state),
            torch.full((slots, ring, channels), nan, dtype=dtype),
            torch.full((slots, ring, heads), nan, dtype=dtype),
            torch.full((slots, ring, heads), nan, dtype=dtype),
        )

    def run(self, batch: Batch, backend: str) -> Tensor:
        pick = (batch.row_slots, batch.positions)
        with kernels.use(gdn=backend):
            return kernels.gdn(
                self.u[pick], self.g[pick], self.beta[pick], self.conv, self.key_heads,
                self.state, batch,
            )  # fmt: skip


def fold_after(start: int, length: int, chunk: bool) -> int:
    certain = start + length if chunk else start
    return certain - certain % FOLD


def walk(layer: Gdn, prompt: int, total: int, spans: list[int], backend: str) -> Tensor:
    """A prompt in chunks, then short spans of the given lengths; returns all outputs."""
    outs, at, folded = [], 0, 0
    pieces = [min(PAGE * 2, prompt - s) for s in range(0, prompt, PAGE * 2)]
    for n in pieces:
        outs.append(layer.run(make_batch([(1, at, n, True, folded)]), backend))
        folded = fold_after(at, n, True)
        at += n
    i = 0
    while at < total:
        n = min(spans[i % len(spans)], total - at)
        outs.append(layer.run(make_batch([(1, at, n, False, folded)]), backend))
        folded = fold_after(at, n, False)
        at += n
        i += 1
    return torch.cat(outs)


@pytest.mark.parametrize("prompt", [1, 3, 15, 16, 63, 64, 65, 100, 144, 200])
@pytest.mark.parametrize("spans", [[1], [16], [3, 1, 16, 7]])
def test_gdn_blocks_equal_the_recurrence(prompt: int, spans: list[int]) -> None:
    fast, slow = (Gdn(prompt, torch.float64, torch.float64) for _ in range(2))
    total = prompt + 75
    a = walk(fast, prompt, total, spans, "cpu")
    b = walk(slow, prompt, total, spans, "reference")
    assert torch.isfinite(a).all()
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(fast.state.state[1], slow.state.state[1], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("strength", [1.0, 50.0, 1e3, 1e5, float("inf")])
def test_gdn_blocks_keep_their_precision_at_strong_gates(strength: float) -> None:
    """Strong and weak decays in one block: sums of the first must not swallow the second."""
    fast, slow = (Gdn(4, torch.float32, torch.float32) for _ in range(2))
    for layer in (fast, slow):
        strong = layer.g < -0.7
        layer.g[strong] *= strength
    a, b = walk(fast, 150, 200, [5], "cpu"), walk(slow, 150, 200, [5], "reference")
    assert torch.isfinite(a).all()
    assert float((a - b).abs().max() / b.abs().max()) < 1e-5


@pytest.mark.parametrize("state", [torch.float64, torch.float16])
def test_gdn_reference_does_not_depend_on_the_partition(state: torch.dtype) -> None:
    """Bit for bit, with the state stored in half precision too: the fold is on absolute positions."""
    want = walk(Gdn(5, torch.float64, state), 70, 180, [1], "reference")
    for spans in ([16], [5], [2, 13, 1, 7], [15, 16]):
        got = walk(Gdn(5, torch.float64, state), 70, 180, spans, "reference")
        assert torch.equal(got, want), spans


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_gdn_rejected_rows_leave_no_trace(backend: str) -> None:
    """Rows beyond what was accepted are garbage that the next span overwrites."""
    plain, torn = (Gdn(9, torch.float64, torch.float64) for _ in range(2))
    want = walk(plain, 40, 120, [1], backend)
    outs = [torn.run(make_batch([(1, 0, 40, True, 0)]), backend)]
    at, folded = 40, 32
    generator = torch.Generator().manual_seed(0)
    while at < 120:
        kept = int(torch.randint(1, 17, (), generator=generator))
        true = torn.u[1].clone()
        torn.u[1, at + kept :] = 1e3  # drafts that will be rejected
        o = torn.run(make_batch([(1, at, 16, False, folded)]), backend)
        torn.u[1] = true
        outs.append(o[:kept])
        folded, at = at - at % FOLD, at + kept
    torch.testing.assert_close(torch.cat(outs)[:120], want, rtol=1e-9, atol=1e-11)


def test_gdn_spans_of_a_crowd_do_not_touch_each_other() -> None:
    alone, crowd = (Gdn(3, torch.float64, torch.float64) for _ in range(2))
    prompts = {1: 30, 2: 64, 3: 129}
    for slot, n in prompts.items():
        for layer in (alone, crowd):
            layer.run(make_batch([(slot, 0, n, True, 0)]), "cpu")
    spans = [(s, n, 16 - s, False, n - n % FOLD) for s, n in prompts.items()]
    together = crowd.run(make_batch(spans), "cpu")
    apart = torch.cat([alone.run(make_batch([s]), "cpu") for s in spans])
    torch.testing.assert_close(together, apart, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("contiguous", [True, False])
def test_attend_equals_its_definition(contiguous: bool) -> None:
    g = torch.Generator().manual_seed(1)
    heads, kv_heads, dim = 6, 2, 16
    pages = torch.full((20, PAGE, kv_heads, dim), float("nan"), dtype=torch.float64)
    kv = PagedKV(pages, pages.clone())
    table = torch.tensor([[0] * 5, list(range(1, 6)), [11, 9, 14, 12, 19], [7, 6, 8, 10, 13]])
    if contiguous:
        table[2] = torch.arange(14, 19)
    lengths = {1: 1, 2: 130, 3: 300}
    for slot, n in lengths.items():
        batch = make_batch([(slot, 0, n, True, 0)], table)
        k, v = torch.randn(2, n, kv_heads, dim, generator=g, dtype=torch.float64)
        kernels.store_kv(k, v, kv, batch.places)
    batch = make_batch([(1, 0, 1, False, 0), (2, 113, 16, False, 0), (3, 128, 172, True, 0)], table)
    if contiguous:
        runs = tuple(s._replace(run=int(table[s.slot, 0])) for s in batch.spans[:2])
        batch = batch._replace(spans=(*runs, batch.spans[2]))
    q = torch.randn(189, heads, dim, generator=g, dtype=torch.float64)
    fast = kernels.attend(q, kv, table, batch, 0.25)
    with kernels.use(attend="reference"):
        slow = kernels.attend(q, kv, table, batch, 0.25)
    assert torch.isfinite(fast).all()
    torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_of_short_and_chunk_rows(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(2)
    w = Dense(torch.randn(37, 24, generator=g, dtype=dtype))
    for split, total in ((0, 5), (3, 3), (1, 90), (70, 71)):
        x = torch.randn(total, 24, generator=g, dtype=dtype)
        fast = kernels.matmul(x, w, split)
        slow = reference.matmul(x, w, split)
        torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(slow, x @ w.weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_equals_its_definition(dtype: torch.dtype) -> None:
    x = torch.randn(7, 24, generator=torch.Generator().manual_seed(3)).to(dtype)
    weight = torch.rand(24)
    torch.testing.assert_close(
        kernels.norm(x, weight, 1e-6), reference.norm(x, weight, 1e-6), rtol=1e-6, atol=1e-6
    )
