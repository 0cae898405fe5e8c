"""A pool of KV pages as plain bytes: what moves between pools without knowing dtype or heads.

pool: (planes, pages, cell bytes)         a plane is K or V of one layer; a cell is one page in one plane
stream: page after page, and within each its cells, plane after plane
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Sizes in bytes. Two pools of one layout fingerprint have the same one, whatever their number of pages."""

    num_planes: int
    cell_bytes: int

    @property
    def page_bytes(self) -> int:
        """Of one page over all planes."""
        return self.num_planes * self.cell_bytes

    def num_pages_in(self, arena_bytes: int) -> int:
        """Pages of a pool of that size. Raises ValueError when it is not a whole number of them."""
        if self.page_bytes < 1 or arena_bytes % self.page_bytes:
            raise ValueError(f"an arena of {arena_bytes} bytes does not hold whole pages of {self.page_bytes} bytes")
        return arena_bytes // self.page_bytes
