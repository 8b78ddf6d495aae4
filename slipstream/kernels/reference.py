"""The definition of every op, in plain torch. Clear first; `cpu` and the GPU kernels are fast.

All of it works on any device and in float64, where it is the oracle of the tests. Arithmetic
that the op table calls fp32 is float32, or float64 when the inputs are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.types import (
    FOLD,
    PAGE,
    Batch,
    Dense,
    GdnState,
    Int4,
    Packed,
    PagedKV,
    Ring,
)


def dequantize(w: Packed) -> Tensor:
    """The [N, K] matrix that the stored numbers mean, in float32 (Dense: as stored)."""
    if isinstance(w, Dense):
        return w.weight
    bits = 4 if isinstance(w, Int4) else 8
    fields = 32 // bits
    shifts = torch.arange(0, 32, bits, device=w.codes.device, dtype=torch.int32)
    codes = (w.codes[:, None, :] >> shifts[None, :, None]) & (2**bits - 1)
    codes = codes.reshape(w.codes.shape[0] * fields, -1)  # [K, N]
    groups = codes.unflatten(0, (-1, w.group)).float()
    zeros = 2.0 ** (bits - 1) if w.zeros is None else w.zeros.float()[:, None, :]
    weight: Tensor = (groups - zeros) * w.scales.float()[:, None, :]
    return weight.flatten(0, 1).T.contiguous()


def wide(x: Tensor) -> Tensor:
    """x in the precision that accumulations use: float64 stays, everything else is float32."""
    return x if x.dtype == torch.float64 else x.float()


def matmul(x: Tensor, w: Packed, split: int) -> Tensor:
    weight = dequantize(w).to(x.dtype)
    return torch.cat([_padded(x[:split], weight), _padded(x[split:], weight)])


def _padded(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T with rows padded to a multiple of 4.

    BLAS routines take other paths for 1 to 3 rows, and those round differently.
    """
    rows = x.shape[0]
    if rows == 0:
        return x.new_empty(0, weight.shape[0])
    return F.linear(F.pad(x, (0, 0, 0, -rows % 4)), weight)[:rows]


