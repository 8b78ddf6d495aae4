"""The Llama architecture: SmolLM2 and others."""

from __future__ import annotations

from slipstream.models.blocks import Attention, Loader, Mlp, rope_frequencies
from slipstream.models.decoder import Decoder, Layer
from slipstream.models.head import Head


def llama(load: Loader) -> Decoder:
    """Attention and SwiGLU layers (Touvron et al. 2023)."""
    hidden, inner = load.need("hidden_size"), load.need("intermediate_size")
    heads = load.need("num_attention_heads")
    kv_heads = load.count("num_key_value_heads", heads)
    head_dim = load.count("head_dim", max(1, hidden // heads))
    eps = load.number("rms_norm_eps")
    # Cousins of the family that share its name for the type.
    for key in ("sliding_window", "attention_multiplier", "residual_multiplier"):
        load.only(key, None)
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
        inv_freq=rope_frequencies(load, head_dim),
        context=load.need("max_position_embeddings"),
    )
