"""All memory of positions: pages, slots, what is committed, and what may be used again.

One object for the model and all drafters: it allocates every declared Store, once. Pages are
counted; a slot, the tree of prefixes, or both hold a page. Slot 0 and page 0 take the writes of
padding rows and are never read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.engine.batch import Limits, Sequence
from slipstream.engine.prefix import Hit, Lineage, Prefix, Snapshot
from slipstream.kernels.types import FOLD, PAGE, Batch, GdnState, PagedKV
from slipstream.models.stores import Field, Paged, PerSlot, Store


def ring_length(limits: Limits, store: PerSlot) -> int:
    """Rows of a store's rings: enough for the longest look back of any of them."""
    return limits.ring(max((f.history for f in store.fields if f.ring), default=0))


def page_bytes(stores: tuple[Store, ...], dtype: torch.dtype) -> int:
    """Bytes of one page over all layers."""
    return sum(2 * PAGE * s.heads * s.dim * dtype.itemsize for s in stores if isinstance(s, Paged))


def slot_bytes(stores: tuple[Store, ...], limits: Limits, dtype: torch.dtype) -> int:
    """Bytes of one slot's state and rings over all layers."""
    total = 0
    for store in (s for s in stores if isinstance(s, PerSlot)):
        for f in store.fields:
            rows = ring_length(limits, store) if f.ring else 1
            total += torch.Size(f.shape).numel() * rows * (f.dtype or dtype).itemsize
    return total


