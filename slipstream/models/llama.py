"""The Llama architecture: SmolLM2 and others."""

from __future__ import annotations

from slipstream.models.blocks import Attention, Loader, Mlp, rope_frequencies
from slipstream.models.decoder import Decoder, Layer
from slipstream.models.head import Head
from slipstream.weights.reader import CheckpointError


def llama(load: Loader) -> Decoder:
    """Attention and SwiGLU layers (Touvron et al. 2023)."""
    config = load.checkpoint.config
    hidden, inner = load.need("hidden_size"), load.need("intermediate_size")
    heads = load.need("num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    eps = load.need("rms_norm_eps", float)
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(
            f"config.json has hidden_act {config['hidden_act']!r}; this family is computed with"
            " silu only"
        )
    head = Head(load)
    layers = []
    for i in range(load.need("num_hidden_layers")):
        prefix = f"model.layers.{i}"
        attention = Attention(
            load,
            f"{prefix}.self_attn",
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            eps=eps,
        )
        layers.append(
            Layer(
                load.vector(f"{prefix}.input_layernorm.weight", (hidden,)),
                attention,
                load.vector(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
                Mlp(load, f"{prefix}.mlp", hidden, inner),
            )
        )
    # Old exports keep the frequencies, which follow from the config.
    names = load.checkpoint.names()
    load.checkpoint.skip([n for n in names if n.endswith("rotary_emb.inv_freq")])
    return Decoder(
        head,
        layers,
        load.vector("model.norm.weight", (hidden,)),
        eps=eps,
        inv_freq=rope_frequencies(config, head_dim, load.wide).to(load.device),
        context=load.need("max_position_embeddings"),
    )
