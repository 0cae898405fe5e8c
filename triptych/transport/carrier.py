"""How the bytes of a link travel. The control frames are the same for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from triptych.core.errors import PeerLost, TriptychError
from triptych.core.grant import Grant
from triptych.transport.pages import MappedPages, PageSource, granted_pages, pages_in, pool_planes
from triptych.transport.session import check_slot
from triptych.transport.shm import SharedSegment
from triptych.transport.slot_writer import MemorySlotWriter, SlotWriter
from triptych.transport.types import SlotGrant

OVER: Final = "the session to the other worker is over"


class PageWriter(Protocol):
    """Writes one prompt's pages to its grant. `copy` and `is_congested` are for the engine's thread and never block;
    the rest is for the event loop."""

    @property
    def is_congested(self) -> bool:
        """So much is on its way that no more should be computed for this grant now."""
        ...

    def copy(self, pages: Sequence[int], first: int) -> int:
        """Local `pages` become the grant's from its `first` on, each once and in order; returns their bytes. Never
        raises: what cannot be sent fails the commit."""
        ...

    async def flush(self) -> int | None:
        """Returns when all is out of this process, with the checksum that the commit shows (None: nothing to check)."""
        ...

    def cancel(self) -> None:
        """Nothing more of this grant is sent. Idempotent."""
        ...

    async def settle(self) -> None:
        """After `cancel`: returns when nothing of what was sent can still write to the grant's pages. Never raises."""
        ...


@dataclass(frozen=True, slots=True)
class WriterEvents:
    """What a page writer tells the one that it writes for, on the event loop.

    Attributes:
        failed: the bytes will not arrive; the commit would raise the same.
        relieved: `is_congested` is over.
    """

    failed: Callable[[TriptychError], None]
    relieved: Callable[[], None]


class Carrier(Protocol):
    """Moves the bytes of one link. `label` is that of the transfer metrics."""

    label: str

    async def write_slot(self, grant: SlotGrant, data: memoryview) -> None:
        """All of the slot, before its commit. Raises TransferRefused, PeerLost or DeadlineExceeded."""
        ...

    def slot_writer(self, grant: SlotGrant) -> SlotWriter | None:
        """None: the slot cannot be reached from here, only `write_slot` moves bytes there. Raises TransferRefused when
        it lies outside the arena, PeerLost when the link is over."""
        ...

    def page_writer(self, ticket: int, grant: Grant, source: PageSource, events: WriterEvents) -> PageWriter:
        """Raises TransferRefused when the grant's pages are not in the receiver's pool."""
        ...

    def close(self) -> None:
        """Idempotent. What is under way fails."""
        ...


class MemoryCarrier:
    """The receiver's arena is memory of this process: its own, or a peer's segment mapped here (then owned)."""

    def __init__(self, label: str, arena: memoryview, segment: SharedSegment | None = None) -> None:
        self.label = label
        self._arena: memoryview | None = arena
        self._segment = segment

    async def write_slot(self, grant: SlotGrant, data: memoryview) -> None:
        check_slot(grant, len(data), self._open_arena().nbytes)
        # Released at once: a view that a traceback keeps would keep the mapping, and with it the receiver's slots.
        with self._slot_view(grant) as view:
            view[:] = data

    def slot_writer(self, grant: SlotGrant) -> SlotWriter | None:
        check_slot(grant, grant.num_bytes, self._open_arena().nbytes)
        return MemorySlotWriter(self.label, grant.num_bytes, partial(self._slot_view, grant))

    def page_writer(self, ticket: int, grant: Grant, source: PageSource, events: WriterEvents) -> PageWriter:
        arena = self._open_arena()
        pages = granted_pages(grant, pages_in(arena.nbytes, source.layout))
        return MappedPages(source, pool_planes(arena[:], source.layout), pages)

    def close(self) -> None:
        """A page writer that the engine still holds keeps the mapping until it is dropped."""
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.release()
        if self._segment is not None:
            self._segment.close()

    def _open_arena(self) -> memoryview:
        if self._arena is None:
            raise PeerLost(OVER)
        return self._arena

    def _slot_view(self, grant: SlotGrant) -> memoryview:
        """Any thread. A view that was made before `close` keeps the mapping until it is released."""
        try:
            return self._open_arena()[grant.offset : grant.offset + grant.num_bytes]
        except ValueError:  # closed between the two
            raise PeerLost(OVER) from None
