"""The sending end of `nixl`: bytes go to staging memory, block by block, and from there into the receiver's arena.

    encoder: write_slot --------------------.
    engine's thread: gather, hash --> loop --'--> queue --> pump: copy to a free block -> write -> done? -> block free

Only the staging memory is known to the network card: what is sent may lie anywhere, is free as soon as it is copied,
and no more is under way than there are blocks. A write that was begun cannot be taken back. So a commit or an abort,
which tell the receiver that nothing more is written, wait for those that were; when they take too long the link breaks,
and the receiver revokes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import xxhash

from triptych.core.errors import Aborted, NoRoom, PeerLost, TransferRefused, TriptychError
from triptych.core.grant import Grant
from triptych.faults import points
from triptych.kv.pages import PageLayout
from triptych.rpc.errors import INTERNAL_MESSAGE
from triptych.transport.carrier import PageWriter, WriterEvents
from triptych.transport.names import NIXL
from triptych.transport.nixl_api import NixlError, NixlSource, NixlTransfer, Runs
from triptych.transport.pages import ByteArray, PageSource, granted_pages, pages_in
from triptych.transport.session import check_slot
from triptych.transport.types import SlotGrant
from triptych.transport.zmq_carrier import CONGESTED_BYTES, InFlight

# A block is copied on the event loop: small enough for everybody else there.
BLOCK_BYTES: Final = 1 << 20
NUM_BLOCKS: Final = 16
STAGING_BYTES: Final = BLOCK_BYTES * NUM_BLOCKS
# No write is done for so long: the peer has stopped.
STALLED_S: Final = 10.0
# Small writes are done within microseconds: for the first looks the loop only lets others run in between.
_BUSY_LOOKS: Final = 200
_POLL_MIN_S: Final = 0.0002
_POLL_MAX_S: Final = 0.002

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What one block takes. `data` is uint8 of any shape and strides; in C order it goes to `runs`, one behind the
    other. `left` is called when it is copied, or dropped."""

    delivery: Delivery
    data: ByteArray = field(repr=False)
    runs: Runs
    left: Callable[[int], object]


class Delivery:
    """The pieces of one grant. `failed` is called when they will not all arrive."""

    def __init__(self, failed: Callable[[TriptychError], object]) -> None:
        self.failed = failed
        self.is_cancelled = False
        self._num_queued = 0
        self._num_running = 0
        self._changed = asyncio.Event()

    def queued(self, change: int) -> None:
        self._num_queued += change
        self._changed.set()

    def running(self, change: int) -> None:
        self._num_running += change
        self._changed.set()

    def cancel(self) -> None:
        """What is queued will be dropped, what is under way stays so."""
        self.is_cancelled = True
        self._changed.set()

    def end(self) -> None:
        """The link broke."""
        self._num_queued = self._num_running = 0
        self.cancel()

    async def until_sent(self) -> None:
        """Returns when nothing is queued or under way, or when it was cancelled."""
        while not self.is_cancelled and (self._num_queued or self._num_running):
            await self._wait()

    async def until_still(self) -> None:
        """Returns when nothing is under way."""
        while self._num_running:
            await self._wait()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()


@dataclass(frozen=True, slots=True)
class _Running:
    transfer: NixlTransfer
    block: int
    delivery: Delivery


