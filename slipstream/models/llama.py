"""The Llama architecture: SmolLM2 and others."""

from __future__ import annotations

from torch import Tensor

from slipstream import kernels
from slipstream.kernels.types import Batch, Hidden
from slipstream.models.blocks import Attention, Loader, Mlp, rope_frequencies
from slipstream.models.head import Head, Taps
from slipstream.models.stores import Paged, Store
from slipstream.models.view import CacheView
from slipstream.weights.reader import CheckpointError


class Llama:
    """Pre-norm decoder of attention and SwiGLU layers (Touvron et al. 2023)."""

    def __init__(self, load: Loader) -> None:
        config = load.checkpoint.config
        self.hidden_size = load.need("hidden_size")
        layers = load.need("num_hidden_layers")
        heads = load.need("num_attention_heads")
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or self.hidden_size // heads
        inner = load.need("intermediate_size")
        self.eps = load.need("rms_norm_eps", float)
        self.context = load.need("max_position_embeddings")
        if config.get("hidden_act", "silu") != "silu":
            raise CheckpointError(
                f"config.json has hidden_act {config['hidden_act']!r}; this family is computed"
                " with silu only"
            )
        self.inv_freq = rope_frequencies(config, head_dim, load.wide).to(load.device)
        self.head = Head(load)
        self.vocab = self.head.vocab
        self.norms, self.attention, self.mlp = [], [], []
        for i in range(layers):
            prefix = f"model.layers.{i}"
            self.norms.append(
                tuple(
                    load.vector(f"{prefix}.{name}.weight", (self.hidden_size,))
                    for name in ("input_layernorm", "post_attention_layernorm")
                )
            )
            self.attention.append(
                Attention(
                    load,
                    f"{prefix}.self_attn",
                    hidden=self.hidden_size,
                    heads=heads,
                    kv_heads=kv_heads,
                    head_dim=head_dim,
                    eps=self.eps,
                )
            )
            self.mlp.append(Mlp(load, f"{prefix}.mlp", self.hidden_size, inner))
        self.norm = load.vector("model.norm.weight", (self.hidden_size,))
        # Old exports keep the frequencies, which follow from the config.
        load.checkpoint.skip(
            [n for n in load.checkpoint.names() if n.endswith("rotary_emb.inv_freq")]
        )
        self.stores: tuple[Store, ...] = tuple(Paged(kv_heads, head_dim) for _ in range(layers))

    def forward(self, batch: Batch, cache: CacheView, taps: tuple[int, ...] = ()) -> Hidden:
        x = self.head.embed(batch.tokens)
        turn = kernels.angles(batch.positions, self.inv_freq)
        tapped = Taps(taps)
        for i, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            before, after = self.norms[i]
            x = x + attention(kernels.norm(x, before, self.eps), turn, batch, cache, i)
            x = x + mlp(kernels.norm(x, after, self.eps), batch.split)
            tapped.see(i, x)
        return Hidden(kernels.norm(x, self.norm, self.eps), tapped.joined())

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head.logits(hidden)
