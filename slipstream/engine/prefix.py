"""Which computed text may be used again: a tree of pages with snapshots of recurrent state.

Owns the tree and the order of eviction; the cache owns the pages and their counts.

A page has two names. Its *text key* is a hash of all tokens up to its end. Its *exact key* is a
hash of the same tokens and of how each position was computed: prompt positions in chunks,
generated ones as short spans, and where one turned into the other. Two pages with the same exact
key hold the same bits. Recurrent state cannot be cut back to an earlier token, so a hybrid model
resumes only where a snapshot of its state was kept.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

from torch import Tensor

from slipstream.kernels.types import PAGE

Event = tuple[int, str]  # from this position on: "c" computed in chunks, "g" as short spans


def chain(previous: bytes, tokens: list[int], events: tuple[Event, ...] = ()) -> bytes:
    """The key of a page behind `previous`."""
    digest = blake2b(previous, digest_size=16)
    digest.update(struct.pack(f"<{len(tokens)}q", *tokens))
    for position, kind in events:
        digest.update(struct.pack("<q", position) + kind.encode())
    return digest.digest()


class Lineage:
    """How the positions of one sequence are computed, as keys of its full pages.

    Args:
        scope: who may share computed text with whom.
        prompt: position from which on tokens are generated.
    """

    __slots__ = ("events", "keys", "root", "texts")

    def __init__(self, scope: str, prompt: int) -> None:
        self.root = chain(scope.encode(), [])
        self.events: list[Event] = [(prompt, "g")]
        self.keys: list[bytes] = []
        self.texts: list[bytes] = []

    def extend(self, tokens: list[int], pages: int) -> None:
        """Name the first `pages` pages of `tokens`."""
        while len(self.keys) < pages:
            i = len(self.keys)
            page = tokens[i * PAGE : (i + 1) * PAGE]
            events = self.within(i * PAGE, (i + 1) * PAGE)
            self.keys.append(chain(self.keys[-1] if i else self.root, page, events))
            self.texts.append(chain(self.texts[-1] if i else self.root, page))

    def within(self, begin: int, end: int) -> tuple[Event, ...]:
        """Events at positions begin <= p < end."""
        return tuple(e for e in self.events if begin <= e[0] < end)

    def mode(self, end: int) -> str:
        """How the last position before `end` is computed."""
        return next((kind for at, kind in reversed(self.events) if at < end), "c")

    def adopt(self, node: Node | None, tail: Tail | None, position: int) -> None:
        """Continue from text that another sequence computed, up to `position`, in chunks."""
        depth = node.depth if node else 0
        mode = tail.mode if tail else (node.mode if node else "c")
        events = list(tail.events) if tail else []
        if mode == "g" or position % PAGE:
            events.append((position, "c"))
        self.events = events + self.events[-1:]
        self.keys = [n.key for n in node.path()] if node else []
        del self.texts[depth:]
        assert len(self.texts) == depth


@dataclass(slots=True, eq=False)
class Snapshot:
    """All per-slot memory of a sequence whose first `position` positions are computed."""

    position: int
    folded: int
    parts: list[Tensor]
    nbytes: int
    used: int = 0


@dataclass(slots=True, eq=False)
class Tail:
    """A partly filled page behind a full one, and the state at its end."""

    parent: Node
    page: int
    tokens: tuple[int, ...]
    events: tuple[Event, ...]
    mode: str
    snapshot: Snapshot
    used: int = 0


@dataclass(slots=True, eq=False)
class Node:
    """One full page in the tree."""

    key: bytes
    text: bytes
    parent: Node | None
    page: int
    depth: int  # pages up to and with this one
    mode: str  # how its last position was computed
    children: int = 0
    tails: dict[tuple[tuple[int, ...], tuple[Event, ...]], Tail] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    used: int = 0

    def path(self) -> list[Node]:
        """Nodes from the first page to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True, slots=True)