class NixlCarrier:
    """Implements `Carrier`. Owner of one link's sending end, of its queue and its pump. `broken` is called once when
    the peer takes no more data, with why."""

    label = NIXL

    def __init__(self, source: NixlSource, arena_bytes: int, broken: Callable[[TriptychError], None]) -> None:
        self._source = source
        self._blocks = np.frombuffer(source.staging, dtype=np.uint8).reshape(-1, BLOCK_BYTES)
        self._free = list(range(len(self._blocks)))
        self._arena_bytes = arena_bytes
        self._broken = broken
        self._error: TriptychError | None = None
        self._queue: deque[Piece] = deque()
        self._running: list[_Running] = []
        self._writers: set[NixlPageWriter] = set()
        self._wake = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self.in_flight = InFlight()
        self._pump = asyncio.create_task(self._run(), name="nixl-pump")

    async def write_slot(self, grant: SlotGrant, data: memoryview) -> None:
        check_slot(grant, len(data), self._arena_bytes)
        errors: list[TriptychError] = []
        delivery = Delivery(errors.append)
        self.send(slot_pieces(delivery, grant, data))
        try:
            await delivery.until_sent()
        except asyncio.CancelledError:
            delivery.cancel()
            await _to_its_end(delivery.until_still())
            raise
        if errors:
            raise errors[0]

    def slot_writer(self, grant: SlotGrant) -> None:
        """The slot is in another process's memory, which cannot be reached from here."""

    def page_writer(self, ticket: int, grant: Grant, source: PageSource, events: WriterEvents) -> PageWriter:
        self.check()
        num_pages = pages_in(self._arena_bytes, source.layout)
        writer = NixlPageWriter(self, source, events, granted_pages(grant, num_pages), num_pages)
        self._writers.add(writer)
        return writer

    def close(self) -> None:
        self._fail(PeerLost("the session to the other worker is over"))

    def check(self) -> None:
        """Raises what broke the link, or PeerLost."""
        if self._error is not None:
            raise type(self._error)(self._error.message)

    def send(self, pieces: Iterable[Piece]) -> None:
        """On the event loop. Raises what broke the link."""
        self.check()
        for piece in pieces:
            piece.delivery.queued(1)
            self._queue.append(piece)
        self._wake.set()

    def relieved(self) -> None:
        for writer in list(self._writers):
            writer.events.relieved()

    def forget(self, writer: NixlPageWriter) -> None:
        self._writers.discard(writer)

    async def _run(self) -> None:
        try:
            while True:
                while not self._queue and not self._running:
                    self._wake.clear()
                    await self._wake.wait()
                await self._launch()
                await self._land()
        except NixlError as error:
            _log.error("writes to another worker's memory failed", extra={"reason": str(error)})
            self._break(PeerLost("the way to the other worker's memory broke"))
        except TriptychError as error:
            self._break(error)
        except Exception:
            _log.exception("data could not be sent")
            self._break(TriptychError(INTERNAL_MESSAGE))

    async def _launch(self) -> None:
        """As many pieces as there are blocks."""
        while self._queue and self._free:
            piece = self._queue[0]
            if not piece.delivery.is_cancelled:
                await points.passing_async("link.before_frame", num_bytes=piece.data.size)
            self._queue.popleft()
            if not piece.delivery.is_cancelled:  # looked at again: the point may take its time
                self._write(piece)
            piece.delivery.queued(-1)
            piece.left(piece.data.size)
            await asyncio.sleep(0)  # copies must not keep the loop from anything else

    def _write(self, piece: Piece) -> None:
        block = self._free.pop()
        target = self._blocks[block, : piece.data.size]
        np.copyto(target.reshape(piece.data.shape), piece.data)
        transfer = self._source.write(block * BLOCK_BYTES, piece.runs)
        piece.delivery.running(1)
        self._running.append(_Running(transfer, block, piece.delivery))

    async def _land(self) -> None:
        """Until a block is free again, or more can be launched. Raises PeerLost when nothing moves."""
        give_up_at_s, looks, pause_s = self.loop.time() + STALLED_S, 0, _POLL_MIN_S
        while self._running and not self._take_landed():
            if self.loop.time() > give_up_at_s:
                raise PeerLost("the other worker has stopped taking data")
            looks += 1
            if looks > _BUSY_LOOKS:
                pause_s = min(2 * pause_s, _POLL_MAX_S)
            await asyncio.sleep(pause_s if looks > _BUSY_LOOKS else 0)
            if self._queue and self._free:
                return

    def _take_landed(self) -> bool:
        landed = [running for running in self._running if running.transfer.is_done()]
        for running in landed:
            self._running.remove(running)
            self._free.append(running.block)
            running.delivery.running(-1)
        return bool(landed)

    def _break(self, error: TriptychError) -> None:
        if self._error is None:
            self._fail(error)
            self._broken(error)

    def _fail(self, error: TriptychError) -> None:
        """What is under way may still arrive, until the sending end is closed or the receiver revokes."""
        if self._error is not None:
            return
        self._error = error
        deliveries = {piece.delivery for piece in self._queue} | {running.delivery for running in self._running}
        self._queue.clear()
        self._running.clear()
        for delivery in deliveries:
            delivery.end()
            delivery.failed(type(error)(error.message))
        for writer in list(self._writers):
            writer.fail(error)
        self._pump.cancel()
        self.loop.run_in_executor(None, self._source.close)


