"""The sending end of `cuda_ipc`: copies on a side stream into the receiver's device memory.

    encoder: write_slot, slot_writer-.
    engine's thread: gather on GPU --'--> side stream --> event --> flush --> commit

A commit or an abort tells the receiver that nothing more is written. So both wait for the events of what was launched,
also when whoever waits is cancelled. A device that completes nothing breaks the link: then the mapping itself, by its
lease, tells the receiver how long its memory is in danger.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Protocol, runtime_checkable

import numpy as np
import torch

from triptych.core.errors import Aborted, NoRoom, PeerLost, TransferRefused, TriptychError
from triptych.core.grant import Grant
from triptych.rpc.errors import INTERNAL_MESSAGE
from triptych.transport.carrier import PageWriter, WriterEvents
from triptych.transport.device import DeviceError, DeviceEvent
from triptych.transport.device_arena import ImportedArena, is_done
from triptych.transport.layout import checksum64
from triptych.transport.names import CUDA_IPC
from triptych.transport.pages import PageSource, granted_pages, pages_in
from triptych.transport.session import check_slot
from triptych.transport.slot_writer import INLINE_CHECKSUM_BYTES, SlotWriter, WriteGate, count_written, size_bytes
from triptych.transport.types import SlotGrant

COPY_TIMEOUT_S: Final = 15.0
# Gathered pages take memory until they are copied. As in `zmq_carrier.py`, but for one grant.
CONGESTED_BYTES: Final = 64 << 20
MAX_IN_FLIGHT_BYTES: Final = 1 << 30
_POLL_MIN_S: Final = 0.0002
_POLL_MAX_S: Final = 0.004

_log = logging.getLogger(__name__)


@runtime_checkable
class DevicePages(Protocol):
    """A `PageSource` whose pool is on a device."""

    def gather_cells(self, pages: Sequence[int]) -> torch.Tensor:
        """As `gather`, but uint8 on the pool's device, and enqueued only."""
        ...


class DeviceCarrier:
    """Implements `Carrier`. Owner of one link's mapping. `broken` is called when the device completes nothing."""

    label = CUDA_IPC

    def __init__(self, arena: ImportedArena, broken: Callable[[TriptychError], None]) -> None:
        self.arena = arena
        self.loop = asyncio.get_running_loop()
        self._broken = broken

    async def write_slot(self, grant: SlotGrant, data: memoryview) -> None:
        check_slot(grant, len(data), self.arena.num_bytes)
        array = np.frombuffer(data, dtype=np.uint8)
        source = torch.from_numpy(array if array.flags.writeable else array.copy())  # torch warns of the others

        def copy(memory: torch.Tensor) -> None:
            self.arena.driver.copy_async(_slot_of(memory, grant), source)

        try:
            event = self.launched(copy)
        except DeviceError as error:
            raise self.failed(error) from error
        await self.completed(event)

    def slot_writer(self, grant: SlotGrant) -> SlotWriter | None:
        check_slot(grant, grant.num_bytes, self.arena.num_bytes)
        return DeviceSlotWriter(self, grant)

    def page_writer(self, ticket: int, grant: Grant, source: PageSource, events: WriterEvents) -> PageWriter:
        pages = granted_pages(grant, pages_in(self.arena.num_bytes, source.layout))
        return DevicePageWriter(self, source, events, pages)

    async def slot_checksum(self, grant: SlotGrant) -> int:
        """Over what is in the receiver's memory. Raises PeerLost or TransferRefused."""
        host = torch.empty(grant.num_bytes, dtype=torch.uint8)

        def copy(memory: torch.Tensor) -> None:
            self.arena.driver.copy_async(host, _slot_of(memory, grant))

        try:
            event = self.launched(copy)
        except DeviceError as error:
            raise self.failed(error) from error
        await self.completed(event)
        data: memoryview = host.numpy().data
        return checksum64(data) if len(data) <= INLINE_CHECKSUM_BYTES else await asyncio.to_thread(checksum64, data)

    def launched(self, work: Callable[[torch.Tensor], None]) -> DeviceEvent:
        """As `ImportedArena.launch`. Whatever else goes wrong is a failure of the device, too: part of the work may be
        under way, and nobody has its event."""
        try:
            return self.arena.launch(work)
        except (PeerLost, DeviceError):
            raise
        except Exception as error:
            _log.exception("copies to another worker's device memory could not be launched")
            raise DeviceError("copies could not be launched") from error

    async def completed(self, event: DeviceEvent) -> None:
        """Returns, or is cancelled, when the event has completed, not before. Raises TransferRefused when it does
        not."""
        try:
            await _completed(event)
        except DeviceError as error:
            raise self.failed(error) from error

    def post(self, action: Callable[..., object], *args: object) -> None:
        """To the event loop, from any thread."""
        with suppress(RuntimeError):  # the loop is closed: the process is going down
            self.loop.call_soon_threadsafe(action, *args)

    def close(self) -> None:
        self.arena.close()

    def failed(self, error: DeviceError) -> TransferRefused:
        """Breaks the link. On the event loop. It is no PeerLost: the fault is on this side, as far as anybody knows,
        and another receiver would fare no better."""
        _log.error("copies to another worker's device memory failed", extra={"reason": str(error)})
        refused = TransferRefused("the device of a worker failed while it wrote to another worker's memory")
        self._broken(refused)
        return refused


