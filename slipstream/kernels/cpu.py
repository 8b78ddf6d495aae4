"""Faster forms of some ops for CPU tensors; `reference` is their slow twin.

Products of few rows run as W @ x.T, which the BLAS libraries stream at close to memory speed
where x @ W.T runs at a third of it. The gated delta rule runs in its chunked form, a constant
number of calls per step. Attention reads pages that lie side by side in place.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels import reference
from slipstream.kernels.reference import wide
from slipstream.kernels.types import (
    FOLD,
    PAGE,
    Batch,
    Dense,
    GdnState,
    Packed,
    PagedKV,
    Ring,
    SpanRows,
)

_SLICE = 128  # rows of a chunk whose attention mask exists at the same time
_FEW = 64  # rows up to which W @ x.T is the faster product


def matmul(x: Tensor, w: Packed, split: int) -> Tensor:
    weight = w.weight if isinstance(w, Dense) else reference.dequantize(w).to(x.dtype)
    if split in (0, x.shape[0]):
        return _product(x, weight)
    return torch.cat([_product(x[:split], weight), _product(x[split:], weight)])


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T; rows are padded to a multiple of 4, since 1 to 3 round differently."""
    rows = x.shape[0]
    if rows == 0:
        return x.new_empty(0, weight.shape[0])
    if rows % 4:
        x = F.pad(x, (0, 0, 0, -rows % 4))
    if rows <= _FEW:
        return torch.mm(weight, x.T).T[:rows]
    return F.linear(x, weight)[:rows]


