"""Pages on their way into another worker's pool: where they come from, how bytes find their cells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from triptych.core.errors import TransferRefused
from triptych.core.grant import Grant
from triptych.kv.pages import PageLayout

ByteArray = npt.NDArray[np.uint8]


class PageSource(Protocol):
    """A pool to send from. Read on the engine's thread, between steps.

    Attributes:
        host_planes: (planes, pages, cell bytes), where the pages lie in memory of this host as they are sent; else
            None.
    """

    layout: PageLayout
    host_planes: ByteArray | None

    def gather(self, pages: Sequence[int]) -> ByteArray:
        """A copy of those pages, (pages, planes, cell bytes), contiguous."""
        ...


def pool_planes(buffer: memoryview, layout: PageLayout) -> ByteArray:
    """(planes, pages, cell bytes) over an arena's memory. Raises TransferRefused when it holds no whole pages."""
    return np.frombuffer(buffer, dtype=np.uint8).reshape(layout.num_planes, pages_in(len(buffer), layout), -1)


def pages_in(arena_bytes: int, layout: PageLayout) -> int:
    """Raises TransferRefused when a receiver's arena holds no whole number of pages."""
    try:
        return layout.num_pages_in(arena_bytes)
    except ValueError as error:
        raise TransferRefused("the receiver's pool does not hold whole pages of this layout") from error


def granted_pages(grant: Grant, num_pages: int) -> list[int]:
    """The pages that a bound grant names, in sequence order. Raises TransferRefused when the pool has no such page."""
    pages = [page for group in grant.groups for page in group.pages]
    if not pages or max(pages) >= num_pages or min(pages) < 0:
        raise TransferRefused("the decode worker named no pages, or pages that it does not have")
    return pages


@dataclass(frozen=True, slots=True, eq=False)
class MappedPages:
    """Implements `PageWriter` where the receiver's pool is memory of this process. `target` is (planes, pages, cell
    bytes); `target_pages` are the grant's, in sequence order."""

    source: PageSource
    target: ByteArray = field(repr=False)
    target_pages: Sequence[int]

    @property
    def is_congested(self) -> bool:
        return False

    def copy(self, pages: Sequence[int], first: int) -> int:
        if not pages:
            return 0
        planes, target_pages = self.source.host_planes, self.target_pages[first : first + len(pages)]
        if planes is None:
            self.target[:, list(target_pages)] = self.source.gather(pages).transpose(1, 0, 2)
        else:
            for here, there, count in common_runs(pages, target_pages):
                self.target[:, there : there + count] = planes[:, here : here + count]
        return len(pages) * self.source.layout.page_bytes

    async def flush(self) -> int | None:
        return None

    def cancel(self) -> None:
        return

    async def settle(self) -> None:
        return


def common_runs(pages: Sequence[int], target_pages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first page here, first page there, how many) of pages that follow each other on both sides, in order."""
    begin = 0
    for end in range(1, len(pages) + 1):
        follows = (
            end < len(pages) and pages[end] == pages[end - 1] + 1 and target_pages[end] == target_pages[end - 1] + 1
        )
        if not follows:
            yield pages[begin], target_pages[begin], end - begin
            begin = end


def scatter(target: ByteArray, target_pages: npt.NDArray[np.int64], offset: int, data: ByteArray) -> None:
    """Writes a piece of the page stream (see `kv/pages.py`), which may begin and end within a cell, into its cells.

    Args:
        target: the pool, (planes, pages, cell bytes).
        target_pages: the grant's pages in sequence order; the stream's byte 0 is the first byte of the first of them.
        offset: of `data` in the stream. The caller has checked that `offset + data.size` is within the grant.
    """
    num_planes, _, cell_bytes = target.shape
    while data.size:
        cell, within = divmod(offset, cell_bytes)
        num_whole = data.size // cell_bytes if within == 0 else 0
        if num_whole:
            cells = np.arange(cell, cell + num_whole)
            size = num_whole * cell_bytes
            target[cells % num_planes, target_pages[cells // num_planes]] = data[:size].reshape(num_whole, cell_bytes)
        else:
            size = min(data.size, cell_bytes - within)
            target[cell % num_planes, target_pages[cell // num_planes], within : within + size] = data[:size]
        offset, data = offset + size, data[size:]
