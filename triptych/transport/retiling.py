"""A prompt's pages, cut anew for a receiver whose pages hold more tokens or fewer, or other numbers.

    engine: pages as they fill --copy--> RetilingHandoff --receiver's pages, once complete--> page writer
                                              |                                                   |
                                              '--> RetiledPages <------------gather---------------'

The receiver's pages are numbered from the first that is sent; what it holds already ends at a border of its pages,
which may lie within one of ours. A page that is not complete yet waits for the pages of ours that complete it; the last
one of the prompt goes as it is. The carriers know nothing of it: they see a source in the receiver's format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from triptych.core.grant import Grant
from triptych.core.kv_format import PageFormat
from triptych.kv.pages import PageLayout, TokenRun
from triptych.transport.carrier import PageWriter, WriterEvents
from triptych.transport.link import KvLink
from triptych.transport.pages import ByteArray, PageSource


class TokenSource(PageSource, Protocol):
    """A pool that can be sent from in pages of any format."""

    def gather_tokens(self, run: TokenRun, form: PageFormat) -> torch.Tensor:
        """A copy: uint8 (pages, planes, cell bytes) on the pool's device, enqueued only. The run begins at a border of
        pages of that format; behind its end the last page holds anything."""
        ...


class RetiledPages:
    """Implements `PageSource` for one prompt. Owner of the list of local pages that it lies in; used by the engine's
    thread.

    Args:
        num_held_tokens: of the prompt's begin, which are not sent: whole pages of `form`.
        num_tokens: of the whole prompt.
    """

    host_planes: ByteArray | None = None

    def __init__(self, source: TokenSource, form: PageFormat, num_held_tokens: int, num_tokens: int) -> None:
        assert num_held_tokens % form.page_tokens == 0, "the stage has checked what is held"
        self.layout: PageLayout = source.layout.in_format(form)
        self._source = source
        self._first = num_held_tokens % source.layout.format.page_tokens
        self._num_tokens = num_tokens - num_held_tokens
        self._pages: list[int] = []

    @property
    def num_local(self) -> int:
        """Local pages so far. The first is the one that what is held ends in, or before."""
        return len(self._pages)

    @property
    def num_ready(self) -> int:
        """The receiver's pages that can be gathered by now."""
        num_written = max(len(self._pages) * self._source.layout.format.page_tokens - self._first, 0)
        page_tokens = self.layout.format.page_tokens
        return num_written // page_tokens if num_written < self._num_tokens else -(-self._num_tokens // page_tokens)

    def add(self, pages: Sequence[int]) -> None:
        """Further local pages are full, or hold the prompt's end."""
        self._pages += pages

    def gather(self, pages: Sequence[int]) -> ByteArray:
        array: ByteArray = self.gather_cells(pages).cpu().numpy()
        return array

    def gather_cells(self, pages: Sequence[int]) -> torch.Tensor:
        """`pages` follow each other, all below `num_ready`."""
        here, there = self._source.layout.format.page_tokens, self.layout.format.page_tokens
        begin, end = pages[0] * there, min((pages[-1] + 1) * there, self._num_tokens)
        page, first = divmod(self._first + begin, here)
        last = -(-(self._first + end) // here)
        return self._source.gather_tokens(TokenRun(self._pages[page:last], first, end - begin), self.layout.format)


class RetilingHandoff:
    """Takes a prompt's local pages, as a page writer does, and writes the receiver's. For the engine's thread."""

    def __init__(self, writer: PageWriter, pages: RetiledPages) -> None:
        self._writer = writer
        self._pages = pages
        self._num_sent = 0

    @property
    def is_congested(self) -> bool:
        return self._writer.is_congested

    def copy(self, pages: Sequence[int], first: int) -> int:
        assert first == self._pages.num_local, "pages come in order, each once"
        self._pages.add(pages)
        ready = range(self._num_sent, self._pages.num_ready)
        self._num_sent = ready.stop
        return self._writer.copy(ready, ready.start)


def open_handoff(
    link: KvLink, grant: Grant, source: TokenSource, num_tokens: int, events: WriterEvents
) -> PageWriter | RetilingHandoff:
    """Where a prompt of `num_tokens` goes: into the pages of `grant`, which `link` has bound. Raises as
    `page_writer`."""
    if link.page_format == source.layout.format:
        return link.page_writer(grant, source, events)
    pages = RetiledPages(source, link.page_format, grant.num_held_tokens, num_tokens)
    return RetilingHandoff(link.page_writer(grant, pages, events), pages)
