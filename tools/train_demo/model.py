"""The target model: Qwen3.5's dense architecture at demo size, as plain functions over named tensors.

Weights live in a flat ``dict`` under their checkpoint names, so training, export and evaluation
share one naming. Token rows are flattened to ``[N, hidden]`` (N = batch x length) wherever no
operation looks along the sequence: compiled functions then see one shape, whatever the row length.

Formulas: Gated Delta Networks (Yang et al. 2024, arXiv:2412.06464) in the arrangement of Qwen3.5.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.train_demo import delta

Weights = dict[str, Tensor]
# Called with a matrix's name and its input rows; for calibration.
Record = Callable[[str, Tensor], None] | None


@dataclass(frozen=True)
class Config:
    """Shapes of the target (defaults are the shipped model's)."""

    vocab_size: int = 8192
    hidden_size: int = 384
    intermediate_size: int = 896
    num_hidden_layers: int = 12
    full_attention_interval: int = 4
    num_attention_heads: int = 6
    num_key_value_heads: int = 1
    head_dim: int = 128
    partial_rotary_factor: float = 0.25
    rope_theta: float = 100_000.0
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 6
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    def is_full(self, layer: int) -> bool:
        """Whether a layer is full attention (every fourth is; the others are Gated DeltaNet)."""
        return (layer + 1) % self.full_attention_interval == 0

    def to_hf(self, eos: int, pad: int) -> dict[str, Any]:
        """The checkpoint's ``config.json`` without quantization."""
        third = self.rotary_dim // 2 // 3
        sections = [self.rotary_dim // 2 - 2 * third, third, third]
        kinds = [
            "full_attention" if self.is_full(i) else "linear_attention"
            for i in range(self.num_hidden_layers)
        ]
        plain = asdict(self)
        rope = {
            "rope_type": "default",
            "rope_theta": plain.pop("rope_theta"),
            "partial_rotary_factor": plain.pop("partial_rotary_factor"),
            "mrope_section": sections,
            "mrope_interleaved": True,
        }
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            **plain,
            "layer_types": kinds,
            "rope_parameters": rope,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "hidden_act": "silu",
            "mamba_ssm_dtype": "float32",
            "tie_word_embeddings": False,
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "initializer_range": 0.02,
            "use_cache": True,
            "eos_token_id": eos,
            "pad_token_id": pad,
            "bos_token_id": None,
            "dtype": "bfloat16",
        }

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> Config:
        """Reads a ``config.json`` written by `to_hf`."""
        names = cls.__dataclass_fields__
        rope = config["rope_parameters"]
        merged = {
            **config,
            "rope_theta": rope["rope_theta"],
            "partial_rotary_factor": rope["partial_rotary_factor"],
        }
        return cls(**{name: merged[name] for name in names})


TINY = Config(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=1,
    head_dim=32,
    linear_num_key_heads=1,
    linear_num_value_heads=3,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    rope_theta=10_000.0,
    max_position_embeddings=2048,
)


def attention_shapes(cfg: Config, prefix: str) -> dict[str, tuple[int, ...]]:
    """Tensors of one full-attention decoder layer (also the MTP layer's)."""
    h, d = cfg.hidden_size, cfg.head_dim
    q, kv = cfg.num_attention_heads * d, cfg.num_key_value_heads * d
    return {
        f"{prefix}input_layernorm.weight": (h,),
        f"{prefix}self_attn.q_proj.weight": (2 * q, h),
        f"{prefix}self_attn.k_proj.weight": (kv, h),
        f"{prefix}self_attn.v_proj.weight": (kv, h),
        f"{prefix}self_attn.o_proj.weight": (h, q),
        f"{prefix}self_attn.q_norm.weight": (d,),
        f"{prefix}self_attn.k_norm.weight": (d,),
        **mlp_shapes(cfg, prefix),
    }


def mlp_shapes(cfg: Config, prefix: str) -> dict[str, tuple[int, ...]]:
    """Tensors of a layer's MLP and its norm."""
    h, m = cfg.hidden_size, cfg.intermediate_size
    return {
        f"{prefix}post_attention_layernorm.weight": (h,),
        f"{prefix}mlp.gate_proj.weight": (m, h),
        f"{prefix}mlp.up_proj.weight": (m, h),
        f"{prefix}mlp.down_proj.weight": (h, m),
    }


def linear_shapes(cfg: Config, prefix: str) -> dict[str, tuple[int, ...]]:
    """Tensors of one Gated DeltaNet decoder layer."""
    h, hv = cfg.hidden_size, cfg.linear_num_value_heads
    conv = 2 * cfg.key_dim + cfg.value_dim
    p = f"{prefix}linear_attn."
    return {
        f"{prefix}input_layernorm.weight": (h,),
        f"{p}in_proj_qkv.weight": (conv, h),
        f"{p}in_proj_z.weight": (cfg.value_dim, h),
        f"{p}in_proj_b.weight": (hv, h),
        f"{p}in_proj_a.weight": (hv, h),
        f"{p}conv1d.weight": (conv, 1, cfg.linear_conv_kernel_dim),
        f"{p}A_log": (hv,),
        f"{p}dt_bias": (hv,),
        f"{p}norm.weight": (cfg.linear_value_head_dim,),
        f"{p}out_proj.weight": (h, cfg.value_dim),
        **mlp_shapes(cfg, prefix),
    }


def target_shapes(cfg: Config) -> dict[str, tuple[int, ...]]:
    """All tensors of the target, in checkpoint order."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (cfg.vocab_size, cfg.hidden_size)
    }
    for i in range(cfg.num_hidden_layers):
        make = attention_shapes if cfg.is_full(i) else linear_shapes
        shapes |= make(cfg, f"model.layers.{i}.")
    shapes["model.norm.weight"] = (cfg.hidden_size,)
    shapes["lm_head.weight"] = (cfg.vocab_size, cfg.hidden_size)
    return shapes


def init(shapes: dict[str, tuple[int, ...]], layers: int, generator: torch.Generator) -> Weights:
    """Fresh fp32 weights: normal with std 1/sqrt(fan_in), residual outputs divided by sqrt(2 layers).

    Decay starts as in Mamba2: A uniform in 1..16, time step log-uniform in 1e-3..1e-1.
    """
    weights: Weights = {}
    for name, shape in shapes.items():
        if name.endswith("A_log"):
            value = torch.empty(shape).uniform_(1, 16, generator=generator).log()
        elif name.endswith("dt_bias"):
            step = (
                torch.empty(shape)
                .uniform_(math.log(1e-3), math.log(1e-1), generator=generator)
                .exp()
            )
            value = step + torch.log(-torch.expm1(-step))
        elif name.endswith("linear_attn.norm.weight"):
            value = torch.ones(shape)
        elif len(shape) == 1:
            value = torch.zeros(shape)
        elif name.endswith("embed_tokens.weight"):
            value = torch.randn(shape, generator=generator) * 0.5
        elif name.endswith("conv1d.weight"):
            value = torch.randn(shape, generator=generator) * 0.3
        else:
            value = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                value *= (2 * layers) ** -0.5
            elif name == "lm_head.weight":
                value *= 0.3
        weights[name] = value
    return weights


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis in fp32: ``x / rms(x) * weight``; keeps x's dtype."""
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def zrms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zero-centred RMS norm: ``x / rms(x) * (1 + weight)``."""
    return rms(x, 1 + weight.float(), eps)


def rope_table(length: int, dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin ``[length, dim/2]`` in fp32."""
    inv = theta ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * inv
    return angle.cos(), angle.sin()


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first ``2 * cos.shape[-1]`` channels of ``x [..., H, D]``; cos, sin ``[..., R/2]``."""
    half = cos.shape[-1]
    y = x.float()
    a, b, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
    c, s = cos[..., None, :], sin[..., None, :]
    return torch.cat([a * c - b * s, b * c + a * s, rest], -1).to(x.dtype)


def note(record: Record, x: Tensor, *names: str) -> None:
    """Tells ``record``, where there is one, that matrices ``names`` are about to see rows ``x``."""
    if record is not None:
        for name in names:
            record(f"{name}.weight", x)


_GATE_UP = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
_QKV = tuple(f"self_attn.{n}_proj.weight" for n in "qkv")
_GDN = tuple(f"linear_attn.in_proj_{n}.weight" for n in ("qkv", "z", "b", "a"))


def joined(w: Weights, *names: str) -> Tensor:
    """Matrices over the same input as one, its rows filled up with zeros to a multiple of 16.

    Matrix products want widths in multiples of 8; two gates of a few heads do not have one.
    """
    if (ready := w.get("+".join(names))) is not None:
        return ready
    both = torch.cat([w[name] for name in names])
    return F.pad(both, (0, 0, 0, -both.shape[0] % 16))


def join(w: Weights) -> Weights:
    """A layer's tensors with its joined matrices added, for decoding: they are made only once."""
    extra = {
        "+".join(names): joined(w, *names) for names in (_GATE_UP, _QKV, _GDN) if names[0] in w
    }
    return {**w, **extra}


def mlp(x: Tensor, w: Weights, cfg: Config, record: Record = None) -> Tensor:
    """Residual SwiGLU block ``x + down(silu(gate n) * up n)`` with ``n = zrms(x)``; x ``[N, hidden]``."""
    n = zrms(x, w["post_attention_layernorm.weight"], cfg.rms_norm_eps)
    note(record, n, "mlp.gate_proj", "mlp.up_proj")
    both = n @ joined(w, *_GATE_UP).to(x.dtype).T
    a, b = both.chunk(2, -1)
    inner = F.silu(a) * b
    note(record, inner, "mlp.down_proj")
    return x + inner @ w["mlp.down_proj.weight"].to(x.dtype).T


def gdn_inputs(
    x: Tensor,
    history: tuple[Tensor, ...],
    w: Weights,
    cfg: Config,
    pos: Tensor | None,
    record: Record = None,
) -> tuple[Tensor, ...]:
    """Everything before the delta rule, for rows ``x [N, hidden]``.

    ``pos [N]`` is the position in its row of each token (the convolution stops at 0). For decoding,
    ``pos`` is None and ``history`` holds the last three raw projections, oldest first.
    Returns q, k ``[N, Hk, dk]`` (normalised, unscaled), v, z ``[N, Hv, dv]``, g, beta ``[N, Hv]`` fp32,
    and the raw projection ``[N, conv]``.
    """
    eps, hv = cfg.rms_norm_eps, cfg.linear_num_value_heads
    n = zrms(x, w["input_layernorm.weight"], eps)
    p = "linear_attn."
    note(record, n, p + "in_proj_qkv", p + "in_proj_z")
    merged = joined(w, *_GDN).to(x.dtype)
    conv_dim = 2 * cfg.key_dim + cfg.value_dim
    proj = n @ merged.T
    raw, z = proj[:, :conv_dim], proj[:, conv_dim : conv_dim + cfg.value_dim]
    b = proj[:, conv_dim + cfg.value_dim :][:, :hv].float()
    a = proj[:, conv_dim + cfg.value_dim :][:, hv : 2 * hv].float()
    taps = w[p + "conv1d.weight"][:, 0].float()
    width = taps.shape[1]
    y = raw.float() * taps[:, width - 1]
    for back in range(1, width):
        if pos is None:
            past = history[width - 1 - back].float()
        else:
            past = F.pad(raw, (0, 0, back, 0))[:-back].float() * (pos >= back)[:, None]
        y = y + past * taps[:, width - 1 - back]
    y = F.silu(y)
    kd, rows = cfg.key_dim, x.shape[0]
    q = y[:, :kd].view(rows, -1, cfg.linear_key_head_dim)
    k = y[:, kd : 2 * kd].view(rows, -1, cfg.linear_key_head_dim)
    v = y[:, 2 * kd :].view(rows, hv, -1).to(x.dtype)
    q = (q * torch.rsqrt(q.pow(2).sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
    k = (k * torch.rsqrt(k.pow(2).sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
    g = -w[p + "A_log"].float().exp() * F.softplus(a + w[p + "dt_bias"].float())
    return q, k, v, z.reshape(rows, hv, -1), g, b.sigmoid(), raw


def gdn_output(
    x: Tensor, o: Tensor, z: Tensor, w: Weights, cfg: Config, record: Record = None
) -> Tensor:
    """Gated norm, output projection and MLP: x ``[N, hidden]``, o and z ``[N, Hv, dv]``."""
    p = "linear_attn."
    y = rms(o.float(), w[p + "norm.weight"], cfg.rms_norm_eps) * F.silu(z.float())
    inner = y.to(x.dtype).flatten(1)
    note(record, inner, p + "out_proj")
    return mlp(x + inner @ w[p + "out_proj.weight"].to(x.dtype).T, w, cfg, record)


def attention_inputs(
    x: Tensor, cos: Tensor, sin: Tensor, w: Weights, cfg: Config, record: Record = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q ``[N, Hq, D]``, k, v ``[N, Hkv, D]``, gate ``[N, Hq * D]`` of a full-attention layer."""
    n = zrms(x, w["input_layernorm.weight"], cfg.rms_norm_eps)
    p = "self_attn."
    note(record, n, p + "q_proj", p + "k_proj", p + "v_proj")
    rows, heads, dim = x.shape[0], cfg.num_attention_heads, cfg.head_dim
    merged = joined(w, *_QKV).to(x.dtype)
    proj = n @ merged.T
    kv = cfg.num_key_value_heads * dim
    qg = proj[:, : 2 * heads * dim].view(rows, heads, 2 * dim)
    k = proj[:, 2 * heads * dim :][:, :kv].view(rows, -1, dim)
    v = proj[:, 2 * heads * dim + kv :].view(rows, -1, dim)
    q = rope(zrms(qg[..., :dim], w[p + "q_norm.weight"], cfg.rms_norm_eps), cos, sin)
    k = rope(zrms(k, w[p + "k_norm.weight"], cfg.rms_norm_eps), cos, sin)
    return q, k, v, qg[..., dim:].reshape(rows, heads * dim)


def attention_output(
    x: Tensor, o: Tensor, gate: Tensor, w: Weights, cfg: Config, record: Record = None
) -> Tensor:
    """Sigmoid gate, output projection and MLP: o, gate ``[N, Hq * D]``."""
    y = (o.float() * gate.float().sigmoid()).to(x.dtype)
    note(record, y, "self_attn.o_proj")
    return mlp(x + y @ w["self_attn.o_proj.weight"].to(x.dtype).T, w, cfg, record)


def layer_of(weights: Weights, prefix: str) -> Weights:
    """The tensors under a prefix, with the prefix taken off."""
    return {name[len(prefix) :]: t for name, t in weights.items() if name.startswith(prefix)}


class Target:
    """Full-sequence forward of the target, for training and prefill.

    ``compiled`` compiles the parts between sequence operations; on a GPU the delta rule runs through
    the Triton kernels of flash-linear-attention, elsewhere through `delta.chunked`.
    """

    def __init__(self, cfg: Config, compiled: bool = False) -> None:
        self.cfg = cfg
        wrap = torch.compile if compiled else (lambda f, **_: f)
        self.gdn_inputs = wrap(gdn_inputs, dynamic=False)
        self.gdn_output = wrap(gdn_output, dynamic=False)
        self.attention_inputs = wrap(attention_inputs, dynamic=False)
        self.attention_output = wrap(attention_output, dynamic=False)

    def attention_layer(
        self, x: Tensor, w: Weights, cos: Tensor, sin: Tensor, batch: int, record: Record = None
    ) -> Tensor:
        """One full-attention decoder layer over ``x [batch * T, hidden]``, causal in each row."""
        q, k, v, gate = self.attention_inputs(x, cos, sin, w, self.cfg, record)
        q, k, v = (t.unflatten(0, (batch, -1)).transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        o = o.transpose(1, 2).reshape(x.shape[0], -1)
        return self.attention_output(x, o, gate, w, self.cfg, record)

    def gdn_layer(
        self, x: Tensor, w: Weights, pos: Tensor, batch: int, record: Record = None
    ) -> Tensor:
        """One Gated DeltaNet decoder layer over ``x [batch * T, hidden]`` from an empty state."""
        q, k, v, z, g, beta, _ = self.gdn_inputs(x, (), w, self.cfg, pos, record)
        q, k, v, g, beta = (t.unflatten(0, (batch, -1)) for t in (q, k, v, g, beta))
        o = delta.gated_delta(q, k, v, g, beta, self.cfg.linear_key_head_dim**-0.5)
        return self.gdn_output(x, o.reshape(x.shape[0], *o.shape[2:]), z, w, self.cfg, record)

    def forward(
        self,
        weights: Weights,
        ids: Tensor,
        dtype: torch.dtype = torch.bfloat16,
        taps: tuple[int, ...] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """``ids [B, T]`` to post-final-norm hidden ``[B, T, hidden]`` and the tapped residuals.

        A tap is the residual stream after a decoder layer, before any norm.
        """
        batch, length = ids.shape
        pos = torch.arange(length, device=ids.device).repeat(batch)
        cos, sin = rope_table(length, self.cfg.rotary_dim, self.cfg.rope_theta, ids.device)
        cos, sin = cos.repeat(batch, 1), sin.repeat(batch, 1)
        x = F.embedding(ids.reshape(-1), weights["model.embed_tokens.weight"]).to(dtype)
        tapped: list[Tensor] = []
        for i in range(self.cfg.num_hidden_layers):
            w = layer_of(weights, f"model.layers.{i}.")
            full = self.cfg.is_full(i)
            x = (
                self.attention_layer(x, w, cos, sin, batch)
                if full
                else self.gdn_layer(x, w, pos, batch)
            )
            if i in taps:
                tapped.append(x.view(batch, length, -1))
        x = zrms(x, weights["model.norm.weight"], self.cfg.rms_norm_eps)
        return x.view(batch, length, -1), tapped


def load_config(path: str) -> Config:
    """`Config` from a ``config.json``."""
    with open(path, encoding="utf-8") as handle:
        return Config.from_hf(json.load(handle))
