"""DFlash and DFlash2: a block of drafts from one pass over masked positions.

The drafter reads the target's residual stream at a few layers. Of every committed position it
keeps keys and values, computed from those taps alone; a block of one known token and masks
attends to them and, in both directions, to itself. Embedding and head are the target's.

DFlash2 adds two things: convolutions over the rows of a block whose kernels depend on the row,
and a selector that walks the block, scoring each position's best candidates after the draft
before it. In the first version every masked row is drawn by itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream import kernels
from slipstream.draft.table import Choose, asked, committed, newest, put_lists
from slipstream.kernels.reference import wide
from slipstream.kernels.types import PAGE, Batch, Draft, Hidden, PagedKV, Ring, Verdict
from slipstream.models.blocks import Loader, Mlp, Rotation, rope_frequencies
from slipstream.models.decoder import Decoder
from slipstream.models.stores import Field, Paged, PerSlot, Store
from slipstream.models.view import CacheView
from slipstream.weights.linear import Linear
from slipstream.weights.reader import CheckpointError

ARCHITECTURES = ("DFlash2DraftModel", "DFlashDraftModel")


class Conv:
    """Two-tap convolution over the rows of a block, before and after a sublayer.

    Row r of side s is ``sum_t (base[s, t] + kappa_r[s, t, group]) * n[r - t]``; the coefficients
    kappa of a row come from the row itself, and nothing comes before the first row.
    """

    def __init__(self, load: Loader, prefix: str, hidden: int, taps: int, group: int) -> None:
        self.taps, self.groups, self.group = taps, hidden // group, group
        self.base = load.table(f"{prefix}.base_kernel", (2, taps, hidden))
        self.kappa = load.linear([f"{prefix}.kernel_projection"], 2 * taps * self.groups, hidden)

    def kernels(self, n: Tensor) -> Tensor:
        """[M, h] -> [M, 2, taps, h]: both sides' kernels of each row."""
        made = self.kappa(n, n.shape[0]).unflatten(-1, (2, self.taps, self.groups))
        both: Tensor = wide(made).repeat_interleave(self.group, -1) + wide(self.base)
        return both

    def __call__(self, x: Tensor, kernel: Tensor, rows: int) -> Tensor:
        """One side: x [N * rows, h] with its kernels [N * rows, taps, h]."""
        blocks = wide(x).unflatten(0, (-1, rows))
        kernel = kernel.unflatten(0, (-1, rows))
        y = kernel[:, :, 0] * blocks
        for tap in range(1, self.taps):
            y[:, tap:] += kernel[:, tap:, tap] * blocks[:, : rows - tap]
        flat: Tensor = y.flatten(0, 1)
        return flat.to(x.dtype)


class Layer(NamedTuple):
    """One layer of the drafter."""

    before: Tensor
    q: Linear
    kv: Linear
    out: Linear
    q_norm: Tensor
    k_norm: Tensor
    after: Tensor
    mlp: Mlp
    attention_conv: Conv | None
    mlp_conv: Conv | None
    window: int  # 0: sees everything
    causal: bool


class Selector(NamedTuple):
    """Scores of a candidate after its predecessor: sum_r A[p, r] m[r] B[c, r]."""

    predecessor: Tensor  # A [V, rank]
    successor: Tensor  # B [V, rank]
    hidden: Linear  # m = hidden(H)


