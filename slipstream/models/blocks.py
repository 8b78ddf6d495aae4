"""The layers that families share, in terms of kernels.

T token rows, h hidden size. Every layer is built from a checkpoint by tensor name and reads its
memory through a CacheView; none knows what a sequence is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream import kernels
from slipstream.kernels.types import Batch, Dense
from slipstream.models.stores import Paged, Store
from slipstream.weights import linear
from slipstream.weights.linear import Linear
from slipstream.weights.reader import Checkpoint, CheckpointError

if TYPE_CHECKING:
    from slipstream.models.view import CacheView


@dataclass(frozen=True, slots=True)
class Loader:
    """Reads one model's tensors in the formats it computes with."""

    checkpoint: Checkpoint
    dtype: torch.dtype  # of weights and activations
    device: torch.device
    sizes: list[int] = field(default_factory=list)  # bytes of everything read

    @property
    def wide(self) -> torch.dtype:
        """The format of norms, gates and rotations: float32, or float64 for a float64 model."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def linear(self, names: list[str], out: int, into: int) -> Linear:
        """Modules stacked along their outputs, [out, into] in all."""
        made = linear.load(self.checkpoint, names, (out, into), self.dtype, self.device)
        self.sizes.append(made.nbytes)
        return made

    def vector(self, name: str, shape: tuple[int, ...], add: float = 0.0) -> Tensor:
        """A small tensor in the wide format, `add` added to each number."""
        self.checkpoint.expect(name, shape)
        made = self.checkpoint.tensor(name).to(self.device, self.wide) + add
        self.sizes.append(made.nbytes)
        return made

    def table(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor that rows are gathered from, or that multiplies them, as it is."""
        self.checkpoint.expect(name, shape)
        made = self.checkpoint.tensor(name).to(self.device, self.dtype)
        self.sizes.append(made.nbytes)
        return made

    def need(self, key: str) -> int:
        """A count of config.json, 1 or more.

        Raises:
            CheckpointError: it is missing or no such number.
        """
        value = self.checkpoint.config.get(key)
        most = 10_000 if key == "num_hidden_layers" else 2**31
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self._wrong(key, value, f"a whole number from 1 to {most}")
        return value

    def count(self, key: str, default: int) -> int:
        """A count that config.json may leave out."""
        return default if self.checkpoint.config.get(key) is None else self.need(key)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.checkpoint.config.get(key, default)
        return positive(value, key, self.checkpoint)

    def flag(self, key: str, default: bool) -> bool:
        """A yes or no that config.json may leave out."""
        value = self.checkpoint.config.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def only(self, key: str, value: object) -> None:
        """A setting that this version computes in one way only.

        Raises:
            CheckpointError: config.json asks for another.
        """
        asked = self.checkpoint.config.get(key)
        if asked is not None and asked != value:
            raise CheckpointError(
                f"config.json of {self.checkpoint.path} has {key} = {asked!r}, which this version"
                f" does not compute: only {value!r} works"
            )

    def _wrong(self, key: str, value: object, wanted: str) -> CheckpointError:
        return CheckpointError(
            f"config.json of {self.checkpoint.path} has {key} = {value!r} where {wanted} is"
            " needed: take the config that came with these weights"
        )


