"""The cache manager: sole owner of a pool's pages and of the radix tree over them.

Every page is in exactly one place:

    free          in the allocator
    cached        in the tree (locked by sequences and grants, or not)
    owned         private to a sequence (its partial tail, a duplicate, room for tokens to come, or what was leased
                  until its KV was complete)
    leased        bound to a grant, being written by a prefill worker
    quarantined   its grant ended, but a peer may still write to it

and  free + cached + owned + leased + quarantined = usable pages, always (`check_integrity`).
Used by one thread only, the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from triptych.kv.allocator import PageAllocator
from triptych.kv.journal import Journal
from triptych.kv.radix import Node, RadixTree


@dataclass(slots=True, eq=False)
class SequencePages:
    """A sequence's block table. Held by the sequence, changed by the manager only.

    Attributes:
        pages: page of each `page_tokens` tokens, in order.
        path: the locked nodes of the tree along the sequence's full pages.
        owned: which of `pages` are this sequence's own.
        cached_tokens: prompt tokens that were in the cache at reservation.
    """

    root: bytes
    pages: list[int]
    path: list[Node]
    owned: set[int]
    cached_tokens: int
    is_released: bool = field(default=False)


class CacheManager:
    """Reserves, shares and frees pages of one pool. `on_free` hears of pages that are free again, `journal` of what is
    cached and evicted."""

    def __init__(
        self,
        num_pages: int,
        page_tokens: int,
        on_free: Callable[[Sequence[int]], None] | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.page_tokens = page_tokens
        self.tree = RadixTree(page_tokens, journal)
        self._allocator = PageAllocator(num_pages, on_free)
        self._num_owned = 0
        self._num_leased = 0
        self._num_quarantined = 0
        self._num_credited = 0
        self._num_evicted = 0

    @property
    def num_usable(self) -> int:
        return self._allocator.num_usable

    @property
    def num_available(self) -> int:
        """Pages that a reservation could get now: free or evictable, less what credits have promised."""
        return self._allocator.num_free + self.tree.num_unlocked - self._num_credited

    def counts(self) -> dict[str, int]:
        """Pages by state, the label values of `triptych_kv_pages`."""
        return {
            "free": self._allocator.num_free,
            "cached": self.tree.num_pages,
            "owned": self._num_owned,
            "leased": self._num_leased,
            "quarantined": self._num_quarantined,
        }

    def take_num_evicted(self) -> int:
        """Pages evicted to make room since this was last asked."""
        taken, self._num_evicted = self._num_evicted, 0
        return taken

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    def match_tokens(self, root: bytes, ids: Sequence[int]) -> int:
        """Prompt tokens that the cache holds, whole pages, never the last token (its logits are needed)."""
        return len(self.tree.match(root, ids, len(ids) - 1)) * self.page_tokens

    def offer(self, root: bytes, ids: Sequence[int], num_tokens: int, spare_pages: int = 0) -> int | None:
        """The cached tokens of the reservation that `reserve` would make now; None where it would make none. Changes
        nothing."""
        path = self.tree.match(root, ids, len(ids) - 1)
        return len(path) * self.page_tokens if self._has_room(path, num_tokens, spare_pages) else None

    def reserve(self, root: bytes, ids: Sequence[int], num_tokens: int, spare_pages: int = 0) -> SequencePages | None:
        """Pages for `num_tokens` tokens that start with `ids`: the cached prefix is locked, the rest is the sequence's
        own. At least `spare_pages` stay available to others. All or nothing: None changes nothing."""
        path = self.tree.match(root, ids, len(ids) - 1)
        if not self._has_room(path, num_tokens, spare_pages):
            return None
        needed = self.pages_for(num_tokens) - len(path)
        self.tree.lock(path)
        fresh = self._take(needed)
        self._num_owned += needed
        cached_tokens = len(path) * self.page_tokens
        return SequencePages(root, [node.page for node in path] + fresh, path, set(fresh), cached_tokens)

    def extend(self, sequence: SequencePages, num_tokens: int) -> bool:
        """Further pages, until the sequence has room for `num_tokens` tokens. All or nothing: False changes nothing."""
        needed = self.pages_for(num_tokens) - len(sequence.pages)
        if needed > self.num_available:
            return False
        fresh = self._take(max(needed, 0))
        sequence.pages += fresh
        sequence.owned.update(fresh)
        self._num_owned += len(fresh)
        return True

    def share(self, sequence: SequencePages, ids: Sequence[int], num_written: int) -> None:
        """Puts the sequence's full, written pages into the tree, so that others may use them from now on.

        A page that the tree has from elsewhere is held beside the sequence's own copy. Where no page is left for that
        but those that credits have promised, sharing stops short.
        """
        for index in range(len(sequence.path), num_written // self.page_tokens):
            key = self.tree.key(ids, index * self.page_tokens)
            parent = sequence.path[-1] if sequence.path else None
            known = self.tree.find(sequence.root, parent, key)
            if known is not None and known.locks == 0 and self.num_available < 1:
                return
            node, took_page = self.tree.insert(sequence.root, parent, key, sequence.pages[index])
            sequence.path.append(node)
            if took_page:
                sequence.owned.discard(sequence.pages[index])
                self._num_owned -= 1

    def release(self, sequence: SequencePages) -> None:
        """Ends the sequence's hold: own pages are free at once, shared ones stay cached. The caller has waited for the
        last kernel that names them."""
        if sequence.is_released:
            return
        sequence.is_released = True
        self.tree.unlock(sequence.path)
        self._allocator.free(sequence.owned)
        self._num_owned -= len(sequence.owned)

    def credit(self, num_pages: int, spare_pages: int = 0) -> bool:
        """Promises pages without naming them. False when they are not there, with `spare_pages` left for others."""
        if num_pages + spare_pages > self.num_available:
            return False
        self._num_credited += num_pages
        return True

    def hold(self, root: bytes, ids: Sequence[int], num_tokens: int, spare_pages: int = 0) -> list[Node] | None:
        """Locks the cached prefix of `ids` and promises the pages behind it, for `num_tokens` tokens in all, with
        `spare_pages` left for others. What is answered goes back by `let_go`, or with the sequence that takes it over
        (`own_leased`). None changes nothing."""
        path = self.tree.match(root, ids, len(ids) - 1)
        if not self._has_room(path, num_tokens, spare_pages):
            return None
        self.tree.lock(path)
        has_room = self.credit(self.pages_for(num_tokens) - len(path), spare_pages)
        assert has_room, "it was there before the path was locked"
        return path

    def hold_more(self, root: bytes, ids: Sequence[int], path: list[Node]) -> int:
        """Adds to a held path what others have cached since, and takes as many pages off the promise behind it. Returns
        how many."""
        longer = self.tree.match(root, ids, len(ids) - 1)[len(path) :]
        self.tree.lock(longer)
        self.cancel_credit(len(longer))
        path += longer
        return len(longer)

    def let_go(self, path: Sequence[Node]) -> None:
        """Ends a hold."""
        self.tree.unlock(path)

    def cancel_credit(self, num_pages: int) -> None:
        self._num_credited -= num_pages
        assert self._num_credited >= 0

    def bind_credit(self, num_pages: int) -> list[int]:
        """Turns a promise into leased pages."""
        self.cancel_credit(num_pages)
        self._num_leased += num_pages
        return self._take(num_pages)

    def own_leased(self, pages: Sequence[int], root: bytes = b"", path: Sequence[Node] = ()) -> SequencePages:
        """Nobody writes to these pages from outside any more: they are a sequence's own from now on, behind the held
        `path`, which is the sequence's too."""
        self._num_leased -= len(pages)
        self._num_owned += len(pages)
        cached = [node.page for node in path]
        return SequencePages(root, [*cached, *pages], list(path), set(pages), len(path) * self.page_tokens)

    def free_leased(self, pages: Sequence[int]) -> None:
        self._num_leased -= len(pages)
        self._allocator.free(pages)

    def quarantine_leased(self, pages: Sequence[int]) -> None:
        """A peer may still write to these pages: nobody gets them until it is known that it will not."""
        self._num_leased -= len(pages)
        self._num_quarantined += len(pages)

    def free_quarantined(self, pages: Sequence[int]) -> None:
        self._num_quarantined -= len(pages)
        self._allocator.free(pages)

    def clear_cache(self) -> int:
        """Evicts everything that nobody holds; returns how many pages."""
        pages = self.tree.evict(self.tree.num_pages)
        self._allocator.free(pages)
        return len(pages)

    def check_integrity(self) -> None:
        """Raises AssertionError when a page is lost or in two places."""
        assert sum(self.counts().values()) == self.num_usable, self.counts()
        cached = [node.page for node in self.tree.nodes()]
        assert len(cached) == len(set(cached)) == self.tree.num_pages
        unlocked = {id(node) for node in self.tree.nodes() if node.locks == 0}
        assert {id(node) for node in self.tree.unlocked()} == unlocked and len(unlocked) == self.tree.num_unlocked

    def _has_room(self, path: Sequence[Node], num_tokens: int, spare_pages: int) -> bool:
        """For the pages behind a cached path; those of the path itself are no room then."""
        needed = self.pages_for(num_tokens) - len(path) + spare_pages
        return needed <= self.num_available - sum(node.locks == 0 for node in path)

    def _take(self, count: int) -> list[int]:
        short = count - self._allocator.num_free
        if short > 0:
            evicted = self.tree.evict(short)
            assert len(evicted) == short, "the tree promised more pages than it gave"
            self._num_evicted += short
            self._allocator.free(evicted)
        return self._allocator.allocate(count)