def embed(ids: Tensor, w: Packed) -> Tensor:
    return dequantize(w)[ids]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    f = wide(x)
    return (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def angles(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    angle = positions.to(inv_freq.dtype)[:, None, None] * inv_freq
    return angle.cos(), angle.sin()


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a, b, rest = wide(x).split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def store_kv(k: Tensor, v: Tensor, kv: PagedKV, places: Tensor) -> None:
    for pages, rows in ((kv.k, k), (kv.v, v)):
        pages.flatten(0, 1).index_copy_(0, places, rows.to(pages.dtype))


def attend(q: Tensor, kv: PagedKV, table: Tensor, batch: Batch, scale: float) -> Tensor:
    out = torch.empty_like(q)
    for span in batch.spans:
        end = span.start + span.length
        pages = table[span.slot, : -(-end // PAGE)]
        k, v = (part[pages].flatten(0, 1)[:end] for part in kv)
        rows = slice(span.row, span.row + span.length)
        seen = torch.arange(end, device=q.device) <= batch.positions[rows, None]
        out[rows] = _mix(q[rows], k, v, seen, scale)
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
        if position < first:
            continue
        pages = table[slot, : position // PAGE + 1]
        k, v = (part[pages].flatten(0, 1)[first : position + 1] for part in kv)
        out[n] = _mix(q[n : n + 1], k, v, None, scale)[0]
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
    rows = torch.arange(q.shape[1], device=q.device)
    for n, (slot, stop) in enumerate(zip(slots.tolist(), end.tolist(), strict=True)):
        # The last row looks back furthest; earlier ones see all that it sees and more.
        first = max(0, stop - window + 1) if window else 0
        old = torch.arange(first, stop, device=q.device)
        if isinstance(past, Ring):
            pk, pv = (ring[slot, old % ring.shape[1]] for ring in past)
        else:
            pages = table[slot, : -(-stop // PAGE)]
            pk, pv = (part[pages].flatten(0, 1)[first:stop] for part in past)
        where = torch.cat([old, stop + rows])
        mine = stop + rows[:, None]
        seen = torch.ones(len(rows), len(where), dtype=torch.bool, device=q.device)
        if window:
            seen &= (mine - where).abs() < window
        if causal:
            seen &= where <= mine
        keys, values = torch.cat([pk, k[n].to(pk.dtype)]), torch.cat([pv, v[n].to(pv.dtype)])
        out[n] = _mix(q[n], keys, values, seen, scale)
    return out


def _mix(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    """Attention of q [R, Hq, D] over k, v [T, H, D] where `seen` [R, T] allows."""
    group = q.shape[1] // k.shape[1]
    k, v = (wide(part).repeat_interleave(group, 1) for part in (k, v))
    weights = torch.einsum("qhd,khd->hqk", wide(q), k) * scale
    if seen is not None:
        weights = weights.masked_fill(~seen, float("-inf"))
    return torch.einsum("hqk,khd->qhd", weights.softmax(-1), v).to(q.dtype)


def gdn_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    return -a_log.exp() * F.softplus(wide(a) + dt_bias), wide(b).sigmoid()


def gdn(
    u: Tensor, g: Tensor, beta: Tensor, conv: Tensor, key_heads: int, state: GdnState, batch: Batch
) -> Tensor:
    """The recurrence row by row: S <- e^g S; d = beta (v - S'k); S <- S + k d'; o = S'q."""
    out = u.new_empty(u.shape[0], *state.state.shape[1:2], state.state.shape[3])
    for span in batch.spans:
        rows = slice(span.row, span.row + span.length)
        end = span.start + span.length
        certain = end if span.chunk else span.start
        fold = certain - certain % FOLD
        every = PAGE if span.chunk else FOLD
        q, k, v = gdn_rows(u[rows], conv, key_heads, state, span.slot, span.folded, span.start)
        decay = ring_rows(state.g, span.slot, span.folded, span.start, wide(g[rows])).exp()
        gain = ring_rows(state.beta, span.slot, span.folded, span.start, wide(beta[rows]))
        s = wide(state.state[span.slot])
        s = torch.zeros_like(s) if span.folded == 0 else s
        for t in range(end - span.folded):
            position = span.folded + t
            s = s * decay[t, :, None, None]
            read = torch.einsum("hkv,hk->hv", s, k[t])
            s = s + k[t][:, :, None] * (gain[t, :, None] * (v[t] - read))[:, None, :]
            if position >= span.start:
                o = torch.einsum("hkv,hk->hv", s, q[t])
                out[span.row + position - span.start] = o.to(out.dtype)
            if (position + 1) % every == 0 or position + 1 == fold:
                rounded = s.to(state.state.dtype)
                if position + 1 == fold:
                    state.state[span.slot] = rounded
                if (position + 1) % every == 0:
                    s = wide(rounded)
        keep_rows(u[rows], g[rows], beta[rows], state, span.slot, span.start)
    return out


def gdn_rows(
    u: Tensor, conv: Tensor, key_heads: int, state: GdnState, slot: int, folded: int, start: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of positions folded .. start + len(u) - 1, one row each.

    Convolution and SiLU over ring rows and new rows, L2 norm of q and k (epsilon inside the
    root, sum and not mean), q scaled by Dk^-1/2, key heads repeated for their value heads.
    """
    heads, dk, dv = state.state.shape[1:]
    taps = conv.shape[1]
    x = wide(ring_rows(state.u, slot, folded - taps + 1, start, u))
    rows = x.shape[0] - taps + 1
    y = F.silu(sum(x[j : j + rows] * conv[:, j] for j in range(taps)))  # type: ignore[arg-type]
    q, k, v = y.split([key_heads * dk, key_heads * dk, heads * dv], dim=-1)
    q, k = (_unit(part.unflatten(1, (key_heads, dk))) for part in (q, k))
    group = heads // key_heads
    q = q.repeat_interleave(group, 1) * dk**-0.5
    return q, k.repeat_interleave(group, 1), v.unflatten(1, (heads, dv))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def ring_rows(ring: Tensor, slot: int, begin: int, start: int, new: Tensor) -> Tensor:
    """Rows of positions begin .. start-1 from the slot's ring, then `new`; zeros before 0."""
    positions = torch.arange(begin, start, device=ring.device)
    old = ring[slot, positions % ring.shape[1]].to(new.dtype)
    if begin < 0:
        old[: min(-begin, start - begin)] = 0
    return torch.cat([old, new])


def keep_rows(u: Tensor, g: Tensor, beta: Tensor, state: GdnState, slot: int, start: int) -> None:
    """Put the last rows that a ring holds at their positions."""
    for ring, rows in ((state.u, u), (state.g, g), (state.beta, beta)):
        size = ring.shape[1]
        skip = max(0, rows.shape[0] - size)
        positions = torch.arange(start + skip, start + rows.shape[0], device=ring.device)
        ring[slot, positions % size] = rows[skip:].to(ring.dtype)


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    f = wide(x)
    f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps) * weight
    return (f * F.silu(wide(z))).to(x.dtype)