class DeviceSlotWriter:
    """Implements `SlotWriter`: the thread that has the rows launches the copy, after the kernels that made them."""

    def __init__(self, carrier: DeviceCarrier, grant: SlotGrant) -> None:
        self._carrier = carrier
        self._grant = grant
        self._gate = WriteGate()
        self._event: DeviceEvent | None = None
        self._source: torch.Tensor | None = None

    def write(self, rows: torch.Tensor) -> bool:
        if size_bytes(rows) != self._grant.num_bytes or not self._gate.try_begin():
            return False
        try:
            self._source = rows.contiguous().view(torch.uint8).view(-1)  # kept until the copy has completed
            self._event = self._carrier.launched(self._copy_in)
        except DeviceError as error:
            self._carrier.post(self._carrier.failed, error)
            return False
        except PeerLost:
            return False
        except Exception:
            _log.exception("an embedding could not be copied to its slot")
            return False
        finally:
            self._gate.end()
        count_written(self._carrier.label, self._grant.num_bytes)
        return True

    async def finish(self) -> int:
        assert self._event is not None, "nothing was written"
        await self._carrier.completed(self._event)
        self._source = None
        return await self._carrier.slot_checksum(self._grant)

    def revoke(self) -> None:
        self._gate.revoke()

    @property
    def is_writing(self) -> bool:
        return self._gate.is_writing or not (self._event is None or is_done(self._event))

    async def settle(self) -> None:
        await self._gate.settle()
        if self._event is not None:
            with suppress(PeerLost, TransferRefused):  # then the link is broken, and no abort goes out by it
                await self._carrier.completed(self._event)

    def _copy_in(self, memory: torch.Tensor) -> None:
        assert self._source is not None
        self._carrier.arena.driver.copy_async(_slot_of(memory, self._grant), self._source)


