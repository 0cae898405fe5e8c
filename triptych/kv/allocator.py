"""Free pages of a KV pool. Page 0 is reserved for padding and never handed out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

RESERVED_PAGES = 1


class PageAllocator:
    """Sole owner of the free list. Knows nothing of what pages are for.

    `on_free` hears of pages that were given back, before anybody else can have them.
    """

    def __init__(self, num_pages: int, on_free: Callable[[Sequence[int]], None] | None = None) -> None:
        if num_pages <= RESERVED_PAGES:
            raise ValueError(f"a pool needs more than {RESERVED_PAGES} pages, not {num_pages}")
        self.num_pages = num_pages
        self._on_free = on_free
        self._free = list(range(num_pages - 1, RESERVED_PAGES - 1, -1))
        self._is_free = bytearray(num_pages)
        for page in self._free:
            self._is_free[page] = 1

    @property
    def num_usable(self) -> int:
        return self.num_pages - RESERVED_PAGES

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` pages. The caller has checked `num_free`; asking for more is a bug of ours."""
        assert count <= len(self._free), f"asked for {count} pages of {len(self._free)}"
        if count == 0:
            return []
        pages = self._free[-count:][::-1]
        del self._free[-count:]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Gives pages back. Freeing a free or the reserved page is a bug of ours."""
        freed = list(pages)
        for page in freed:
            assert RESERVED_PAGES <= page < self.num_pages and not self._is_free[page], f"page {page} freed twice"
            self._is_free[page] = 1
            self._free.append(page)
        if self._on_free is not None and freed:
            self._on_free(freed)
