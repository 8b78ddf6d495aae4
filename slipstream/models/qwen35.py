"""Qwen3.5, 3.6 and 3.8 dense: three Gated-DeltaNet layers to one of gated attention.

Norms of this family store weight - 1, except the one inside the Gated-DeltaNet layer.
"""

from __future__ import annotations

from torch import Tensor

from slipstream import kernels
from slipstream.kernels.types import Batch
from slipstream.models.blocks import Attention, Loader, Mlp, Rotation, rope_frequencies
from slipstream.models.decoder import Decoder, Layer, Mixer
from slipstream.models.head import Head
from slipstream.models.stores import Store, gated_delta
from slipstream.models.view import CacheView
from slipstream.weights.reader import CheckpointError


class GatedDeltaNet:
    """Linear attention with a gated delta rule (Yang et al. 2024) behind a short convolution."""

    def __init__(self, load: Loader, prefix: str, hidden: int, eps: float) -> None:
        self.key_heads = load.need("linear_num_key_heads")
        self.heads = load.need("linear_num_value_heads")
        dk, self.dv = load.need("linear_key_head_dim"), load.need("linear_value_head_dim")
        taps = load.need("linear_conv_kernel_dim")
        if self.heads % self.key_heads:
            raise CheckpointError(
                f"config.json has {self.heads} linear value heads over {self.key_heads} key"
                " heads: the first must be a multiple of the second"
            )
        self.channels = 2 * self.key_heads * dk + self.heads * self.dv
        self.eps = eps
        values = self.heads * self.dv
        self.qkv_z = load.linear(
            [f"{prefix}.in_proj_qkv", f"{prefix}.in_proj_z"], self.channels + values, hidden
        )
        self.a_b = load.linear(
            [f"{prefix}.in_proj_a", f"{prefix}.in_proj_b"], 2 * self.heads, hidden
        )
        self.conv = load.vector(f"{prefix}.conv1d.weight", (self.channels, 1, taps))[:, 0]
        self.a_log = load.vector(f"{prefix}.A_log", (self.heads,))
        self.dt_bias = load.vector(f"{prefix}.dt_bias", (self.heads,))
        self.norm = load.vector(f"{prefix}.norm.weight", (self.dv,))
        self.out = load.linear([f"{prefix}.out_proj"], hidden, values)
        self.store: Store = gated_delta(
            self.heads, dk, self.dv, self.channels, taps, state=load.wide, gates=load.wide
        )

    def __call__(
        self, x: Tensor, turn: Rotation, batch: Batch, cache: CacheView, layer: int
    ) -> Tensor:
        u, z = self.qkv_z(x, batch.split).split([self.channels, self.heads * self.dv], dim=-1)
        a, b = self.a_b(x, batch.split).chunk(2, dim=-1)
        g, beta = kernels.gdn_gates(a, b, self.a_log, self.dt_bias)
        o = kernels.gdn(u, g, beta, self.conv, self.key_heads, cache.gdn(layer), batch)
        o = kernels.gated_norm(o, z.unflatten(-1, (self.heads, self.dv)), self.norm, self.eps)
        return self.out(o.to(x.dtype).flatten(1), batch.split)


def gated_attention(load: Loader, prefix: str) -> Attention:
    """The family's attention layer, from the tensors under ``prefix``."""
    return Attention(
        load,
        prefix,
        hidden=load.need("hidden_size"),
        heads=load.need("num_attention_heads"),
        kv_heads=load.need("num_key_value_heads"),
        head_dim=load.need("head_dim"),
        eps=load.number("rms_norm_eps"),
        gated=load.flag("attn_output_gate", True),
        normed=True,
    )


def mlp_of(load: Loader, prefix: str) -> Mlp:
    """The family's MLP, from the tensors under ``prefix``."""
    return Mlp(load, prefix, load.need("hidden_size"), load.need("intermediate_size"))


def qwen35(load: Loader) -> Decoder:
    """The text model of `qwen3_5` checkpoints."""
    checkpoint = load.checkpoint
    hidden, eps = load.need("hidden_size"), load.number("rms_norm_eps")
    head = Head(load)
    layers = []
    for i, kind in enumerate(_kinds(load)):
        prefix = f"model.layers.{i}"
        before, after = (
            load.vector(f"{prefix}.{name}.weight", (hidden,), 1.0)
            for name in ("input_layernorm", "post_attention_layernorm")
        )
        mixer: Mixer
        if kind == "full_attention":
            mixer = gated_attention(load, f"{prefix}.self_attn")
        else:
            mixer = GatedDeltaNet(load, f"{prefix}.linear_attn", hidden, eps)
        layers.append(Layer(before, mixer, after, mlp_of(load, f"{prefix}.mlp")))
    # The MTP head drafts; the text model does not read it.
    checkpoint.skip([n for n in checkpoint.names() if n.startswith("mtp.")])
    return Decoder(
        head,
        layers,
        load.vector("model.norm.weight", (hidden,), 1.0),
        eps=eps,
        inv_freq=rope_frequencies(load, load.need("head_dim"), share=0.25),
        context=load.need("max_position_embeddings"),
    )


def _kinds(load: Loader) -> list[str]:
    """Each layer's kind, listed or by the interval of full attention.

    Raises:
        CheckpointError: not one known kind for each layer.
    """
    layers = load.need("num_hidden_layers")
    kinds = load.checkpoint.config.get("layer_types")
    if kinds is None:
        every = load.need("full_attention_interval")
        return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    known = ("full_attention", "linear_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in known for k in kinds):
        raise CheckpointError(
            f"config.json of {load.checkpoint.path} has layer_types {kinds!r} for {layers} layers:"
            f" one of {' or '.join(known)} is needed for each"
        )
    return list(kinds)