class Dflash:
    """The drafter.

    Args:
        load: of the drafter's own checkpoint.
        model: the target it was made for.
        choose: draws a draft from a list.
        k: most drafts.
        vocab: real token ids.
        list_size: entries of a list where the config names none.

    Raises:
        CheckpointError: it was not made for this target, or a tensor or setting does not fit.
    """

    names: tuple[str, ...] = ("dflash",)
    reach = 0

    def __init__(
        self,
        load: Loader,
        model: Decoder,
        choose: Choose,
        k: int,
        vocab: int,
        list_size: int = 16,
    ) -> None:
        self._load = load
        self._head, self._choose, self._vocab = model.head, choose, vocab
        hidden, layers = model.hidden_size, len(model.layers)
        self.taps = self._taps(layers)
        self._fits(model)
        self.block = self._count("block_size", 8)
        self.mask = self._id("mask_token_id", model.vocab)
        self.max_len = min(k, self.block - 1)
        self._eps = load.number("rms_norm_eps")
        self._scale_in = self._number("input_embedding_scale", 1.0)
        self._scale_out = self._number("output_multiplier", 1.0)
        self._cap = self._number("final_logit_softcapping", 0.0)
        self.heads, self.kv_heads = (
            load.need("num_attention_heads"),
            load.need("num_key_value_heads"),
        )
        self.dim = load.count("head_dim", hidden // self.heads)
        self._inv_freq = rope_frequencies(load, self.dim)
        second = self._setting("selector_rank", None) is not None
        self.fc = load.linear(["fc"], hidden, hidden * len(self.taps))
        self._hidden_norm, self._norm = (
            load.vector(f"{name}.weight", (hidden,)) for name in ("hidden_norm", "norm")
        )
        self.layers = [
            self._layer(n, hidden, second) for n in range(load.need("num_hidden_layers"))
        ]
        self.selector = self._selector(hidden, model.vocab) if second else None
        self.width = min(self._count("selector_top_k", list_size), vocab)
        self.stores: tuple[Store, ...] = tuple(self._store(layer) for layer in self.layers)

    # -- loading ----------------------------------------------------------------------------

    def _setting(self, key: str, default: Any) -> Any:
        """A setting under ``dflash_config`` or at the top."""
        config = self._load.checkpoint.config
        part = config.get("dflash_config")
        part = part if isinstance(part, dict) else {}
        value = part.get(key, config.get(key))
        return default if value is None else value

    def _wrong(self, key: str, value: object, wanted: str) -> CheckpointError:
        return CheckpointError(
            f"the drafter {self._load.checkpoint.path} has {key} = {value!r} where {wanted} is"
            " needed: take the drafter that was made for this model"
        )

    def _count(self, key: str, default: int) -> int:
        value = self._setting(key, default)
        if type(value) is not int or not 1 <= value <= 1 << 20:
            raise self._wrong(key, value, "a whole number above 0")
        return value

    def _id(self, key: str, vocab: int) -> int:
        value = self._setting(key, None)
        if type(value) is not int or not 0 <= value < vocab:
            raise self._wrong(key, value, f"a token id below {vocab}")
        return value

    def _number(self, key: str, default: float) -> float:
        value = self._setting(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
            raise self._wrong(key, value, "a number from 0")
        return float(value)

    def _taps(self, layers: int) -> tuple[int, ...]:
        """The tapped layers; evenly spread where the config names none."""
        ids = self._setting("target_layer_ids", None)
        if ids is None:
            count = self._load.need("num_hidden_layers")
            if count == 1:
                return (layers // 2,)
            return tuple(round(1 + i * (layers - 4) / (count - 1)) for i in range(count))
        good = isinstance(ids, list) and ids and all(type(i) is int for i in ids)
        if not good or not all(0 <= i < layers for i in ids) or len(set(ids)) < len(ids):
            raise self._wrong("target_layer_ids", ids, f"a list of distinct layers below {layers}")
        return tuple(ids)

    def _fits(self, model: Decoder) -> None:
        load = self._load
        for key, mine, theirs in (
            ("hidden_size", load.need("hidden_size"), model.hidden_size),
            ("vocab_size", load.need("vocab_size"), model.vocab),
            (
                "num_target_layers",
                self._setting("num_target_layers", len(model.layers)),
                len(model.layers),
            ),
        ):
            if mine != theirs:
                raise self._wrong(key, mine, f"the target's {theirs}")

    def _layer(self, n: int, hidden: int, second: bool) -> Layer:
        load, p = self._load, f"layers.{n}"
        load.only("attention_bias", False)
        inner = load.need("intermediate_size")
        kinds = load.checkpoint.config.get("layer_types")
        kind = kinds[n] if isinstance(kinds, list) and n < len(kinds) else "full_attention"
        sliding = kind == "sliding_attention"
        if kind not in ("sliding_attention", "full_attention"):
            raise self._wrong("layer_types", kind, "sliding_attention or full_attention")
        causal = self._setting("is_causal", self._setting("causal", sliding))
        if not isinstance(causal, bool):
            raise self._wrong("is_causal", causal, "true or false")
        q, kv = self.heads * self.dim, self.kv_heads * self.dim
        convs: tuple[Conv | None, Conv | None] = None, None
        if second:
            taps, group = self._count("conv_kernel_size", 2), self._count("conv_group_size", 16)
            if hidden % group:
                raise self._wrong("conv_group_size", group, f"a divisor of {hidden}")
            convs = (
                Conv(load, f"{p}.attention_conv", hidden, taps, group),
                Conv(load, f"{p}.mlp_conv", hidden, taps, group),
            )
        return Layer(
            before=load.vector(f"{p}.input_layernorm.weight", (hidden,)),
            q=load.linear([f"{p}.self_attn.q_proj"], q, hidden),
            kv=load.linear([f"{p}.self_attn.k_proj", f"{p}.self_attn.v_proj"], 2 * kv, hidden),
            out=load.linear([f"{p}.self_attn.o_proj"], hidden, q),
            q_norm=load.vector(f"{p}.self_attn.q_norm.weight", (self.dim,)),
            k_norm=load.vector(f"{p}.self_attn.k_norm.weight", (self.dim,)),
            after=load.vector(f"{p}.post_attention_layernorm.weight", (hidden,)),
            mlp=Mlp(load, f"{p}.mlp", hidden, inner),
            attention_conv=convs[0],
            mlp_conv=convs[1],
            window=load.need("sliding_window") if sliding else 0,
            causal=causal,
        )

    def _selector(self, hidden: int, vocab: int) -> Selector:
        load, p, rank = self._load, "candidate_selector", self._count("selector_rank", 256)
        return Selector(
            load.table(f"{p}.predecessor_codebook", (vocab, rank)),
            load.table(f"{p}.successor_codebook", (vocab, rank)),
            load.linear([f"{p}.hidden_projection"], rank, hidden),
        )

    def _store(self, layer: Layer) -> Store:
        if not layer.window:
            return Paged(self.kv_heads, self.dim)
        shape, history = (self.kv_heads, self.dim), layer.window - 1
        return PerSlot(
            (
                Field("k", shape, ring=True, history=history),
                Field("v", shape, ring=True, history=history),
            )
        )

    # -- drafting ---------------------------------------------------------------------------

    def bind(self, cache: CacheView, first: int) -> None:
        """One layer of the cache for each of its own."""
        self._table = cache.table
        self._past: list[Ring | PagedKV] = [
            Ring(**cache.fields(first + n)) if layer.window else cache.paged(first + n)
            for n, layer in enumerate(self.layers)
        ]

    def reset(self, slot: int, scope: str = "", share: bool = True) -> None:
        """Everything of a slot is in the cache."""

    def observe(self, batch: Batch, hidden: Hidden, verdict: Verdict) -> None:
        """Keep keys and values of the step's rows, made from the taps.

        Rows of drafts that fell lie behind the committed ones and are overwritten later.
        """
        assert hidden.taps is not None
        c = kernels.norm(self.fc(hidden.taps, batch.split), self._hidden_norm, self._eps)
        turn = kernels.angles(batch.positions, self._inv_freq)
        for layer, past in zip(self.layers, self._past, strict=True):
            k, v = self._keys(layer, c, turn, batch.split)
            if isinstance(past, PagedKV):
                kernels.store_kv(k, v, past, batch.places)
                continue
            rows, where = newest(batch, past.k.shape[1])
            slots = batch.row_slots[rows]
            past.k[slots, where] = k[rows].to(past.k.dtype)
            past.v[slots, where] = v[rows].to(past.v.dtype)

    def propose(self, batch: Batch, verdict: Verdict, out: Draft) -> None:
        """Draft a block behind the token each span decided."""
        out.count[batch.slots] = 0
        wanted = asked(batch, 0, self.max_len)
        if not wanted.spans:
            return
        slots, end, token = committed(batch, verdict, wanted)
        count = int(wanted.counts.max())
        final = self.forward(slots, end, token)[:, 1 : count + 1]  # [N, count, h]
        logits = self._logits(final.flatten(0, 1)).unflatten(0, (-1, count))
        listed, ids = logits.topk(self.width, -1)
        best = (listed[..., 0] - logits.logsumexp(-1)).exp()
        for j in range(count):
            scores = listed[:, j]
            if self.selector:
                scores = self._follow(token, final[:, j], ids[:, j], scores)
                best[:, j] = scores.softmax(1).amax(1)
            token, prob = self._choose(ids[:, j], scores, slots, end + 1 + j, end + 1)
            put_lists(out, slots, j, token, ids[:, j], prob, best[:, j])
        room = self._table.shape[1] * PAGE - end - 1
        out.count[slots] = torch.minimum(wanted.counts.to(room.device), room).clamp(min=0)

    def forward(self, slots: Tensor, end: Tensor, token: Tensor) -> Tensor:
        """Final hidden [N, block, h] of blocks that begin with `token` [N] at position `end` [N]."""
        rows = self.block
        ids = token.new_full((len(slots), rows), self.mask)
        ids[:, 0] = token
        x = self._head.embed(ids.flatten()) * self._scale_in
        positions = end[:, None] + torch.arange(rows, device=end.device)
        turn = kernels.angles(positions.flatten(), self._inv_freq)
        for layer, past in zip(self.layers, self._past, strict=True):
            x = self._through(layer, past, x, turn, slots, end)
        blocks: Tensor = kernels.norm(x, self._norm, self._eps).unflatten(0, (-1, rows))
        return blocks

    def _through(
        self,
        layer: Layer,
        past: Ring | PagedKV,
        x: Tensor,
        turn: Rotation,
        slots: Tensor,
        end: Tensor,
    ) -> Tensor:
        total, rows = x.shape[0], self.block
        n = kernels.norm(x, layer.before, self._eps)
        conv = layer.attention_conv
        kernel = conv.kernels(n) if conv else None
        if conv and kernel is not None:
            n = conv(n, kernel[:, 0], rows)
        q = layer.q(n, total).unflatten(-1, (self.heads, self.dim))
        q = kernels.rope(kernels.norm(q, layer.q_norm, self._eps), *turn)
        k, v = self._keys(layer, n, turn, total)
        q, k, v = (part.unflatten(0, (-1, rows)) for part in (q, k, v))
        y = kernels.attend_block(
            q, k, v, past, self._table, slots, end, layer.window, layer.causal, self.dim**-0.5
        )
        y = layer.out(y.flatten(0, 1).flatten(1), total)
        if conv and kernel is not None:
            y = conv(y, kernel[:, 1], rows)
        x = x + y
        n = kernels.norm(x, layer.after, self._eps)
        conv = layer.mlp_conv
        kernel = conv.kernels(n) if conv else None
        if conv and kernel is not None:
            n = conv(n, kernel[:, 0], rows)
        y = layer.mlp(n, total)
        if conv and kernel is not None:
            y = conv(y, kernel[:, 1], rows)
        return x + y

    def _keys(self, layer: Layer, x: Tensor, turn: Rotation, split: int) -> tuple[Tensor, Tensor]:
        k, v = layer.kv(x, split).chunk(2, dim=-1)
        k, v = (part.unflatten(-1, (self.kv_heads, self.dim)) for part in (k, v))
        return kernels.rope(kernels.norm(k, layer.k_norm, self._eps), *turn), v

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._head.logits(hidden)[:, : self._vocab] * self._scale_out
        if self._cap:
            logits = torch.tanh(logits / self._cap) * self._cap
        return logits

    def _follow(self, before: Tensor, hidden: Tensor, ids: Tensor, unary: Tensor) -> Tensor:
        """Scores [N, s] of candidates after the token `before` [N]."""
        assert self.selector is not None
        m = wide(self.selector.hidden(hidden, hidden.shape[0]))
        left = wide(F.embedding(before, self.selector.predecessor)) * m
        right = wide(F.embedding(ids, self.selector.successor))
        score: Tensor = unary + (right @ left[..., None])[..., 0].to(unary.dtype)
        return score