class DevicePageWriter:
    """Implements `PageWriter`. After `cancel` nothing is launched; after `settle` nothing is under way either."""

    def __init__(self, carrier: DeviceCarrier, source: PageSource, events: WriterEvents, pages: Sequence[int]) -> None:
        self._carrier = carrier
        self._source = source
        self._events = events
        self._pages = pages
        self._lock = threading.Lock()
        self._running: list[tuple[DeviceEvent, int]] = []
        self._error: TriptychError | None = None
        self._is_cancelled = False
        self._watcher: asyncio.Task[None] | None = None

    @property
    def is_congested(self) -> bool:
        with self._lock:
            return not self._is_cancelled and self._in_flight_bytes() > CONGESTED_BYTES

    def copy(self, pages: Sequence[int], first: int) -> int:
        if not pages:
            return 0
        num_bytes = len(pages) * self._source.layout.page_bytes
        try:
            with self._lock:
                self._launch(pages, first, num_bytes)
        except TriptychError as error:
            self._carrier.post(self._fail, error)
        except DeviceError as error:
            self._carrier.post(self._fail_with_device, error)
        except Exception:
            _log.exception("pages could not be copied")
            self._carrier.post(self._fail, TriptychError(INTERNAL_MESSAGE))
        return num_bytes

    async def flush(self) -> int | None:
        await self._all_completed()
        if self._error is not None:
            raise self._error
        if self._is_cancelled:
            raise Aborted("the transfer was given up")
        return None

    async def settle(self) -> None:
        with suppress(PeerLost, TransferRefused):  # then the link is broken, and no abort goes out by it
            await self._all_completed()

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True

    def _launch(self, pages: Sequence[int], first: int, num_bytes: int) -> None:
        """Under the lock, so that `cancel` returns only when this is in the list of what is under way."""
        if self._is_cancelled:
            return
        in_flight = self._in_flight_bytes()
        if in_flight and in_flight + num_bytes > MAX_IN_FLIGHT_BYTES:
            raise NoRoom("the decode worker's device is slower than prefill; try again later")
        layout, targets = self._source.layout, list(self._pages[first : first + len(pages)])
        cells = _gathered(self._source, pages)

        def scatter(memory: torch.Tensor) -> None:
            planes = memory.view(layout.num_planes, -1, layout.cell_bytes)
            self._carrier.arena.driver.scatter_async(planes, targets, cells)

        self._running.append((self._carrier.launched(scatter), num_bytes))
        if in_flight + num_bytes > CONGESTED_BYTES:
            self._carrier.post(self._watch)

    def _in_flight_bytes(self) -> int:
        """Under the lock."""
        self._running = [(event, size) for event, size in self._running if not is_done(event)]
        return sum(size for _, size in self._running)

    async def _all_completed(self) -> None:
        with self._lock:
            running = list(self._running)
        for event, _ in running:
            await self._carrier.completed(event)

    def _watch(self) -> None:
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._relieve(), name="device-relief")

    async def _relieve(self) -> None:
        while self.is_congested:  # noqa: ASYNC110 - the device tells nobody
            await asyncio.sleep(_POLL_MAX_S)
        self._events.relieved()

    def _fail_with_device(self, error: DeviceError) -> None:
        self._fail(self._carrier.failed(error))

    def _fail(self, error: TriptychError) -> None:
        """On the event loop."""
        if self._error is None:
            self._error = error
            self.cancel()
            self._events.failed(error)


def _slot_of(memory: torch.Tensor, grant: SlotGrant) -> torch.Tensor:
    return memory[grant.offset : grant.offset + grant.num_bytes]


def _gathered(source: PageSource, pages: Sequence[int]) -> torch.Tensor:
    """(pages, planes, cell bytes)"""
    if isinstance(source, DevicePages):
        return source.gather_cells(pages)
    return torch.from_numpy(source.gather(pages))


async def _completed(event: DeviceEvent) -> None:
    """Cancelled only afterwards: what its caller does next may give memory back. Raises DeviceError."""
    loop = asyncio.get_running_loop()
    give_up_at_s = loop.time() + COPY_TIMEOUT_S
    cancelled: asyncio.CancelledError | None = None
    pause_s = _POLL_MIN_S
    while not event.query():
        if loop.time() > give_up_at_s:
            raise DeviceError("a copy did not complete in time")
        try:
            await asyncio.sleep(pause_s)
        except asyncio.CancelledError as error:
            cancelled = error
        pause_s = min(2 * pause_s, _POLL_MAX_S)
    if cancelled is not None:
        raise cancelled