def embed(ids: Tensor, w: Packed) -> Tensor:
    if isinstance(w, Dense):
        return F.embedding(ids, w.weight)
    return reference.embed(ids, w)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == weight.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return reference.norm(x, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def attend(q: Tensor, kv: PagedKV, table: Tensor, batch: Batch, scale: float) -> Tensor:
    out = torch.empty_like(q)
    kv_heads = kv.k.shape[2]
    group = q.shape[1] // kv_heads
    for span in batch.spans:
        end = span.start + span.length
        ids = table[span.slot, : -(-end // PAGE)]
        k, v = (_positions(pages, ids, span.run, end).to(q.dtype) for pages in (kv.k, kv.v))
        rows = slice(span.row, span.row + span.length)
        if span.start == 0 and span.length > 1:
            y = F.scaled_dot_product_attention(
                q[rows].transpose(0, 1)[None], k[None], v[None],
                is_causal=True, scale=scale, enable_gqa=group > 1,
            )[0]  # fmt: skip
            out[rows] = y.transpose(0, 1)
            continue
        for begin in range(rows.start, rows.stop, _SLICE):
            part = slice(begin, min(begin + _SLICE, rows.stop))
            seen = None
            if span.length > 1:
                seen = torch.arange(end) <= batch.positions[part, None]
            out[part] = _grouped(q[part], k, v, seen, scale)
    return out


def attend_rows(
    q: Tensor,
    kv: PagedKV,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    first: int,
    scale: float,
) -> Tensor:
    out = torch.zeros_like(q)
    for n, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        if position >= first:
            ids = table[slot, : position // PAGE + 1]
            k, v = (_positions(p, ids, -1, position + 1)[:, first:].to(q.dtype) for p in kv)
            out[n] = _grouped(q[n : n + 1], k, v, None, scale)[0]
    return out


def attend_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: Ring | PagedKV,
    table: Tensor,
    slots: Tensor,
    end: Tensor,
    window: int,
    causal: bool,
    scale: float,
) -> Tensor:
    out = torch.empty_like(q)
    rows = torch.arange(q.shape[1])
    for n, (slot, stop) in enumerate(zip(slots.tolist(), end.tolist(), strict=True)):
        first = max(0, stop - window + 1) if window else 0
        if isinstance(past, Ring):
            # What is wanted lies in the ring in one piece or in two.
            size = past.k.shape[1]
            a, b = first % size, stop % size
            cuts = (
                [slice(a, a + stop - first)]
                if a + stop - first <= size
                else [slice(a, size), slice(0, b)]
            )
            old = [torch.cat([ring[slot, c] for c in cuts]).transpose(0, 1) for ring in past]
        else:
            ids = table[slot, : -(-stop // PAGE)]
            old = [_positions(pages, ids, -1, stop)[:, first:] for pages in past]
        keys, values = (
            torch.cat([o.to(q.dtype), new[n].transpose(0, 1).to(q.dtype)], 1)
            for o, new in zip(old, (k, v), strict=True)
        )
        seen = None
        if causal or (window and stop + len(rows) - 1 - first >= window):
            where = torch.arange(first, stop + len(rows))
            mine = stop + rows[:, None]
            seen = torch.ones(len(rows), len(where), dtype=torch.bool)
            if window:
                seen &= (mine - where).abs() < window
            if causal:
                seen &= where <= mine
        out[n] = _grouped(q[n], keys, values, seen, scale)
    return out


def _grouped(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    """Attention of q [R, Hq, D] over k, v [H, T, D] where `seen` [R, T] allows.

    The query heads of one KV head become rows, so nothing is repeated.
    """
    heads, rows = k.shape[0], q.shape[0]
    x = q.unflatten(1, (heads, -1)).permute(1, 0, 2, 3).flatten(1, 2)
    mask = None if seen is None else seen.repeat_interleave(q.shape[1] // heads, 0)
    y = F.scaled_dot_product_attention(x[None], k[None], v[None], mask, scale=scale)[0]
    apart: Tensor = y.unflatten(1, (rows, -1))
    return apart.permute(1, 0, 2, 3).flatten(1, 2)


def _positions(pages: Tensor, ids: Tensor, run: int, end: int) -> Tensor:
    """[H, end, D] of one slot: in place where its pages are consecutive, gathered otherwise."""
    rows = pages[ids] if run < 0 else pages[run : run + ids.shape[0]]
    return rows.flatten(0, 1)[:end].transpose(0, 1)


def gdn(
    u: Tensor, g: Tensor, beta: Tensor, conv: Tensor, key_heads: int, state: GdnState, batch: Batch
) -> Tensor:
    heads, _, dv = state.state.shape[1:]
    out = u.new_empty(u.shape[0], heads, dv)
    short = [s for s in batch.spans if not s.chunk]
    if short:
        _blocks(out, u, g, beta, conv, key_heads, state, short, FOLD)
    for span in batch.spans:
        if span.chunk:
            _blocks(out, u, g, beta, conv, key_heads, state, [span], PAGE)
    for span in batch.spans:
        rows = slice(span.row, span.row + span.length)
        reference.keep_rows(u[rows], g[rows], beta[rows], state, span.slot, span.start)
    return out


def _blocks(
    out: Tensor,
    u: Tensor,
    g: Tensor,
    beta: Tensor,
    conv: Tensor,
    key_heads: int,
    state: GdnState,
    spans: list[SpanRows],
    size: int,
) -> None:
    """The chunked form (Yang et al. 2024) on the absolute grid of `size`, all spans at once.

    Rows outside a span's own positions are zeros with no decay, so they change nothing.
    """
    heads, dk, dv = state.state.shape[1:]
    taps = conv.shape[1]
    folded, start, end, slots, row = (
        torch.tensor(column)[:, None]
        for column in zip(
            *((s.folded, s.start, s.start + s.length, s.slot, s.row) for s in spans), strict=True
        )
    )
    base = folded - folded % size
    blocks = int((end - base + size - 1).div(size, rounding_mode="floor").max())
    position = base + torch.arange(1 - taps, blocks * size)  # [B, W + taps - 1]
    fresh = position >= start
    source = (row + position - start).clamp(0, u.shape[0] - 1)

    def rows(ring: Tensor, new: Tensor, at: slice, valid: Tensor) -> Tensor:
        old = wide(ring[slots, position[:, at] % ring.shape[1]])
        mixed: Tensor = torch.where(_as(fresh[:, at], old), wide(new)[source[:, at]], old)
        return mixed.masked_fill_(~_as(valid[:, at], old), 0)

    inside = (position >= folded) & (position < end)
    causal = (position >= 0) & (position >= folded - (taps - 1)) & (position < end)
    x = rows(state.u, u, slice(None), causal)
    width = blocks * size
    y = x[:, :width] * conv[:, 0]
    for tap in range(1, taps):
        y += x[:, tap : tap + width] * conv[:, tap]
    y = F.silu(y).masked_fill_(~inside[:, taps - 1 :, None], 0)
    new = slice(taps - 1, None)
    log_decay = rows(state.g, g, new, inside).unflatten(1, (blocks, size)).permute(0, 3, 1, 2)
    gain = rows(state.beta, beta, new, inside).unflatten(1, (blocks, size)).permute(0, 3, 1, 2)

    def split_heads(part: Tensor, count: int) -> Tensor:  # -> [B, H, blocks, size, D]
        apart: Tensor = part.unflatten(2, (count, -1)).unflatten(1, (blocks, size))
        return apart.permute(0, 3, 1, 2, 4)

    q, k, v = y.split([key_heads * dk, key_heads * dk, heads * dv], dim=-1)
    q, k = (reference._unit(split_heads(part, key_heads)) for part in (q, k))
    q, k = (part.repeat_interleave(heads // key_heads, 1) for part in (q * dk**-0.5, k))
    v = split_heads(v, heads)

    # G: log decay from the block's start, inclusive. Its differences are what counts, so a sum of
    # strong decays must not swallow weak ones; beyond e^-1e4 nothing is left of a state.
    total = log_decay.double().clamp_(min=-1e4).cumsum(-1)
    lower = torch.ones(size, size, dtype=torch.bool).tril()
    # The exponent above the diagonal is positive and may overflow: mask before exp.
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, float("-inf"))
    decay = decay.exp().to(k.dtype)
    mix = (k @ k.transpose(-1, -2)) * decay * gain[..., None]
    mix.diagonal(dim1=-2, dim2=-1).fill_(1)  # I + strictly lower part
    read = (q @ k.transpose(-1, -2)) * decay
    grown = total.exp()[..., None].to(k.dtype)

    s = wide(state.state[slots[:, 0]])
    s.masked_fill_((folded == 0)[:, :, None, None], 0)
    certain = end if spans[0].chunk else start
    fold = certain - certain % FOLD
    kept = torch.zeros_like(s) if bool((fold > folded).any()) else None
    o = torch.empty_like(v)
    for b in range(blocks):
        kb, vb, gb = k[:, :, b], v[:, :, b], gain[:, :, b, :, None]
        delta = torch.linalg.solve_triangular(
            mix[:, :, b], gb * (vb - grown[:, :, b] * (kb @ s)), upper=False, unitriangular=True
        )
        o[:, :, b] = grown[:, :, b] * (q[:, :, b] @ s) + read[:, :, b] @ delta
        edge = base + (b + 1) * size
        if kept is not None and bool(
            ((fold > edge - size) & (fold <= edge) & (fold > folded)).any()
        ):
            here = (fold > edge - size) & (fold <= edge)
            partial = _advance(s, kb, delta, total[:, :, b], (fold - (edge - size)).clamp(1, size))
            kept = torch.where(_as(here[:, 0], kept), partial, kept)
        if b + 1 < blocks:
            s = _advance(s, kb, delta, total[:, :, b], torch.full_like(fold, size))
            s = wide(s.to(state.state.dtype))
    if kept is not None:
        moved = (fold > folded)[:, 0]
        state.state[slots[moved, 0]] = kept[moved].to(state.state.dtype)
    flat = o.permute(0, 2, 3, 1, 4).flatten(1, 2)  # [B, W, H, Dv]
    wanted = (position >= start)[:, taps - 1 :] & (position < end)[:, taps - 1 :]
    out[source[:, new][wanted]] = flat[wanted].to(out.dtype)


def _advance(s: Tensor, k: Tensor, delta: Tensor, total: Tensor, rows: Tensor) -> Tensor:
    """The state after the first `rows` [B, 1] rows of a block: e^G S + (e^(G - G_t) k_t)' d_t."""
    last = total.gather(-1, (rows - 1)[:, :, None].expand(-1, total.shape[1], -1))  # [B, H, 1]
    weight = (last - total).masked_fill(
        torch.arange(total.shape[-1]) >= rows[:, :, None], float("-inf")
    )
    kept, weight = last.exp()[..., None].to(s.dtype), weight.exp()[..., None].to(s.dtype)
    return kept * s + (k * weight).transpose(-1, -2) @ delta


def _as(mask: Tensor, like: Tensor) -> Tensor:
    return mask[(...,) + (None,) * (like.dim() - mask.dim())]