class Hit:
    """Where a sequence may resume."""

    position: int = 0
    node: Node | None = None
    tail: Tail | None = None
    snapshot: Snapshot | None = None
    exact: bool = True
    shared: int = 0  # positions whose pages were found, with or without a snapshot at their end


class Prefix:
    """The tree.

    Args:
        stateful: the model has per-slot memory, so it resumes only at snapshots.
        budget: bytes of snapshots to keep.
    """

    def __init__(self, stateful: bool, budget: int) -> None:
        self.stateful, self.budget = stateful, budget
        self.nodes: dict[bytes, Node] = {}
        self.texts: dict[bytes, dict[bytes, Node]] = {}
        self.snapshot_bytes = 0
        self._clock = 0

    # -- finding ----------------------------------------------------------------------------

    def find(self, lineage: Lineage, tokens: list[int], limit: int, by_text: bool) -> Hit:
        """The deepest place at or before `limit` from which the sequence can go on.

        With `by_text`, text that was computed another way also counts where it reaches deeper.
        """
        lineage.extend(tokens, len(tokens) // PAGE)
        best = self._deepest(
            (self.nodes.get(key) for key in lineage.keys), lineage, tokens, limit, exact=True
        )
        if by_text:
            found = (self._any(text) for text in lineage.texts)
            other = self._deepest(found, lineage, tokens, limit, exact=False)
            if other.position > best.position:
                best = other
        self._touch(best)
        return best

    def _any(self, text: bytes) -> Node | None:
        nodes = self.texts.get(text)
        if not nodes:
            return None
        return max(nodes.values(), key=lambda n: (n.snapshot is not None, len(n.tails), n.used))

    def _deepest(
        self,
        nodes: Iterator[Node | None],
        lineage: Lineage,
        tokens: list[int],
        limit: int,
        exact: bool,
    ) -> Hit:
        best, shared = Hit(exact=exact), 0
        for node in nodes:
            if node is None or node.depth * PAGE > limit:
                break
            end = shared = node.depth * PAGE
            if node.snapshot or not self.stateful:
                best = Hit(end, node, None, node.snapshot, exact)
            for (part, events), tail in node.tails.items():
                stop = end + len(part)
                if (
                    best.position < stop <= limit
                    and tuple(tokens[end:stop]) == part
                    and (not exact or events == lineage.within(end, stop + 1))
                ):
                    best = Hit(stop, node, tail, tail.snapshot, exact)
        return Hit(best.position, best.node, best.tail, best.snapshot, exact, shared)

    def _touch(self, hit: Hit) -> None:
        self._clock += 1
        if hit.node:
            for node in hit.node.path():
                node.used = self._clock
        for part in (hit.tail, hit.snapshot):
            if part:
                part.used = self._clock

    # -- growing ----------------------------------------------------------------------------

    def insert(self, lineage: Lineage, index: int, page: int) -> Node:
        """Put a sequence's page `index` in the tree; its predecessor is there."""
        key = lineage.keys[index]
        parent = self.nodes[lineage.keys[index - 1]] if index else None
        self._clock += 1
        node = Node(
            key, lineage.texts[index], parent, page, index + 1,
            lineage.mode((index + 1) * PAGE), used=self._clock,
        )  # fmt: skip
        self.nodes[key] = node
        self.texts.setdefault(node.text, {})[key] = node
        if parent:
            parent.children += 1
        return node

    def attach(
        self, lineage: Lineage, tokens: list[int], snapshot: Snapshot, page: int
    ) -> tuple[bool, list[int]]:
        """Keep a snapshot at its place, `page` holding the positions behind the last full page.

        Returns whether `page` is now held by the tree, and pages that the tree gave up to stay
        within its budget.
        """
        full, rest = divmod(snapshot.position, PAGE)
        node = self.nodes.get(lineage.keys[full - 1]) if full else None
        if node is None or snapshot.nbytes > self.budget:
            return False, []
        self._clock += 1
        snapshot.used = self._clock
        begin = full * PAGE
        # An event at the very end counts: a prompt that ends inside a page is not the beginning
        # of a longer one, whose chunk would go on to the end of the page.
        events = lineage.within(begin, snapshot.position + 1)
        part = (tuple(tokens[begin : snapshot.position]), events)
        if rest == 0:
            if node.snapshot:
                node.snapshot.used = self._clock
                return False, []
            node.snapshot = snapshot
        elif part in node.tails:
            node.tails[part].used = node.tails[part].snapshot.used = self._clock
            return False, []
        else:
            mode = lineage.mode(snapshot.position)
            node.tails[part] = Tail(node, page, *part, mode, snapshot, self._clock)
        self.snapshot_bytes += snapshot.nbytes
        return rest != 0, self._shrink()

    def _shrink(self) -> list[int]:
        """Drop the snapshots used longest ago until the rest fits; returns pages given up."""
        pages = []
        while self.snapshot_bytes > self.budget:
            owners: list[Node | Tail] = [n for n in self.nodes.values() if n.snapshot]
            owners += [t for n in self.nodes.values() for t in n.tails.values()]
            oldest = min(owners, key=lambda o: o.snapshot.used if o.snapshot else 0)
            if isinstance(oldest, Tail):
                pages.append(self.remove(oldest))
            elif oldest.snapshot:
                self.snapshot_bytes -= oldest.snapshot.nbytes
                oldest.snapshot = None
        return pages

    # -- giving up --------------------------------------------------------------------------

    def leaves(self) -> Iterator[Node | Tail]:
        """What can be removed without stranding anything behind it."""
        for node in self.nodes.values():
            yield from node.tails.values()
            if not node.children and not node.tails:
                yield node

    def next_out(self, refs: list[int]) -> Node | Tail | None:
        """The leaf to evict: one nobody can resume from, else the one used longest ago."""
        free = (leaf for leaf in self.leaves() if refs[leaf.page] == 1)
        return min(
            free,
            key=lambda leaf: (not self.stateful or leaf.snapshot is not None, leaf.used),
            default=None,
        )

    def remove(self, leaf: Node | Tail) -> int:
        """Take a leaf out of the tree; returns its page."""
        if leaf.snapshot:
            self.snapshot_bytes -= leaf.snapshot.nbytes
        if isinstance(leaf, Tail):
            del leaf.parent.tails[(leaf.tokens, leaf.events)]
            return leaf.page
        del self.nodes[leaf.key]
        same = self.texts[leaf.text]
        del same[leaf.key]
        if not same:
            del self.texts[leaf.text]
        if leaf.parent:
            leaf.parent.children -= 1
        return leaf.page

    def pages(self) -> list[int]:
        """Every page the tree holds."""
        return [n.page for n in self.nodes.values()] + [
            t.page for n in self.nodes.values() for t in n.tails.values()
        ]

    def check(self, refs: list[int]) -> None:
        """Every node's predecessor is present, counted and held by whoever holds the node.

        Raises:
            AssertionError: they are not.
        """
        children: dict[bytes, int] = {}
        total = 0
        for node in self.nodes.values():
            if node.parent:
                assert self.nodes.get(node.parent.key) is node.parent, "a page lost its predecessor"
                held = refs[node.page] == 1 or refs[node.parent.page] > 1
                assert held, "a page is held whose predecessor may be evicted"
                children[node.parent.key] = children.get(node.parent.key, 0) + 1
            assert self.texts[node.text][node.key] is node
            holders: list[Node | Tail] = [node, *node.tails.values()]
            total += sum(h.snapshot.nbytes for h in holders if h.snapshot)
        for node in self.nodes.values():
            assert node.children == children.get(node.key, 0), "children are miscounted"
        assert total == self.snapshot_bytes, "snapshot bytes are miscounted"
