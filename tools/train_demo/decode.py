"""Token-by-token decoding with static caches, on a CPU or inside a CUDA graph.

Every sequence has its own position, so sequences that accepted different numbers of drafts go on
side by side.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.train_demo import delta
from tools.train_demo.model import (
    Config,
    Weights,
    attention_inputs,
    attention_output,
    gdn_inputs,
    gdn_output,
    join,
    layer_of,
    rope_table,
    zrms,
)


def cached_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor
) -> Tensor:
    """Writes k, v ``[B, Hkv, D]`` at ``pos [B]`` and attends to all up to it; caches ``[B, Hkv, T, D]``.

    Returns ``[B, Hq * D]``. What lies beyond ``pos`` is never seen.
    """
    batch, heads, dim = q.shape
    rows = torch.arange(batch, device=q.device)
    keys[rows, :, pos] = k
    values[rows, :, pos] = v
    hkv = k.shape[1]
    grouped = q.view(batch, hkv, heads // hkv, dim)
    scores = (grouped @ keys.mT).float() * dim**-0.5
    hidden = torch.arange(keys.shape[2], device=q.device)[None] > pos[:, None]
    weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1).to(q.dtype)
    return (weights @ values).reshape(batch, heads * dim)


class Decoder:
    """The target over ``batch`` sequences of up to ``context`` tokens, one token of each at a time."""

    def __init__(
        self,
        weights: Weights,
        cfg: Config,
        batch: int,
        context: int,
        dtype: torch.dtype = torch.float32,
        taps: tuple[int, ...] = (),
    ) -> None:
        device = weights["lm_head.weight"].device
        self.cfg, self.dtype, self.taps = cfg, dtype, taps
        self.weights = {
            n: w if n.endswith(("A_log", "dt_bias")) else w.to(dtype) for n, w in weights.items()
        }
        self.layers = [
            join(layer_of(self.weights, f"model.layers.{i}.")) for i in range(cfg.num_hidden_layers)
        ]
        linear = sum(not cfg.is_full(i) for i in range(cfg.num_hidden_layers))
        full = cfg.num_hidden_layers - linear
        conv = 2 * cfg.key_dim + cfg.value_dim
        self.state = torch.zeros(
            batch,
            linear,
            cfg.linear_num_value_heads,
            cfg.linear_key_head_dim,
            cfg.linear_value_head_dim,
            device=device,
        )
        self.history = torch.zeros(
            batch, linear, cfg.linear_conv_kernel_dim - 1, conv, device=device, dtype=dtype
        )
        shape = (full, batch, cfg.num_key_value_heads, context, cfg.head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.cos, self.sin = rope_table(context, cfg.rotary_dim, cfg.rope_theta, device)
        self.tokens = torch.zeros(batch, dtype=torch.long, device=device)
        self.pos = torch.zeros(batch, dtype=torch.long, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.out: tuple[Tensor, Tensor, Tensor] | None = None

    def reset(self) -> None:
        """Empties the recurrent states (caches need no reset: nothing beyond a position is seen)."""
        self.state.zero_()
        self.history.zero_()

    def snapshot(self) -> tuple[Tensor, Tensor]:
        """Copies of the recurrent state and the convolution rows."""
        return self.state.clone(), self.history.clone()

    def restore(self, snapshots: list[tuple[Tensor, Tensor]], index: Tensor) -> None:
        """For each sequence b, the state of ``snapshots[index[b]]``."""
        for n, (state, history) in enumerate(snapshots):
            pick = index == n
            self.state[pick] = state[pick]
            self.history[pick] = history[pick]

    def _advance(self) -> tuple[Tensor, Tensor, Tensor]:
        cfg, w = self.cfg, self.weights
        x = F.embedding(self.tokens, w["model.embed_tokens.weight"])
        cos, sin = self.cos[self.pos], self.sin[self.pos]
        lin = att = 0
        tapped = []
        for i, layer in enumerate(self.layers):
            if cfg.is_full(i):
                q, k, v, gate = attention_inputs(x, cos, sin, layer, cfg)
                o = cached_attention(q, k, v, self.keys[att], self.values[att], self.pos)
                x = attention_output(x, o, gate, layer, cfg)
                att += 1
            else:
                past = tuple(self.history[:, lin].unbind(1))
                q, k, v, z, g, beta, raw = gdn_inputs(x, past, layer, cfg, None)
                group = v.shape[1] // q.shape[1]
                q, k = (t.float().repeat_interleave(group, 1) for t in (q, k))
                o, state = delta.step(
                    q * cfg.linear_key_head_dim**-0.5, k, v.float(), g, beta, self.state[:, lin]
                )
                self.state[:, lin] = state
                self.history[:, lin] = torch.stack([*past[1:], raw], 1)
                x = gdn_output(x, o.to(x.dtype), z, layer, cfg)
                lin += 1
            if i in self.taps:
                tapped.append(x)
        hidden = zrms(x, w["model.norm.weight"], cfg.rms_norm_eps)
        logits = (hidden @ w["lm_head.weight"].T).float()
        return logits, hidden, torch.cat(tapped, -1) if tapped else hidden

    @torch.no_grad()
    def step(self, tokens: Tensor, pos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Feeds ``tokens [B]`` at ``pos [B]``: logits ``[B, vocab]`` fp32, post-norm hidden, taps.

        On a GPU the outputs are the graph's own buffers: copy what must outlive the next step.
        """
        self.tokens.copy_(tokens)
        self.pos.copy_(pos)
        if not self.tokens.is_cuda:
            return self._advance()
        if self.graph is None:
            kept = self.snapshot()
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self._advance()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = self._advance()
            self.state.copy_(kept[0])
            self.history.copy_(kept[1])
        self.graph.replay()
        assert self.out is not None
        return self.out


def sample(
    logits: Tensor, temperature: float | Tensor, generator: torch.Generator | None = None
) -> Tensor:
    """One id per row of ``logits [B, vocab]``; temperature 0 (also per row) is the argmax."""
    if isinstance(temperature, float):
        temperature = torch.full(logits.shape[:1], temperature, device=logits.device)
    uniform = torch.rand(logits.shape, device=logits.device, generator=generator).clamp_(1e-20)
    noise = -torch.log(-torch.log(uniform))
    return torch.where(
        temperature[:, None] > 0, logits / temperature[:, None].clamp(min=1e-6) + noise, logits
    ).argmax(-1)


@torch.no_grad()
def generate(
    decoder: Decoder,
    prompts: list[list[int]],
    length: int,
    temperature: float | Tensor = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Rows of ``length`` tokens: each prompt, then what the model says. ``[B, length]``."""
    device = decoder.tokens.device
    batch = len(prompts)
    ids = torch.zeros(batch, length, dtype=torch.long)
    known = torch.tensor([min(len(p), length) for p in prompts])
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt[:length])
    ids, known = ids.to(device), known.to(device)
    decoder.reset()
    pos = torch.zeros(batch, dtype=torch.long, device=device)
    for t in range(length - 1):
        logits, _, _ = decoder.step(ids[:, t], pos + t)
        new = sample(logits, temperature, generator)
        ids[:, t + 1] = torch.where(known > t + 1, ids[:, t + 1], new)
    return ids
