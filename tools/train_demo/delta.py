"""The gated delta rule over whole sequences: S <- a S; d = b (v - S'k); S <- S + k d'; o = S'q.

`recurrent` is the definition, `chunked` the same in blocks of 64 (any device, differentiable),
`gated_delta` picks the Triton kernels of flash-linear-attention on a GPU.
Chunk form: Yang et al. 2024, arXiv:2412.06464, section 3.3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 64


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float) -> Tensor:
    """Token by token in fp32. q, k ``[B, T, Hk, dk]``, v ``[B, T, Hv, dv]``, g, beta ``[B, T, Hv]``."""
    group = v.shape[2] // q.shape[2]
    qf, kf = (t.float().repeat_interleave(group, 2) for t in (q, k))
    state = qf.new_zeros(v.shape[0], v.shape[2], q.shape[3], v.shape[3])
    out = []
    for t in range(v.shape[1]):
        o, state = step(qf[:, t] * scale, kf[:, t], v[:, t].float(), g[:, t], beta[:, t], state)
        out.append(o)
    return torch.stack(out, 1).to(v.dtype)


def step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: q (scaled), k ``[B, Hv, dk]``, v ``[B, Hv, dv]``, state ``[B, Hv, dk, dv]``, all fp32."""
    state = state * g.exp()[..., None, None]
    delta = beta[..., None] * (v - torch.einsum("bhkv,bhk->bhv", state, k))
    state = state + k[..., :, None] * delta[..., None, :]
    return torch.einsum("bhkv,bhk->bhv", state, q), state


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float) -> Tensor:
    """As `recurrent`, block by block; a short last block is padded with tokens that change nothing."""
    batch, length, heads, dv = v.shape
    group = heads // q.shape[2]
    pad = -length % CHUNK

    def blocks(t: Tensor) -> Tensor:
        t = torch.cat([t, t.new_zeros(batch, pad, *t.shape[2:])], 1).float()
        return t.unflatten(1, (-1, CHUNK)).transpose(2, 3)

    qc, kc = (blocks(t.repeat_interleave(group, 2)) for t in (q, k))
    vc = blocks(v)
    gc, bc = (blocks(t[..., None])[..., 0] for t in (g, beta))
    total = gc.cumsum(-1)
    low = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~low, float("-inf")).exp()
    eye = torch.eye(CHUNK, device=v.device)
    inner = (bc[..., None] * (kc @ kc.mT) * decay).tril(-1)
    solved = torch.linalg.solve_triangular(
        eye + inner, torch.cat([vc, kc * total.exp()[..., None]], -1) * bc[..., None], upper=False
    )
    u, w = solved[..., :dv], solved[..., dv:]
    scores = (qc @ kc.mT) * decay * scale
    q_in = qc * total.exp()[..., None] * scale
    k_out = kc * (total[..., -1:] - total).exp()[..., None]
    last = total[..., -1].exp()
    state = q_in.new_zeros(batch, heads, q.shape[3], dv)
    out = []
    for n in range(qc.shape[1]):
        fresh = u[:, n] - w[:, n] @ state
        out.append(q_in[:, n] @ state + scores[:, n] @ fresh)
        state = state * last[:, n, :, None, None] + k_out[:, n].mT @ fresh
    return torch.stack(out, 1).transpose(2, 3).flatten(1, 2)[:, :length].to(v.dtype)


def _block_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    h: Tensor,
    do: Tensor,
    dh: Tensor,
    dv: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the block outputs; g is the block-local running sum in log2 units.

    h, dh ``[B, T/64, Hv, dk, dv]`` are the states entering the blocks and the gradients of the states
    leaving them; v holds the rule's updates, dv their gradients. Returns dq, dk ``[B, T, Hk, dk]``,
    dw ``[B, T, Hv, dk]`` and dg ``[B, T, Hv]`` (before its reverse running sum).
    """
    batch, length, heads_k, _ = k.shape
    heads = v.shape[2]
    group = heads // heads_k

    def blocks(t: Tensor) -> Tensor:
        return t.reshape(batch, -1, CHUNK, t.shape[2], t.shape[3]).transpose(2, 3)

    def rows(t: Tensor) -> Tensor:
        return t.transpose(2, 3).reshape(batch, length, heads, -1)

    qc, kc = (blocks(t.repeat_interleave(group, 2)) for t in (q, k))
    vc, doc, dvc = blocks(v), blocks(do), blocks(dv.to(v.dtype))
    gc = g.float().reshape(batch, -1, CHUNK, heads).transpose(2, 3)
    last = gc[..., -1:]
    low = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).tril()
    decay = torch.exp2((gc[..., :, None] - gc[..., None, :]).masked_fill(~low, float("-inf")))
    hb, dhb = h.to(v.dtype), dh.to(v.dtype)
    ds = ((doc @ vc.mT).float() * decay * scale).to(k.dtype)
    dq = (doc @ hb.mT).float() * (torch.exp2(gc) * scale)[..., None] + (ds @ kc).float()
    dk_out = (vc @ dhb.mT).float() * torch.exp2(last - gc)[..., None]
    end = (h.float() * dh.float()).sum((-1, -2)) * torch.exp2(last[..., 0])
    end = end + (dk_out * kc.float()).sum((-1, -2))
    dk = dk_out + (ds.mT @ qc).float()
    dg = (dq * qc.float()).sum(-1) - (dk * kc.float()).sum(-1)
    is_last = torch.arange(CHUNK, device=v.device) == CHUNK - 1
    dg = dg + end[..., None] * is_last
    dw = rows(-(dvc @ hb.mT))
    dq, dk = (rows(t).unflatten(2, (heads_k, group)).sum(3) for t in (dq, dk))
    return dq, dk, dw, dg.transpose(2, 3).reshape(batch, length, heads)


_kernels: Any = None


def _load_kernels() -> Any:
    """flash-linear-attention's chunk kernels, with one of their backward steps replaced.

    Triton 3.4 to 3.7.0 miscompiles that step (`chunk_bwd_dqkwg`) for Hopper, and the library refuses
    to run it there; batched matrix products give the same gradients.
    """
    global _kernels
    if _kernels is None:
        import fla.ops.gated_delta_rule.chunk as module

        inner = torch.compile(_block_gradients, dynamic=False)

        def replacement(**args: Any) -> tuple[Tensor, ...]:
            names = ("q", "k", "v", "g", "h", "do", "dh", "dv", "scale")
            return inner(**{name: args[name] for name in names})

        module.chunk_bwd_dqkwg = replacement
        _kernels = module
    return _kernels


def gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float) -> Tensor:
    """The rule over whole rows from an empty state; shapes as in `recurrent`, q and k normalised."""
    if v.is_cuda and v.dtype == torch.bfloat16:
        out, _ = _load_kernels().chunk_gated_delta_rule(q, k, v, g, beta.to(v.dtype), scale=scale)
        return out
    return chunked(q, k, v, g, beta, scale)
