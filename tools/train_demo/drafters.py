"""The two drafters: Qwen's MTP head and the DFlash2 block drafter, as functions over named tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.train_demo.model import (
    Config,
    Record,
    Weights,
    attention_shapes,
    layer_of,
    note,
    rms,
    rope,
    zrms,
)


def mtp_shapes(cfg: Config) -> dict[str, tuple[int, ...]]:
    """Tensors of the MTP head: a fusion matrix, norms and one full-attention layer."""
    h = cfg.hidden_size
    return {
        "mtp.fc.weight": (h, 2 * h),
        "mtp.pre_fc_norm_embedding.weight": (h,),
        "mtp.pre_fc_norm_hidden.weight": (h,),
        "mtp.norm.weight": (h,),
        **attention_shapes(cfg, "mtp.layers.0."),
    }


def mtp_fuse(
    embedding: Tensor, hidden: Tensor, w: Weights, eps: float, record: Record = None
) -> Tensor:
    """``fc([norm(embedding), norm(hidden)])`` for rows ``[N, hidden]``: the embedding comes first."""
    e = zrms(embedding, w["mtp.pre_fc_norm_embedding.weight"], eps)
    p = zrms(hidden, w["mtp.pre_fc_norm_hidden.weight"], eps)
    both = torch.cat([e, p], -1)
    note(record, both, "mtp.fc")
    return both @ w["mtp.fc.weight"].to(hidden.dtype).T


def chain_mask(length: int, depth: int, device: torch.device) -> Tensor:
    """Who sees whom in step ``depth`` of a chain started at every row: ``[length, depth * length]``.

    Keys are those of step 1 (rows up to the query's own), then of steps 2.. (the own row alone),
    just as in drafting, where only the chain's own steps stand behind the committed rows.
    """
    rows = torch.arange(length, device=device)
    first = rows[:, None] >= rows[None, :]
    own = rows[:, None] == rows[None, :]
    return torch.cat([first] + [own] * (depth - 1), 1)


@dataclass(frozen=True)
class DraftConfig:
    """Shapes of the DFlash2 drafter (defaults are the shipped model's)."""

    hidden_size: int = 384
    intermediate_size: int = 896
    num_hidden_layers: int = 3
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    vocab_size: int = 8192
    num_target_layers: int = 12
    sliding_window: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 100_000.0
    max_position_embeddings: int = 32768
    block_size: int = 8
    conv_group_size: int = 16
    conv_kernel_size: int = 2
    mask_token_id: int = 8185
    selector_rank: int = 64
    selector_top_k: int = 16
    target_layer_ids: tuple[int, ...] = (1, 4, 7, 10)

    def to_hf(self) -> dict[str, Any]:
        """The drafter's ``config.json`` without quantization."""
        return {
            "architectures": ["DFlash2DraftModel"],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "num_target_layers": self.num_target_layers,
            "layer_types": ["sliding_attention"] * self.num_hidden_layers,
            "sliding_window": self.sliding_window,
            "use_sliding_window": True,
            "is_causal": False,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "max_position_embeddings": self.max_position_embeddings,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "block_size": self.block_size,
            "dflash_config": {
                "block_size": self.block_size,
                "conv_group_size": self.conv_group_size,
                "conv_kernel_size": self.conv_kernel_size,
                "mask_token_id": self.mask_token_id,
                "selector_rank": self.selector_rank,
                "selector_top_k": self.selector_top_k,
                "target_layer_ids": list(self.target_layer_ids),
            },
            "dtype": "bfloat16",
        }

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> DraftConfig:
        """Reads a ``config.json`` written by `to_hf`."""
        flat = {
            **config,
            **config["dflash_config"],
            "rope_theta": config["rope_parameters"]["rope_theta"],
        }
        flat["target_layer_ids"] = tuple(flat["target_layer_ids"])
        return cls(**{name: flat[name] for name in cls.__dataclass_fields__})


def draft_shapes(cfg: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of the DFlash2 drafter (embedding and head are the target's)."""
    h, m, d, taps = cfg.hidden_size, cfg.intermediate_size, cfg.head_dim, cfg.conv_kernel_size
    q, kv = cfg.num_attention_heads * d, cfg.num_key_value_heads * d
    coefficients = 2 * taps * (h // cfg.conv_group_size)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, h * len(cfg.target_layer_ids)),
        "hidden_norm.weight": (h,),
    }
    for n in range(cfg.num_hidden_layers):
        p = f"layers.{n}."
        shapes |= {
            f"{p}input_layernorm.weight": (h,),
            f"{p}post_attention_layernorm.weight": (h,),
            f"{p}self_attn.q_proj.weight": (q, h),
            f"{p}self_attn.k_proj.weight": (kv, h),
            f"{p}self_attn.v_proj.weight": (kv, h),
            f"{p}self_attn.o_proj.weight": (h, q),
            f"{p}self_attn.q_norm.weight": (d,),
            f"{p}self_attn.k_norm.weight": (d,),
            f"{p}mlp.gate_proj.weight": (m, h),
            f"{p}mlp.up_proj.weight": (m, h),
            f"{p}mlp.down_proj.weight": (h, m),
            f"{p}attention_conv.base_kernel": (2, taps, h),
            f"{p}attention_conv.kernel_projection.weight": (coefficients, h),
            f"{p}mlp_conv.base_kernel": (2, taps, h),
            f"{p}mlp_conv.kernel_projection.weight": (coefficients, h),
        }
    shapes["norm.weight"] = (h,)
    shapes["candidate_selector.predecessor_codebook"] = (cfg.vocab_size, cfg.selector_rank)
    shapes["candidate_selector.successor_codebook"] = (cfg.vocab_size, cfg.selector_rank)
    shapes["candidate_selector.hidden_projection.weight"] = (cfg.selector_rank, h)
    return shapes


def init_draft(cfg: DraftConfig, generator: torch.Generator) -> Weights:
    """Fresh weights: convolutions start as the identity, the selector as almost nothing."""
    weights: Weights = {}
    for name, shape in draft_shapes(cfg).items():
        if name.endswith("base_kernel"):
            value = torch.zeros(shape)
            value[:, 0] = 1
        elif name.endswith("kernel_projection.weight"):
            value = torch.randn(shape, generator=generator) * 0.002
        elif len(shape) == 1:
            value = torch.ones(shape)
        elif name.endswith("codebook"):
            value = torch.randn(shape, generator=generator) * 0.1
        else:
            value = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                value *= (2 * cfg.num_hidden_layers) ** -0.5
        weights[name] = value
    return weights


def context(taps: Tensor, w: Weights, eps: float, record: Record = None) -> Tensor:
    """``rms(fc(taps))`` for ``taps [N, n * hidden]``: what every layer's context keys are made of."""
    note(record, taps, "fc")
    return rms(taps @ w["fc.weight"].to(taps.dtype).T, w["hidden_norm.weight"], eps)


def context_kv(
    c: Tensor,
    w: Weights,
    layer: int,
    cos: Tensor,
    sin: Tensor,
    cfg: DraftConfig,
    record: Record = None,
) -> tuple[Tensor, Tensor]:
    """Keys and values ``[N, Hkv, D]`` of committed positions for one layer, from `context` rows."""
    p = f"layers.{layer}.self_attn."
    rows = c.shape[0]
    note(record, c, p + "k_proj", p + "v_proj")
    k = (c @ w[p + "k_proj.weight"].to(c.dtype).T).view(rows, -1, cfg.head_dim)
    v = (c @ w[p + "v_proj.weight"].to(c.dtype).T).view(rows, -1, cfg.head_dim)
    return rope(rms(k, w[p + "k_norm.weight"], cfg.rms_norm_eps), cos, sin), v


def _conv(n: Tensor, coefficients: Tensor, base: Tensor, first: Tensor, group: int) -> Tensor:
    """Two-tap convolution inside blocks: tap 0 is the current row, tap 1 the one before it.

    n ``[R, hidden]``, coefficients ``[R, taps, groups]``, base ``[taps, hidden]``, first ``[R]`` marks the
    first row of a block.
    """
    before = F.pad(n, (0, 0, 1, 0))[:-1] * (~first)[:, None]
    out = torch.zeros_like(n, dtype=torch.float32)
    for tap, rows in enumerate((n, before)):
        kernel = base[tap].float() + coefficients[:, tap].float().repeat_interleave(group, -1)
        out = out + kernel * rows.float()
    return out.to(n.dtype)


def block_qkv(
    x: Tensor,
    w: Weights,
    cos: Tensor,
    sin: Tensor,
    first: Tensor,
    cfg: DraftConfig,
    record: Record = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q ``[R, Hq, D]``, k, v ``[R, Hkv, D]`` of block rows and the output side's conv coefficients."""
    rows, taps = x.shape[0], cfg.conv_kernel_size
    n = rms(x, w["input_layernorm.weight"], cfg.rms_norm_eps)
    kappa = (n @ w["attention_conv.kernel_projection.weight"].to(x.dtype).T).view(rows, 2, taps, -1)
    n = _conv(n, kappa[:, 0], w["attention_conv.base_kernel"][0], first, cfg.conv_group_size)
    p = "self_attn."
    note(record, n, p + "q_proj", p + "k_proj", p + "v_proj")
    q = (n @ w[p + "q_proj.weight"].to(x.dtype).T).view(rows, -1, cfg.head_dim)
    k = (n @ w[p + "k_proj.weight"].to(x.dtype).T).view(rows, -1, cfg.head_dim)
    v = (n @ w[p + "v_proj.weight"].to(x.dtype).T).view(rows, -1, cfg.head_dim)
    q = rope(rms(q, w[p + "q_norm.weight"], cfg.rms_norm_eps), cos, sin)
    k = rope(rms(k, w[p + "k_norm.weight"], cfg.rms_norm_eps), cos, sin)
    return q, k, v, kappa[:, 1]


def block_rest(
    x: Tensor,
    o: Tensor,
    kappa: Tensor,
    w: Weights,
    first: Tensor,
    cfg: DraftConfig,
    record: Record = None,
) -> Tensor:
    """Output projection and MLP of a drafter layer, each between its convolutions; o ``[R, Hq * D]``."""
    rows, taps, group = x.shape[0], cfg.conv_kernel_size, cfg.conv_group_size
    note(record, o, "self_attn.o_proj")
    y = o @ w["self_attn.o_proj.weight"].to(x.dtype).T
    x = x + _conv(y, kappa, w["attention_conv.base_kernel"][1], first, group)
    n = rms(x, w["post_attention_layernorm.weight"], cfg.rms_norm_eps)
    kappa = (n @ w["mlp_conv.kernel_projection.weight"].to(x.dtype).T).view(rows, 2, taps, -1)
    n = _conv(n, kappa[:, 0], w["mlp_conv.base_kernel"][0], first, group)
    note(record, n, "mlp.gate_proj", "mlp.up_proj")
    gate, up = (
        n @ w["mlp.gate_proj.weight"].to(x.dtype).T,
        n @ w["mlp.up_proj.weight"].to(x.dtype).T,
    )
    inner = F.silu(gate) * up
    note(record, inner, "mlp.down_proj")
    y = inner @ w["mlp.down_proj.weight"].to(x.dtype).T
    return x + _conv(y, kappa[:, 1], w["mlp_conv.base_kernel"][1], first, group)


class Drafter:
    """Block forward of DFlash2 over many blocks at once; ``compiled`` as in `model.Target`."""

    def __init__(self, cfg: DraftConfig, compiled: bool = False) -> None:
        self.cfg = cfg
        wrap = torch.compile if compiled else (lambda f, **_: f)
        self.qkv = wrap(block_qkv, dynamic=False)
        self.rest = wrap(block_rest, dynamic=False)
        self.context_kv = wrap(context_kv, dynamic=False)
        self.context = wrap(context, dynamic=False)

    def blocks(
        self,
        x: Tensor,
        keys: list[tuple[Tensor, Tensor]],
        w: Weights,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
        record: Record = None,
    ) -> Tensor:
        """Final hidden of block rows: x ``[B, R, hidden]`` (R = blocks x block size) to the same shape.

        ``keys``: per layer context K, V ``[B, T, Hkv, D]``; cos, sin ``[B * R, D/2]``;
        mask ``[B, 1, R, T + R]``, True where visible.
        """
        batch, rows, _ = x.shape
        y = x.reshape(batch * rows, -1)
        first = torch.arange(batch * rows, device=x.device) % self.cfg.block_size == 0
        group = self.cfg.num_attention_heads // self.cfg.num_key_value_heads
        for n, (ck, cv) in enumerate(keys):
            layer = layer_of(w, f"layers.{n}.")
            told = (
                None
                if record is None
                else lambda name, rows, n=n: record(f"layers.{n}.{name}", rows)
            )
            q, k, v, kappa = self.qkv(y, layer, cos, sin, first, self.cfg, told)
            q, k, v = (t.unflatten(0, (batch, rows)) for t in (q, k, v))
            k, v = (
                torch.cat(t, 1).transpose(1, 2).repeat_interleave(group, 1)
                for t in ((ck, k), (cv, v))
            )
            o = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask)
            o = o.transpose(1, 2).reshape(batch * rows, -1)
            y = self.rest(y, o, kappa, layer, first, self.cfg, told)
        return rms(y, w["norm.weight"], self.cfg.rms_norm_eps).view(batch, rows, -1)


def selector_scores(
    hidden: Tensor, previous: Tensor, candidates: Tensor, unary: Tensor, w: Weights
) -> Tensor:
    """Scores ``[M, k]`` of candidates after a known predecessor.

    hidden ``[M, hidden]``, previous ``[M]``, candidates and their logits unary ``[M, k]``.
    """
    p = "candidate_selector."
    m = (hidden @ w[p + "hidden_projection.weight"].to(hidden.dtype).T).float()
    left = F.embedding(previous, w[p + "predecessor_codebook"]).float() * m
    right = F.embedding(candidates, w[p + "successor_codebook"]).float()
    return unary + (right @ left[..., None])[..., 0]