def positive(value: object, key: str, checkpoint: Checkpoint) -> float:
    """A number of config.json that must be finite and above 0.

    Raises:
        CheckpointError: it is not.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < float(value) < math.inf:  # type: ignore[arg-type]
        raise CheckpointError(
            f"config.json of {checkpoint.path} has {key} = {value!r} where a number above 0 is"
            " needed: take the config that came with these weights"
        )
    return float(value)  # type: ignore[arg-type]


class Outline(Loader):
    """Counts what would be read, and reads nothing."""

    def linear(self, names: list[str], out: int, into: int) -> Linear:
        made = Linear(Dense(torch.empty(out, into, dtype=self.dtype, device="meta")))
        self.sizes.append(made.nbytes)
        return made

    def table(self, name: str, shape: tuple[int, ...]) -> Tensor:
        made = torch.empty(shape, dtype=self.dtype, device="meta")
        self.sizes.append(made.nbytes)
        return made

    def vector(self, name: str, shape: tuple[int, ...], add: float = 0.0) -> Tensor:
        made = torch.empty(shape, dtype=self.wide, device="meta")
        self.sizes.append(made.nbytes)
        return made


def rope_frequencies(load: Loader, head_dim: int, share: float = 1.0) -> Tensor:
    """Inverse frequencies [rotated/2] by the config's rope settings.

    Types: default (Su et al. 2021), linear, and llama3 (long wavelengths divided by `factor`,
    short ones kept, a linear blend between). Angles of text are the same under mrope.

    Args:
        share: of the head that rotates, if the config does not say.

    Raises:
        CheckpointError: another type, or a value that is missing or impossible.
    """
    config = load.checkpoint.config
    rope: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        part = config.get(key)
        if part is not None and not isinstance(part, dict):
            raise CheckpointError(
                f"config.json of {load.checkpoint.path} has {key} = {part!r} where an object is"
                " needed: take the config that came with these weights"
            )
        rope |= part or {}

    def value(key: str, default: object = None) -> float:
        return positive(rope.get(key, config.get(key, default)), key, load.checkpoint)

    kind = rope.get("rope_type", rope.get("type", "default"))
    rotated = int(head_dim * value("partial_rotary_factor", share))
    if not 2 <= rotated <= head_dim:
        raise CheckpointError(
            f"config.json of {load.checkpoint.path} rotates {rotated} of {head_dim} dimensions:"
            " partial_rotary_factor must lie between 0 and 1"
        )
    exponent = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
    inverse = 1.0 / value("rope_theta", 10000.0) ** exponent
    if kind == "linear":
        inverse = inverse / value("factor")
    elif kind == "llama3":
        factor, low, high = (value(k) for k in ("factor", "low_freq_factor", "high_freq_factor"))
        if low >= high:
            raise CheckpointError(
                f"config.json of {load.checkpoint.path} has low_freq_factor {low} and"
                f" high_freq_factor {high}: the first must be below the second"
            )
        turns = value("original_max_position_embeddings") * inverse / (2 * math.pi)
        blend = ((turns - low) / (high - low)).clamp(0, 1)
        inverse = inverse * blend + inverse / factor * (1 - blend)
    elif kind not in ("default", "mrope"):
        raise CheckpointError(
            f"config.json asks for rope type {kind!r}, which this version does not compute"
            " (it has default, linear and llama3): remove it to run within the original context"
        )
    return inverse.to(load.wide).to(load.device)


Rotation = tuple[Tensor, Tensor]  # `kernels.angles` of a step


class Mlp:
    """down(silu(gate x) * up x)."""

    def __init__(self, load: Loader, prefix: str, hidden: int, inner: int) -> None:
        load.only("hidden_act", "silu")
        load.only("mlp_bias", False)
        self.gate_up = load.linear([f"{prefix}.gate_proj", f"{prefix}.up_proj"], 2 * inner, hidden)
        self.down = load.linear([f"{prefix}.down_proj"], hidden, inner)

    def __call__(self, x: Tensor, split: int) -> Tensor:
        return self.down(kernels.silu_mul(self.gate_up(x, split)), split)


class Attention:
    """Causal grouped-query attention with rotary positions.

    `gated`: q_proj rows hold, head by head, the query and then a gate; sigmoid(gate) multiplies
    the head's output. `normed`: queries and keys pass an RMSNorm over the head size, whose
    stored weights are weight - 1.
    """

    def __init__(
        self,
        load: Loader,
        prefix: str,
        *,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        gated: bool = False,
        normed: bool = False,
    ) -> None:
        load.only("attention_bias", False)
        if heads % kv_heads:
            raise CheckpointError(
                f"config.json has {heads} attention heads over {kv_heads} key-value heads:"
                " the first must be a multiple of the second"
            )
        self.heads, self.kv_heads, self.dim, self.eps = heads, kv_heads, head_dim, eps
        self.scale = head_dim**-0.5
        self.gated = gated
        self.store: Store = Paged(kv_heads, head_dim)
        self.q_width = heads * head_dim * (2 if gated else 1)
        self.kv_width = kv_heads * head_dim
        self.qkv = load.linear(
            [f"{prefix}.{p}_proj" for p in "qkv"], self.q_width + 2 * self.kv_width, hidden
        )
        self.out = load.linear([f"{prefix}.o_proj"], hidden, heads * head_dim)
        self.q_norm = load.vector(f"{prefix}.q_norm.weight", (head_dim,), 1.0) if normed else None
        self.k_norm = load.vector(f"{prefix}.k_norm.weight", (head_dim,), 1.0) if normed else None

    def __call__(
        self, x: Tensor, turn: Rotation, batch: Batch, cache: CacheView, layer: int
    ) -> Tensor:
        q, k, v, gate = self.project(x, turn, batch.split)
        kv = cache.paged(layer)
        kernels.store_kv(k, v, kv, batch.places)
        return self.close(kernels.attend(q, kv, cache.table, batch, self.scale), gate, batch.split)

    def project(
        self, x: Tensor, turn: Rotation, split: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values of rows x, turned to their positions, and the output's gate."""
        q, k, v = self.qkv(x, split).split([self.q_width, self.kv_width, self.kv_width], dim=-1)
        gate = None
        q = q.unflatten(-1, (self.heads, -1))
        if self.gated:
            q, gate = q.chunk(2, dim=-1)
        k, v = (part.unflatten(-1, (self.kv_heads, self.dim)) for part in (k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q = kernels.norm(q, self.q_norm, self.eps)
            k = kernels.norm(k, self.k_norm, self.eps)
        return kernels.rope(q, *turn), kernels.rope(k, *turn), v, gate

    def close(self, y: Tensor, gate: Tensor | None, split: int) -> Tensor:
        """What the heads read, y [T, heads, D], back to the hidden size."""
        if gate is not None:
            y = y * gate.sigmoid()
        return self.out(y.flatten(1), split)