class NixlPageWriter:
    """Implements `PageWriter`: pages are gathered on the engine's thread and sent by the carrier's pump.

    `_offset` and `_digest` belong to the engine's thread until `flush`, which comes after its last copy.
    """

    def __init__(
        self, carrier: NixlCarrier, source: PageSource, events: WriterEvents, pages: Sequence[int], num_pages: int
    ) -> None:
        self.events = events
        self._carrier = carrier
        self._source = source
        self._pages = pages
        self._num_pages = num_pages
        self._next = 0
        self._digest = xxhash.xxh3_64()
        self._delivery = Delivery(self.fail)
        self._error: TriptychError | None = None

    @property
    def is_congested(self) -> bool:
        return not self._delivery.is_cancelled and self._carrier.in_flight.num_bytes > CONGESTED_BYTES

    def copy(self, pages: Sequence[int], first: int) -> int:
        num_bytes = len(pages) * self._source.layout.page_bytes
        if not pages or self._delivery.is_cancelled:
            return num_bytes
        if first != self._next or first + len(pages) > len(self._pages):
            self._post(self.fail, TransferRefused("pages were not written in order, or beyond the grant"))
            return num_bytes
        if not self._carrier.in_flight.try_add(num_bytes):
            self._post(self.fail, NoRoom("the network to the decode worker is slower than prefill; try again later"))
            return num_bytes
        cells = self._source.gather(pages)
        self._digest.update(cells.reshape(-1).data)
        self._next += len(pages)
        self._post(self._send, cells, self._pages[first : self._next])
        return num_bytes

    async def flush(self) -> int | None:
        """Raises what kept the pages from arriving. What was copied before is in the queue by now: the commit's own
        event took the same way to the loop, later."""
        await self._delivery.until_sent()
        self._carrier.forget(self)
        if self._error is not None:
            raise self._error
        if self._delivery.is_cancelled:
            raise Aborted("the transfer was given up")
        self._carrier.check()
        return self._digest.intdigest()

    def cancel(self) -> None:
        self._delivery.cancel()
        self._carrier.forget(self)

    async def settle(self) -> None:
        await self._delivery.until_still()

    def fail(self, error: TriptychError) -> None:
        """On the event loop. The rest of the grant's pages is not sent."""
        if self._error is None:
            self._error = error
            self.cancel()
            self.events.failed(error)

    def _post(self, action: Callable[..., None], *args: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: the process is going down
            self._carrier.loop.call_soon_threadsafe(action, *args)

    def _send(self, cells: ByteArray, targets: Sequence[int]) -> None:
        try:
            if self._delivery.is_cancelled:
                raise self._error or PeerLost("the transfer was given up")
            layout = self._source.layout
            self._carrier.send(page_pieces(self._delivery, layout, self._num_pages, cells, targets, self._left))
        except TriptychError as error:
            self._left(cells.nbytes)
            self.fail(error)

    def _left(self, num_bytes: int) -> None:
        if self._carrier.in_flight.remove(num_bytes):
            self._carrier.relieved()


# --- what goes where --------------------------------------------------------------------------------------------------


def slot_pieces(delivery: Delivery, grant: SlotGrant, data: memoryview) -> Iterator[Piece]:
    array = np.frombuffer(data, dtype=np.uint8)
    for start in range(0, array.size, BLOCK_BYTES):
        part = array[start : start + BLOCK_BYTES]
        yield Piece(delivery, part, np.array([[grant.offset + start, part.size]]), _nobody)


def page_pieces(
    delivery: Delivery,
    layout: PageLayout,
    num_pages: int,
    cells: ByteArray,
    targets: Sequence[int],
    left: Callable[[int], object],
) -> Iterator[Piece]:
    """Of `cells`, (pages, planes, cell bytes), to pages `targets` of a pool of `num_pages`: as many whole pages in a
    block as it takes, plane after plane, so that neighbours become one run; or parts of a page that is larger."""
    step = max(1, BLOCK_BYTES // layout.page_bytes)
    for start in range(0, len(targets), step):
        runs = page_runs(layout, num_pages, targets[start : start + step])
        planes = cells[start : start + step].transpose(1, 0, 2)
        if planes.size <= BLOCK_BYTES:
            yield Piece(delivery, planes, runs, left)
            continue
        flat = planes.reshape(-1)
        for at in range(0, flat.size, BLOCK_BYTES):
            part = flat[at : at + BLOCK_BYTES]
            yield Piece(delivery, part, cut_runs(runs, at, at + part.size), left)


def page_runs(layout: PageLayout, num_pages: int, targets: Sequence[int]) -> Runs:
    """Where (planes, targets, cell bytes) lies in a pool of `num_pages`. Neighbours within a plane are one run."""
    pages = np.array(targets, dtype=np.int64)
    heads = np.flatnonzero(np.diff(pages, prepend=pages[0] - 2) != 1)
    lengths = np.diff(heads, append=len(pages)) * layout.cell_bytes
    planes = np.arange(layout.num_planes, dtype=np.int64)[:, None]
    begins = (planes * num_pages + pages[heads]) * layout.cell_bytes
    return np.stack((begins, np.broadcast_to(lengths, begins.shape)), axis=-1).reshape(-1, 2)


def cut_runs(runs: Runs, start: int, stop: int) -> Runs:
    """What of `runs` takes the bytes from `start` to `stop` of what they take together."""
    ends = np.cumsum(runs[:, 1])
    begins = ends - runs[:, 1]
    lows, highs = np.maximum(begins, start), np.minimum(ends, stop)
    cut = np.stack((runs[:, 0] + lows - begins, highs - lows), axis=1)[highs > lows]
    return np.asarray(cut, dtype=np.int64)


def _nobody(_: int) -> None:
    """Embeddings are not counted: the encoder bounds what it has computed."""


async def _to_its_end(waiting: Coroutine[object, object, None]) -> None:
    """Whoever cancels meanwhile waits, too: what its caller does next may give memory back."""
    task = asyncio.create_task(waiting)
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.shield(task)
