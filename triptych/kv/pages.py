"""A pool of KV pages as plain bytes: what moves between pools.

pool: (planes, pages, cell bytes)         a plane is K or V of one layer; a cell is one page in one plane
stream: page after page, and within each its cells, plane after plane
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.core.kv_format import PageFormat


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Sizes in bytes. Pools of one layout fingerprint and one format have the same one, whatever their number of
    pages."""

    num_planes: int
    cell_bytes: int
    format: PageFormat

    @property
    def page_bytes(self) -> int:
        """Of one page over all planes."""
        return self.num_planes * self.cell_bytes

    def num_pages_in(self, arena_bytes: int) -> int:
        """Pages of a pool of that size. Raises ValueError when it is not a whole number of them."""
        if self.page_bytes < 1 or arena_bytes % self.page_bytes:
            raise ValueError(f"an arena of {arena_bytes} bytes does not hold whole pages of {self.page_bytes} bytes")
        return arena_bytes // self.page_bytes

    def in_format(self, other: PageFormat) -> PageLayout:
        """The layout of a pool of the same model in that format."""
        elements, rest = divmod(self.cell_bytes, self.format.page_tokens * self.format.dtype.num_bytes)
        assert not rest, "a cell holds whole tokens"
        return PageLayout(self.num_planes, elements * other.page_tokens * other.dtype.num_bytes, other)


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens of one sequence as they lie in its pool: `num_tokens` of them, from the token `first` of `pages[0]` on."""

    pages: Sequence[int]
    first: int
    num_tokens: int