class Cache:
    """Pages, slots and prefixes.

    Args:
        stores: every layer's declaration, the model's first, then the drafters'.
        limits: sizes.
        pages: pages of the pool, page 0 included.
        dtype: format of keys, values and of fields that name none.
        prefix: budget in bytes for snapshots; None: nothing is reused.
        by_text: also reuse text that was computed another way (equal up to rounding).
        poison: fill memory with NaN when it changes hands, so that a read of what nobody
            computed shows. For tests.
    """

    def __init__(
        self,
        stores: tuple[Store, ...],
        limits: Limits,
        pages: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        prefix: int | None,
        by_text: bool = True,
        poison: bool = False,
    ) -> None:
        self.limits, self.poison, self.by_text = limits, poison, by_text
        self._paged: dict[int, PagedKV] = {}
        self._fields: dict[int, dict[str, Tensor]] = {}
        self._declared: list[tuple[Field, Tensor]] = []
        for layer, store in enumerate(stores):
            if isinstance(store, Paged):
                shape = (pages, PAGE, store.heads, store.dim)
                k, v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
                self._paged[layer] = PagedKV(k, v)
            else:
                self._fields[layer] = {}
                for f in store.fields:
                    ring = (ring_length(limits, store),) if f.ring else ()
                    tensor = torch.zeros(
                        (limits.slots, *ring, *f.shape), dtype=f.dtype or dtype, device=device
                    )
                    self._fields[layer][f.name] = tensor
                    self._declared.append((f, tensor))
        self.table = torch.zeros(limits.slots, limits.pages, dtype=torch.int64, device=device)
        self.computed = torch.zeros(limits.slots, dtype=torch.int64, device=device)
        self.folded = torch.zeros(limits.slots, dtype=torch.int64, device=device)
        # Host mirrors, so that planning never waits for the device.
        self.fold_of = [0] * limits.slots
        self.held: list[list[int]] = [[] for _ in range(limits.slots)]
        self._published = [0] * limits.slots  # pages of each slot that are the tree's
        self.refs = [0] * pages
        self.refs[0] = 1
        self.free = list(range(pages - 1, 0, -1))
        self.slots = list(range(limits.seqs, 0, -1))
        self.prefix = None if prefix is None else Prefix(bool(self._fields), prefix)
        self._in_tree = bytearray(pages)
        self.idle = 0  # pages that only the tree holds; nobody holds one behind them

    # -- what models and drafters see -------------------------------------------------------

    def paged(self, layer: int) -> PagedKV:
        return self._paged[layer]

    def gdn(self, layer: int) -> GdnState:
        return GdnState(**self._fields[layer])

    def fields(self, layer: int) -> dict[str, Tensor]:
        return self._fields[layer]

    def tensors(self) -> list[Tensor]:
        """Everything allocated; its addresses never change."""
        rings = [t for fields in self._fields.values() for t in fields.values()]
        pages = [t for kv in self._paged.values() for t in kv]
        return [*pages, *rings, self.table, self.computed, self.folded]

    def nbytes(self, kind: str) -> int:
        """Bytes of the "pages" or of the "slots"."""
        if kind == "pages":
            return sum(t.nbytes for kv in self._paged.values() for t in kv)
        return sum(t.nbytes for _, t in self._declared)

    @property
    def available(self) -> int:
        """Pages that a sequence could get."""
        return len(self.free) + self.idle

    # -- a sequence's life ------------------------------------------------------------------

    def admit(self, sequence: Sequence, spare: int = 0) -> Hit | None:
        """Give a sequence a slot and what can be reused of its beginning.

        None if there is no slot, or fewer pages than its tokens, one more position and `spare`
        pages need. Sets ``sequence.slot``.
        """
        if not self.slots:
            return None
        hit = self._find(sequence)
        # Held from here on, so that making room cannot take them.
        shared = [n.page for n in hit.node.path()] if hit.node else []
        source = [hit.tail.page] if hit.tail else []
        for page in shared + source:
            self._hold(page)
        need = -(-(len(sequence.tokens) + 1) // PAGE) - len(shared)
        if need + spare > self.available:
            for page in shared + source:
                self._let_go(page)
            return None
        slot = self.slots.pop()
        self.held[slot] = shared
        self._published[slot] = len(shared)
        self.table[slot, : len(shared)] = torch.tensor(shared, dtype=torch.int64)
        if not hit.exact:
            sequence.lineage.adopt(hit.node, hit.tail, hit.position)
            sequence.adopted = hit.position
        if hit.tail:
            grown = self.reserve(slot, hit.position)
            assert grown, "pages were counted as available"
            for kv in self._paged.values():
                for pages in kv:
                    pages[self.held[slot][-1]] = pages[hit.tail.page]
            self._let_go(hit.tail.page)
        folded = hit.position - hit.position % FOLD
        if hit.snapshot:
            folded = hit.snapshot.folded
            self._restore(slot, hit.snapshot)
        self._set(slot, hit.position, folded)
        sequence.slot = slot
        return hit

    def _find(self, sequence: Sequence) -> Hit:
        if self.prefix is None or sequence.params.prompt_logprobs is not None:
            return Hit()
        limit = len(sequence.tokens) - 1
        # What was preempted comes back as it was, or is computed again the same way.
        by_text = self.by_text and sequence.cached < 0
        hit = self.prefix.find(sequence.lineage, sequence.tokens, limit, by_text)
        if hit.position < sequence.adopted:
            # The text it went on from is gone: from here on it is computed afresh, by other keys.
            sequence.lineage = Lineage(sequence.request.scope, sequence.prompt)
            sequence.adopted = 0
            hit = self.prefix.find(sequence.lineage, sequence.tokens, limit, by_text=False)
        return hit

    def reserve(self, slot: int, upto: int) -> bool:
        """Pages for all positions below `upto`; False if there are none left to take."""
        held = self.held[slot]
        while len(held) * PAGE < upto:
            page = self._take()
            if page is None:
                return False
            self.table[slot, len(held)] = page
            held.append(page)
        return True

    def run(self, slot: int, upto: int) -> int:
        """First of the slot's pages below position `upto` if they are consecutive, or -1."""
        held = self.held[slot][: -(-upto // PAGE)]
        first = held[0]
        return first if held == list(range(first, first + len(held))) else -1

    def commit(self, batch: Batch, count: Tensor) -> None:
        """The first `count` [B] positions of each span are real: the one integer of a step."""
        before = self.computed[batch.slots]
        after = before + count
        chunk = torch.arange(len(batch.slots), device=count.device) >= sum(
            not s.chunk for s in batch.spans
        )
        certain = torch.where(chunk, after, before)
        self.computed[batch.slots] = after
        self.folded[batch.slots] = certain - certain % FOLD

    def committed(self, slot: int, start: int, computed: int, chunk: bool) -> None:
        """The host's copy of what `commit` did."""
        certain = computed if chunk else start
        self.fold_of[slot] = certain - certain % FOLD

    def publish(self, sequence: Sequence) -> None:
        """Put the sequence's newly filled pages in the tree, for others to share.

        Where the tree has an equal page already, the sequence takes that one and gives up its
        own. So it holds the whole path it publishes under, and whatever only the tree holds can
        be evicted, leaf by leaf.
        """
        if self.prefix is None:
            return
        slot, lineage = sequence.slot, sequence.lineage
        held = self.held[slot]
        full = sequence.computed // PAGE
        lineage.extend(sequence.tokens, full)
        for i in range(self._published[slot], full):
            known = self.prefix.nodes.get(lineage.keys[i])
            if known is None:
                self.prefix.insert(lineage, i, held[i])
                self._in_tree[held[i]] = 1
                self.refs[held[i]] += 1
            elif known.page != held[i]:
                self._hold(known.page)
                self._let_go(held[i])
                held[i] = known.page
                self.table[slot, i] = known.page
        self._published[slot] = full

    def snapshot(self, sequence: Sequence) -> None:
        """Keep the state of the sequence's first `computed` positions, and their pages."""
        position = sequence.computed
        if self.prefix is None or position < PAGE:
            return
        self.publish(sequence)
        slot, folded = sequence.slot, self.fold_of[sequence.slot]
        if not self.prefix.stateful and position % PAGE == 0:
            return
        parts = [self._saved(f, t, slot, folded, position) for f, t in self._declared]
        nbytes = sum(p.nbytes for p in parts)
        page = self.held[slot][(position - 1) // PAGE]
        snapshot = Snapshot(position, folded, parts, nbytes)
        kept, dropped = self.prefix.attach(sequence.lineage, sequence.tokens, snapshot, page)
        if kept:
            self._in_tree[page] = 1
            self.refs[page] += 1
        for p in dropped:
            self._leave_tree(p)

    def release(self, slot: int) -> None:
        """Take the slot back. What the tree holds of it stays."""
        for page in self.held[slot]:
            self._let_go(page)
        self.held[slot] = []
        self.table[slot] = 0
        self._set(slot, 0, 0)
        if self.poison:
            for _, tensor in self._declared:
                tensor[slot] = float("nan")
        self.slots.append(slot)

    # -- inside -----------------------------------------------------------------------------

    def _set(self, slot: int, computed: int, folded: int) -> None:
        self.computed[slot] = computed
        self.folded[slot] = self.fold_of[slot] = folded

    @staticmethod
    def _rows(f: Field, tensor: Tensor, folded: int, position: int) -> Tensor:
        """Ring rows of the positions that the next step still reads."""
        rows = torch.arange(max(0, folded - f.history), position, device=tensor.device)
        return rows % tensor.shape[1]

    def _saved(self, f: Field, tensor: Tensor, slot: int, folded: int, position: int) -> Tensor:
        part = tensor[slot]
        if f.ring:
            part = part[self._rows(f, tensor, folded, position)]
        return part.detach().to("cpu", copy=True)

    def _restore(self, slot: int, snapshot: Snapshot) -> None:
        for (f, tensor), part in zip(self._declared, snapshot.parts, strict=True):
            if f.ring:
                rows = self._rows(f, tensor, snapshot.folded, snapshot.position)
                tensor[slot, rows] = part.to(tensor.device)
            else:
                tensor[slot] = part.to(tensor.device)

    def _take(self) -> int | None:
        if not self.free:
            leaf = self.prefix.next_out(self.refs) if self.prefix else None
            if self.prefix is None or leaf is None:
                return None
            self._leave_tree(self.prefix.remove(leaf))
        page = self.free.pop()
        self.refs[page] = 1
        if self.poison:
            for kv in self._paged.values():
                kv.k[page] = kv.v[page] = float("nan")
        return page

    def _hold(self, page: int) -> None:
        self.idle -= self.refs[page] == 1 and self._in_tree[page]
        self.refs[page] += 1

    def _let_go(self, page: int) -> None:
        self.refs[page] -= 1
        if self.refs[page] == 0:
            self.free.append(page)
        elif self.refs[page] == 1 and self._in_tree[page]:
            self.idle += 1

    def _leave_tree(self, page: int) -> None:
        self.idle -= self.refs[page] == 1
        self._in_tree[page] = 0
        self._let_go(page)

    def check(self) -> None:
        """Every page is accounted for, on the host and on the device.

        Raises:
            AssertionError: something leaked or is held twice.
        """
        want = [0] * len(self.refs)
        want[0] = 1
        for slot, pages in enumerate(self.held):
            for i, page in enumerate(pages):
                want[page] += 1
                assert int(self.table[slot, i]) == page, f"slot {slot} page {i} differs on device"
            assert int(self.folded[slot]) == self.fold_of[slot], f"slot {slot} fold differs"
        tree = self.prefix.pages() if self.prefix else []
        for page in tree:
            want[page] += 1
        assert want == self.refs, "page counts do not add up"
        assert sorted(self.free) == [p for p, n in enumerate(want) if n == 0], "free list is wrong"
        assert self.idle == sum(self.refs[p] == 1 for p in tree), "idle pages are miscounted"
        busy = [s for s, pages in enumerate(self.held) if pages]
        assert not set(busy) & set(self.slots), "a free slot holds pages"
        if self.prefix:
            self.prefix.check(self.refs)
