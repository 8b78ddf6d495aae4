"""The pre-norm decoder that every family here is: only its mixers and its config differ."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from slipstream import kernels
from slipstream.kernels.types import Batch, Hidden
from slipstream.models.blocks import Mlp, Rotation
from slipstream.models.head import Head, Taps
from slipstream.models.stores import Store
from slipstream.models.view import CacheView


class Mixer(Protocol):
    """What moves information between positions: attention, or a gated delta rule."""

    store: Store

    def __call__(
        self, x: Tensor, turn: Rotation, batch: Batch, cache: CacheView, layer: int
    ) -> Tensor:
        """[T, h] -> [T, h]; memory is layer `layer` of the cache."""
        ...


class Layer(NamedTuple):
    """x += mixer(norm(x)); x += mlp(norm(x))."""

    before: Tensor  # [h]
    mixer: Mixer
    after: Tensor  # [h]
    mlp: Mlp


class Decoder:
    """A model: embedding, layers, final norm, head.

    Args:
        norm: weight of the final norm [h].
        inv_freq: inverse frequencies of the rotation [rotated/2].
        context: positions the checkpoint was made for.
    """

    def __init__(
        self,
        head: Head,
        layers: list[Layer],
        norm: Tensor,
        *,
        eps: float,
        inv_freq: Tensor,
        context: int,
    ) -> None:
        self.head, self.layers, self.norm = head, layers, norm
        self.eps, self.inv_freq, self.context = eps, inv_freq, context
        self.vocab, self.hidden_size = head.vocab, head.hidden_size
        self.stores: tuple[Store, ...] = tuple(layer.mixer.store for layer in layers)

    def forward(self, batch: Batch, cache: CacheView, taps: tuple[int, ...] = ()) -> Hidden:
        """All rows through all layers; `taps` are layers whose output the drafters want."""
        x = self.head.embed(batch.tokens)
        turn = kernels.angles(batch.positions, self.inv_freq)
        tapped = Taps(taps)
        for i, layer in enumerate(self.layers):
            x = x + layer.mixer(kernels.norm(x, layer.before, self.eps), turn, batch, cache, i)
            x = x + layer.mlp(kernels.norm(x, layer.after, self.eps), batch.split)
            tapped.see(i, x)
        return Hidden(kernels.norm(x, self.norm, self.eps), tapped.joined())

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, h] -> [R, vocab] in float32, or float64."""
        return self.head.logits(hidden)
