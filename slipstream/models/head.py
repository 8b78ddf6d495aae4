"""The two ends of a model: embedding, head, and the taps that drafters read."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.models.blocks import Loader


class Head:
    """Embedding table and output head, one and the same where the config ties them."""

    def __init__(self, load: Loader) -> None:
        self.vocab: int = load.need("vocab_size")
        self.hidden_size: int = load.need("hidden_size")
        self.table = load.linear(["model.embed_tokens"], self.vocab, self.hidden_size)
        tied = load.flag("tie_word_embeddings", False)
        if tied:
            # Some exports store the tied head a second time.
            load.checkpoint.skip([n for n in load.checkpoint.names() if n.startswith("lm_head.")])
        self.out = self.table if tied else load.linear(["lm_head"], self.vocab, self.hidden_size)
        self.dtype = load.dtype

    def embed(self, ids: Tensor) -> Tensor:
        """[T] -> [T, h]."""
        return self.table.gather(ids).to(self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, h] -> [R, vocab] in float32, or float64. Always as short rows, whoever asks."""
        y = self.out(hidden, hidden.shape[0])
        return y if y.dtype == torch.float64 else y.float()


class Taps:
    """Collects the residual stream after chosen layers of one forward pass."""

    __slots__ = ("layers", "seen")

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self.seen: dict[int, Tensor] = {}

    def see(self, layer: int, x: Tensor) -> None:
        if layer in self.layers:
            self.seen[layer] = x

    def joined(self) -> Tensor | None:
        """[T, n*h] in the order asked for; None when nothing was."""
        if not self.layers:
            return None
        return torch.cat([self.seen[layer] for layer in self.layers], dim=-1)
