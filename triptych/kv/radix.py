"""The radix tree over ids and sentinels, in whole pages.

A node is one full, written page. Its key is the page's ids; a path from a root spells a prefix. Roots are named by
(model, adapter, tenant salt), so tenants never meet. Locks are taken on whole paths: an unlocked node has only unlocked
descendants, and every unlocked node can be evicted, leaves first, least recently used first.

    root ── [ids 0..15] page 7 ──┬── [ids 16..31] page 3        locked by a running sequence
                                 └── [other ids]  page 9        unlocked: may go
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

PageKey = tuple[int, ...]

_MAX_STALE = 1024


@dataclass(slots=True, eq=False)
class Node:
    """One cached page. Owned by the tree; sequences hold it locked."""

    key: PageKey
    page: int
    parent: Node | None
    children: dict[PageKey, Node] = field(default_factory=dict)
    locks: int = 0
    last_used: int = 0
    is_evicted: bool = False


class RadixTree:
    """Holds pages that others may share. Never allocates or frees: `evict` hands pages to its caller."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.num_pages = 0
        self.num_unlocked = 0
        self._roots: dict[bytes, Node] = {}
        self._candidates: list[tuple[int, int, Node]] = []
        self._tick = 0
        self._serial = 0

    def match(self, root: bytes, ids: Sequence[int], max_tokens: int) -> list[Node]:
        """The longest cached path over at most `max_tokens` ids, in whole pages. Changes nothing."""
        node, path = self._roots.get(root), []
        if node is None:
            return []
        for start in range(0, max_tokens - self.page_tokens + 1, self.page_tokens):
            node = node.children.get(tuple(ids[start : start + self.page_tokens]))
            if node is None:
                break
            path.append(node)
        return path

    def lock(self, nodes: Sequence[Node]) -> None:
        """Keeps a path's pages where they are. Each lock is given back once by `unlock`."""
        self._tick += 1
        for node in nodes:
            self.num_unlocked -= node.locks == 0
            node.locks += 1
            node.last_used = self._tick

    def unlock(self, nodes: Sequence[Node]) -> None:
        self._tick += 1
        for node in reversed(nodes):
            assert node.locks > 0, "unlocked a node that was not locked"
            node.locks -= 1
            node.last_used = self._tick
            if node.locks == 0:
                self.num_unlocked += 1
                self._offer(node)

    def insert(self, root: bytes, parent: Node | None, key: PageKey, page: int) -> tuple[Node, bool]:
        """A locked node for `key` below `parent` (None: the root), and whether it took `page`.

        When the tree already holds that key, its own node is locked and returned, and the page stays the caller's.
        """
        above = parent if parent is not None else self._root(root)
        node = above.children.get(key)
        is_new = node is None
        if node is None:
            node = Node(key, page, above)
            above.children[key] = node
            self.num_pages += 1
            self.num_unlocked += 1
        self.lock([node])
        return node, is_new

    def find(self, root: bytes, parent: Node | None, key: PageKey) -> Node | None:
        """The node that `insert` would meet. Changes nothing."""
        above = parent if parent is not None else self._roots.get(root)
        return above.children.get(key) if above is not None else None

    def evict(self, count: int) -> list[int]:
        """Removes up to `count` unlocked leaves, least recently used first, and returns their pages."""
        pages: list[int] = []
        while len(pages) < count and self._candidates:
            entry = heapq.heappop(self._candidates)
            if _is_current(entry):
                pages.append(self._remove(entry[2]))
        return pages

    def nodes(self) -> Iterator[Node]:
        """Every node, for checks."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _remove(self, node: Node) -> int:
        assert node.parent is not None
        node.is_evicted = True
        del node.parent.children[node.key]
        self.num_pages -= 1
        self.num_unlocked -= 1
        if node.parent.parent is not None:
            self._offer(node.parent)
        elif not node.parent.children:
            del self._roots[bytes(node.parent.key)]
        return node.page

    def _root(self, name: bytes) -> Node:
        """Its key is its name, so that an emptied root can be forgotten: callers choose salts, so they are many."""
        return self._roots.setdefault(name, Node(tuple(name), -1, None, locks=1))

    def _offer(self, node: Node) -> None:
        """Makes an unlocked leaf a candidate; stale entries are skipped when popped."""
        if node.locks == 0 and not node.children:
            self._serial += 1
            heapq.heappush(self._candidates, (node.last_used, self._serial, node))
            if len(self._candidates) > 2 * self.num_unlocked + _MAX_STALE:
                self._drop_stale()

    def _drop_stale(self) -> None:
        """A page that is used again and again leaves an entry each time; without this the heap would only grow."""
        self._candidates = [entry for entry in self._candidates if _is_current(entry)]
        heapq.heapify(self._candidates)


def _is_current(entry: tuple[int, int, Node]) -> bool:
    last_used, _, node = entry
    return not (node.is_evicted or node.locks or node.children) and node.last_used == last_used
