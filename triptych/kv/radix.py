"""The radix tree over ids and sentinels, in whole pages.

A node is one full, written page. Its key is the page's ids as bytes; a path from a root spells a prefix. Roots are
named by (model, adapter, tenant salt), so tenants never meet. Locks are taken on whole paths: an unlocked node has only
unlocked descendants, and every unlocked node can be evicted, leaves first, least recently used first.

    root ── [ids 0..15] page 7 ──┬── [ids 16..31] page 3        locked by a running sequence
                                 └── [other ids]  page 9        unlocked: may go

All unlocked nodes stand in one ring, in the order in which they were unlocked, the deepest of a path first:

    ring ⇄ oldest ⇄ … ⇄ leaf of the last path ⇄ its parent ⇄ … ⇄ the path's first page ⇄ (ring)

Whoever uses a node uses all nodes above it, so a node stands after its descendants, and the oldest is always a leaf.
Hence no operation looks at more nodes than its own path or the pages it evicts, however many there are.

With a journal each page that comes or goes is told of by its number in the chain (`page_chain.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct

from triptych.core.cache_feed import Holding
from triptych.kv.journal import Journal
from triptych.kv.page_chain import next_number, root_number

PageKey = bytes


class Node:
    """One cached page. Owned by the tree; sequences hold it locked.

    Most pages have one page after them: `first`. Only what more there are stands in a dictionary, `others`, so that a
    walk down a path touches little memory.
    """

    __slots__ = ("first", "key", "locks", "newer", "number", "older", "others", "page", "parent")

    # Neighbours in the ring, set while the node is unlocked and at no other time: a link that stayed would keep nodes
    # alive that have long been evicted.
    older: Node
    newer: Node

    def __init__(self, key: PageKey, page: int, parent: Node | None, locks: int, number: int = 0) -> None:
        self.key = key
        self.number = number
        self.page = page
        self.parent = parent
        self.locks = locks
        self.first: Node | None = None
        self.others: dict[PageKey, Node] | None = None

    def child(self, key: PageKey) -> Node | None:
        first = self.first
        if first is None or first.key == key:
            return first
        return None if self.others is None else self.others.get(key)

    def children(self) -> Iterator[Node]:
        if self.first is not None:
            yield self.first
        if self.others is not None:
            yield from self.others.values()

    def add(self, child: Node) -> None:
        if self.first is None:
            self.first = child
        elif self.others is None:
            self.others = {child.key: child}
        else:
            self.others[child.key] = child

    def discard(self, child: Node) -> None:
        if self.first is not child:
            assert self.others is not None
            del self.others[child.key]
        else:
            self.first = self.others.popitem()[1] if self.others else None
        if not self.others:
            self.others = None


class RadixTree:
    """Holds pages that others may share. Never allocates or frees: `evict` hands pages to its caller."""

    def __init__(self, page_tokens: int, journal: Journal | None = None) -> None:
        self.page_tokens = page_tokens
        self._journal = journal
        self.num_pages = 0
        self.num_unlocked = 0
        self._roots: dict[bytes, Node] = {}
        self._ring = Node(b"", -1, None, locks=1)
        self._ring.older = self._ring.newer = self._ring
        self._packed = Struct(f"{page_tokens}q")

    def key(self, ids: Sequence[int], start: int) -> PageKey:
        """The key of the page that begins at `start`; ids and sentinels have less than 63 bits."""
        return self._packed.pack(*ids[start : start + self.page_tokens])

    def match(self, root: bytes, ids: Sequence[int], max_tokens: int) -> list[Node]:
        """The longest cached path over at most `max_tokens` ids, in whole pages. Changes nothing."""
        node, path = self._roots.get(root), []
        if node is None:
            return []
        pack, page_tokens = self._packed.pack, self.page_tokens
        for start in range(0, max_tokens - page_tokens + 1, page_tokens):
            key, first = pack(*ids[start : start + page_tokens]), node.first
            node = first if first is None or first.key == key else node.child(key)
            if node is None:
                break
            path.append(node)
        return path

    def lock(self, nodes: Sequence[Node]) -> None:
        """Keeps a path's pages where they are. Each lock is given back once by `unlock`."""
        for node in nodes:
            if node.locks == 0:
                self._leave_ring(node)
            node.locks += 1

    def unlock(self, nodes: Sequence[Node]) -> None:
        """Of a path from its first page on."""
        for node in reversed(nodes):
            assert node.locks > 0, "unlocked a node that was not locked"
            node.locks -= 1
            if node.locks == 0:
                self._join_ring(node)

    def insert(self, root: bytes, parent: Node | None, key: PageKey, page: int) -> tuple[Node, bool]:
        """A locked node for `key` below `parent`, which is locked (None: the root), and whether it took `page`.

        When the tree already holds that key, its own node is locked and returned, and the page stays the caller's.
        """
        above = parent if parent is not None else self._root(root)
        assert above.locks > 0, "the page above may be evicted"
        node = above.child(key)
        if node is not None:
            self.lock([node])
            return node, False
        node = Node(key, page, above, locks=1)
        above.add(node)
        self.num_pages += 1
        if self._journal is not None:
            node.number = next_number(above.number, key)
            self._journal.stored(Holding.PAGE, node.number)
        return node, True

    def find(self, root: bytes, parent: Node | None, key: PageKey) -> Node | None:
        """The node that `insert` would meet. Changes nothing."""
        above = parent if parent is not None else self._roots.get(root)
        return above.child(key) if above is not None else None

    def evict(self, count: int) -> list[int]:
        """Removes up to `count` unlocked leaves, least recently used first, and returns their pages. A page whose last
        child went is a leaf with the age that it had."""
        pages: list[int] = []
        while len(pages) < count and (oldest := self._ring.newer) is not self._ring:
            self._leave_ring(oldest)
            self._remove(oldest)
            pages.append(oldest.page)
        return pages

    def nodes(self) -> Iterator[Node]:
        """Every node, for checks."""
        stack = [child for root in self._roots.values() for child in root.children()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children())

    def unlocked(self) -> Iterator[Node]:
        """Those that may be evicted, the first to go first; for checks."""
        node = self._ring.newer
        while node is not self._ring:
            yield node
            node = node.newer

    def _remove(self, node: Node) -> None:
        above = node.parent
        assert above is not None and node.first is None, "evicted a page with others behind it"
        above.discard(node)
        node.parent = None
        if above.first is None and above.parent is None:
            del self._roots[above.key]
        self.num_pages -= 1
        if self._journal is not None:
            self._journal.removed(Holding.PAGE, node.number)

    def _root(self, name: bytes) -> Node:
        """Its key is its name, so that an emptied root can be forgotten: callers choose salts, so they are many."""
        root = self._roots.get(name)
        if root is None:
            number = 0 if self._journal is None else root_number(name)
            root = self._roots[name] = Node(name, -1, None, locks=1, number=number)
        return root

    def _join_ring(self, node: Node) -> None:
        """As the newest."""
        ring = self._ring
        newest = ring.older
        newest.newer = ring.older = node
        node.older, node.newer = newest, ring
        self.num_unlocked += 1

    def _leave_ring(self, node: Node) -> None:
        older, newer = node.older, node.newer
        older.newer, newer.older = newer, older
        del node.older, node.newer
        self.num_unlocked -= 1
