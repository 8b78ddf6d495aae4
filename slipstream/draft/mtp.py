"""Qwen's multi-token-prediction head: one decoder layer that guesses the token after the next.

Row t is made of the target's final hidden state of position t - 1 and of token t, and predicts
token t + 1. The layer's keys and values are one more paged layer under the target's page table,
row t in place t: so they depend on the text up to t alone, and a page of a shared prefix holds
them for whoever shares it. Position 0 has no hidden state before it and no row.

The first draft comes from target states alone; each further one is chained on the head's own
output (after its final norm) and the draft before. The keys that a chain leaves behind the
committed positions are overwritten when their positions are committed, with target states then.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from slipstream import kernels
from slipstream.draft.table import Choose, asked, committed, newest, put_lists
from slipstream.kernels.types import PAGE, Batch, Draft, Hidden, Verdict
from slipstream.models.blocks import Loader
from slipstream.models.decoder import Decoder
from slipstream.models.qwen35 import gated_attention, mlp_of
from slipstream.models.stores import Field, PerSlot, Store
from slipstream.models.view import CacheView
from slipstream.weights.linear import rows_of
from slipstream.weights.reader import Checkpoint, CheckpointError

VOCABULARY = "draft_vocab_ids.json"


class Mtp:
    """The drafter.

    Args:
        load: of the target's checkpoint, which holds the ``mtp.*`` tensors.
        model: the target, whose embedding, head and rotation it shares.
        choose: draws a draft from a list.
        k: most drafts.
        vocab: real token ids.
        list_size: entries of a draft's list.
        ids: the only ids it drafts, ascending; None: all. Fewer make its head cheaper.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """

    names: tuple[str, ...] = ("mtp",)
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        load: Loader,
        model: Decoder,
        choose: Choose,
        k: int,
        vocab: int,
        list_size: int = 16,
        ids: list[int] | None = None,
    ) -> None:
        h, prefix = model.hidden_size, "mtp.layers.0"
        self._head, self._inv_freq, self._eps = model.head, model.inv_freq, model.eps
        self._choose = choose
        self.max_len = self.reach = k
        self.fuse = load.linear(["mtp.fc"], h, 2 * h)
        self._embedding_norm, self._hidden_norm, self._norm, self._before, self._after = (
            load.vector(f"{name}.weight", (h,), 1.0)
            for name in (
                "mtp.pre_fc_norm_embedding",
                "mtp.pre_fc_norm_hidden",
                "mtp.norm",
                f"{prefix}.input_layernorm",
                f"{prefix}.post_attention_layernorm",
            )
        )
        self.mixer = gated_attention(load, f"{prefix}.self_attn")
        self.mlp = mlp_of(load, f"{prefix}.mlp")
        self._ids = self._out = None
        self._columns = vocab
        if ids is not None:
            self._ids = torch.tensor(ids, dtype=torch.int64, device=load.device)
            self._out = rows_of(model.head.out, self._ids)
            load.sizes.append(self._out.nbytes)
            self._columns = len(ids)
        self.width = min(list_size, self._columns)
        hidden = PerSlot((Field("hidden", (h,), ring=True, history=1),))
        self.stores: tuple[Store, ...] = (self.mixer.store, hidden)

    def bind(self, cache: CacheView, first: int) -> None:
        """Its keys are layer ``first``, its ring of hidden states the one behind."""
        self._table, self._kv = cache.table, cache.paged(first)
        self._ring = cache.fields(first + 1)["hidden"]

    def reset(self, slot: int, scope: str = "", share: bool = True) -> None:
        """Everything of a slot is in the cache."""

    def observe(self, batch: Batch, hidden: Hidden, verdict: Verdict) -> None:
        """Enter keys and values of all rows, made from the target's states.

        Rows of drafts that fell lie behind the committed ones and are overwritten later.
        """
        first = batch.starts[:-1]
        before = hidden.last.roll(1, 0)
        earlier = (batch.positions[first] - 1) % self._ring.shape[1]
        kept = self._ring[batch.slots, earlier]
        start = batch.positions[first, None] == 0
        before[first] = torch.where(start, 0.0, kept).to(before.dtype)
        x = self._fused(batch.tokens, before, batch.split)
        turn = kernels.angles(batch.positions, self._inv_freq)
        _, k, v, _ = self.mixer.project(kernels.norm(x, self._before, self._eps), turn, batch.split)
        kernels.store_kv(k, v, self._kv, batch.places)
        rows, where = newest(batch, self._ring.shape[1])
        self._ring[batch.row_slots[rows], where] = hidden.last[rows].to(self._ring.dtype)

    def propose(self, batch: Batch, verdict: Verdict, out: Draft) -> None:
        """Chain drafts behind the token each span decided."""
        out.count[batch.slots] = 0
        wanted = asked(batch, 0, self.max_len)
        depth = int(wanted.counts.max()) if wanted.spans else 0
        if not depth:
            return
        slots, end, token = committed(batch, verdict, wanted)
        hidden = self._ring[slots, (end - 1) % self._ring.shape[1]].to(self._head.dtype)
        for j in range(depth):
            hidden = self._row(token, hidden, slots, end + j)
            logits = self._logits(hidden)
            listed, ids = logits.topk(self.width, 1)
            best = (listed[:, 0] - logits.logsumexp(1)).exp()
            if self._ids is not None:
                ids = self._ids[ids]
            token, prob = self._choose(ids, listed, slots, end + j + 1, end + 1)
            put_lists(out, slots, j, token, ids, prob, best)
        room = self._table.shape[1] * PAGE - end
        out.count[slots] = torch.minimum(wanted.counts.to(room.device), room).clamp(min=0)

    def _fused(self, tokens: Tensor, hidden: Tensor, split: int) -> Tensor:
        embedding = kernels.norm(self._head.embed(tokens), self._embedding_norm, self._eps)
        state = kernels.norm(hidden, self._hidden_norm, self._eps)
        return self.fuse(torch.cat([embedding, state], -1), split)

    def _row(self, token: Tensor, hidden: Tensor, slots: Tensor, position: Tensor) -> Tensor:
        """One row of each slot through the layer and its final norm."""
        n, pages = len(slots), self._table.shape[1]
        x = self._fused(token, hidden, n)
        turn = kernels.angles(position, self._inv_freq)
        q, k, v, gate = self.mixer.project(kernels.norm(x, self._before, self._eps), turn, n)
        page = self._table[slots, (position // PAGE).clamp(max=pages - 1)]
        page = torch.where(position < pages * PAGE, page, 0)  # past the last page: into the trash
        kernels.store_kv(k, v, self._kv, page * PAGE + position % PAGE)
        seen = position.clamp(max=pages * PAGE - 1)
        y = kernels.attend_rows(q, self._kv, self._table, slots, seen, 1, self.mixer.scale)
        x = x + self.mixer.close(y, gate, n)
        x = x + self.mlp(kernels.norm(x, self._after, self._eps), n)
        return kernels.norm(x, self._norm, self._eps)

    def _logits(self, hidden: Tensor) -> Tensor:
        if self._out is None:
            return self._head.logits(hidden)[:, : self._columns]
        y = self._out(hidden, hidden.shape[0])
        return y if y.dtype == torch.float64 else y.float()


def draft_vocabulary(checkpoint: Checkpoint, vocab: int) -> list[int] | None:
    """The ids of a reduced draft vocabulary, where the checkpoint has one beside it.

    Raises:
        CheckpointError: the file is not a list of distinct token ids.
    """
    path = checkpoint.directory / VOCABULARY
    if not path.is_file():
        return None
    try:
        ids: Any = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON ({error}): make it again, or remove it") from None
    good = isinstance(ids, list) and len(ids) >= 2
    if not good or not all(type(i) is int and 0 <= i < vocab for i in ids):
        raise CheckpointError(
            f"{path} must be a list of two or more token ids below {vocab}: make it again, or"
            " remove it"
        )
    if len(set(ids)) < len(ids):
        raise CheckpointError(f"{path} names ids twice: make it again, or remove it")
    return sorted(ids)
