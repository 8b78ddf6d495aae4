"""Tiny random checkpoints on disk, and engines on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from slipstream.config import Config, override
from slipstream.engine import memory
from slipstream.engine.batch import Inputs
from slipstream.engine.build import assemble
from slipstream.engine.engine import Engine
from slipstream.engine.params import ParamTable
from slipstream.engine.protocols import Drafter, Model
from slipstream.weights.reader import open_directory

QWEN: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "hidden_act": "silu",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "attn_output_gate": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": False,
    "mtp_num_hidden_layers": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint of this config."""
    h, v, inner = config["hidden_size"], config["vocab_size"], config["intermediate_size"]
    heads, kv, d = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    qwen = config["model_type"] != "llama"
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (v, h),
        "model.norm.weight": (h,),
    }
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (v, h)

    def attention(p: str) -> None:
        found[f"{p}.q_proj.weight"] = (heads * d * (2 if qwen else 1), h)
        found[f"{p}.k_proj.weight"] = found[f"{p}.v_proj.weight"] = (kv * d, h)
        found[f"{p}.o_proj.weight"] = (h, heads * d)
        if qwen:
            found[f"{p}.q_norm.weight"] = found[f"{p}.k_norm.weight"] = (d,)

    def layer(p: str, kind: str) -> None:
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{p}.{norm}.weight"] = (h,)
        found[f"{p}.mlp.gate_proj.weight"] = found[f"{p}.mlp.up_proj.weight"] = (inner, h)
        found[f"{p}.mlp.down_proj.weight"] = (h, inner)
        if kind == "full_attention":
            attention(f"{p}.self_attn")
            return
        hk, hv = config["linear_num_key_heads"], config["linear_num_value_heads"]
        dk, dv = config["linear_key_head_dim"], config["linear_value_head_dim"]
        q = f"{p}.linear_attn"
        channels = 2 * hk * dk + hv * dv
        found[f"{q}.in_proj_qkv.weight"] = (channels, h)
        found[f"{q}.in_proj_z.weight"] = (hv * dv, h)
        found[f"{q}.in_proj_a.weight"] = found[f"{q}.in_proj_b.weight"] = (hv, h)
        found[f"{q}.conv1d.weight"] = (channels, 1, config["linear_conv_kernel_dim"])
        found[f"{q}.A_log"] = found[f"{q}.dt_bias"] = (hv,)
        found[f"{q}.norm.weight"] = (dv,)
        found[f"{q}.out_proj.weight"] = (h, hv * dv)

    kinds = config.get("layer_types", ["full_attention"] * config["num_hidden_layers"])
    for i, kind in enumerate(kinds):
        layer(f"model.layers.{i}", kind)
    if qwen and config.get("mtp_num_hidden_layers"):
        found["mtp.fc.weight"] = (h, 2 * h)
        for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            found[f"mtp.{norm}.weight"] = (h,)
        layer("mtp.layers.0", "full_attention")
    return found


def weights(
    config: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Random weights that give lively logits; default initialization gives trivial ones."""
    g = torch.Generator().manual_seed(seed)
    qwen = config["model_type"] != "llama"
    made = {}
    for name, shape in shapes(config).items():
        x = torch.randn(shape, generator=g)
        if len(shape) == 1:
            plain = not qwen or name.endswith("linear_attn.norm.weight")
            x = 0.2 * x + (1.0 if plain and "norm" in name else 0.0)
        elif "embed" not in name and "conv1d" not in name:
            x *= 1.5 / shape[1] ** 0.5
        elif "conv1d" in name:
            x *= 0.5
        made[name] = x.to(dtype)
    return made


def write(
    path: Path,
    config: dict[str, Any],
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Path:
    """A checkpoint directory."""
    path.mkdir(parents=True, exist_ok=True)
    config = {**config, "dtype": str(dtype).removeprefix("torch."), **changes}
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights(config, seed, dtype), path / "model.safetensors", {"format": "pt"})
    return path


def engine(
    model: Model,
    path: Path,
    *,
    drafter: Any = None,
    seqs: int = 4,
    tokens: int = 192,
    span: int = 16,
    context: int = 1024,
    pages: int = 0,
    dtype: str = "float64",
    snapshots: float = 1.0,
    **parts: Any,
) -> Engine:
    """An engine on a loaded model; `drafter(inputs, limits, params)` makes its drafter."""
    config = override(
        Config(),
        {
            "limits.seqs": seqs,
            "limits.tokens": tokens,
            "limits.span": span,
            "limits.context": context,
            "dtype": dtype,
            "device": "cpu",
            "cache.snapshots": snapshots,
        },
    )
    checkpoint = open_directory(path)
    drafter_stores: tuple[Any, ...] = ()
    sized = memory.sizes(config, checkpoint, model.stores + drafter_stores, 0, model.context)
    if pages:
        sized = memory.Sizes(
            sized.limits, pages, sized.dtype, sized.device, sized.snapshots, sized.plan
        )
    inputs = Inputs(sized.limits, sized.device)
    params = ParamTable(sized.limits.slots, sized.device)
    made: Drafter | None = drafter(inputs, sized.limits, params) if drafter else None
    parts = {"poison": True, "seed": 0, "params": params, **parts}
    return assemble(model, made, sized, inputs, **parts)
