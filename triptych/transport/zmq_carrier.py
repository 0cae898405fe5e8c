"""The sending end of `zmq-ipc` and `zmq-tcp`.

    encoder: write_slot --------------------.
    engine's thread: gather, hash --> loop --'--> queue --> pump: frame after frame --> PUSH socket

One pump per link, so what a link sends keeps its order, and one clock: when the socket takes no frame for
SEND_TIMEOUT_S the peer has stopped reading, the link breaks, and all that wait on it fail. The engine's thread never
waits: it sees `is_congested` and computes for others.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import xxhash
import zmq
import zmq.asyncio

from triptych.core.errors import Aborted, NoRoom, PeerLost, TransferRefused, TriptychError
from triptych.core.grant import Grant
from triptych.faults import points
from triptych.rpc.errors import INTERNAL_MESSAGE
from triptych.transport.carrier import PageWriter, WriterEvents
from triptych.transport.data_frame import MAX_PAYLOAD_BYTES, DataHeader, PayloadKind, pack
from triptych.transport.pages import PageSource, granted_pages, pages_in
from triptych.transport.session import check_slot
from triptych.transport.slot_writer import SlotWriter
from triptych.transport.types import SlotGrant
from triptych.transport.zmq_gate import Admission, PlainAdmission

LABEL: Final = "zmq"
SEND_HIGH_WATER: Final = 16
SEND_TIMEOUT_S: Final = 10.0
CONNECT_TIMEOUT_S: Final = 4.0
KEEPALIVE_IDLE_S: Final = 30
# Above the first nothing more is computed for the link; above the second, which the steps under way and prefixes from
# the cache may reach, a grant fails. A grant alone on the link may always be as large as it is.
CONGESTED_BYTES: Final = 64 << 20
MAX_IN_FLIGHT_BYTES: Final = 1 << 30

_log = logging.getLogger(__name__)


class InFlight:
    """Bytes of a link that are gathered and not yet with the socket. Counted from two threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_bytes = 0

    def try_add(self, num_bytes: int) -> bool:
        with self._lock:
            if self.num_bytes and self.num_bytes + num_bytes > MAX_IN_FLIGHT_BYTES:
                return False
            self.num_bytes += num_bytes
            return True

    def remove(self, num_bytes: int) -> bool:
        """True when that ended a congestion."""
        with self._lock:
            was_congested = self.num_bytes > CONGESTED_BYTES
            self.num_bytes -= num_bytes
            return was_congested and self.num_bytes <= CONGESTED_BYTES


@dataclass(slots=True, eq=False)
class Parcel:
    """A run of bytes of one grant's stream, to be sent in frames."""

    header: DataHeader
    data: memoryview = field(repr=False)
    sent: Callable[[int], None]
    ended: Callable[[], None]
    is_cancelled: bool = False


class ZmqCarrier:
    """Owner of one link's data socket, its queue and its pump.

    Args:
        context: of this process's sending sockets.
        endpoint: `ipc://path` or `tcp://host:port`.
        session, session_key, arena_bytes: from the receiver's welcome.
        broken: called once when the peer takes no more data, with why.
        admission: what the socket shows when it connects; the session's key, if not given.
    """

    label = LABEL

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        session: int,
        session_key: bytes,
        arena_bytes: int,
        broken: Callable[[TriptychError], None],
        admission: Admission | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._session = session
        self._session_key = session_key
        self._arena_bytes = arena_bytes
        self._broken = broken
        self._error: TriptychError | None = None
        self._queue: deque[Parcel] = deque()
        self._wake = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None
        self._writers: set[ZmqPageWriter] = set()
        self._slots: dict[Parcel, asyncio.Future[None]] = {}
        self.loop = asyncio.get_running_loop()
        self.in_flight = InFlight()
        self._socket: zmq.asyncio.Socket = context.socket(zmq.PUSH)
        self._socket.linger = 0
        self._socket.tcp_keepalive = 1  # a middlebox that forgets an idle connection would swallow frames in silence
        self._socket.tcp_keepalive_idle = KEEPALIVE_IDLE_S
        self._socket.sndhwm = SEND_HIGH_WATER
        self._socket.immediate = True  # frames wait for a peer here, where they are counted, not in a pipe to nobody
        (admission or PlainAdmission(session, session_key)).prepare(self._socket)
        self._socket.ipv6 = endpoint.startswith("tcp://[")

    async def connect(self) -> None:
        """Raises TransferRefused when nobody answers there."""
        try:
            if self._endpoint.startswith("ipc://"):
                _check_peer_socket(self._endpoint.removeprefix("ipc://"))
            self._socket.connect(self._endpoint)
            # The stubs know `poll` without arguments only.
            if not await self._socket.poll(CONNECT_TIMEOUT_S * 1e3, zmq.POLLOUT):  # type: ignore[call-arg]
                raise TransferRefused("the receiver's data socket cannot be reached from here")
        except zmq.ZMQError as error:
            self.close()
            raise TransferRefused("the receiver's data socket cannot be reached from here") from error
        except BaseException:
            self.close()
            raise
        self._pump = asyncio.create_task(self._run(), name="transfer-pump")

    async def write_slot(self, grant: SlotGrant, data: memoryview) -> None:
        check_slot(grant, len(data), self._arena_bytes)
        future: asyncio.Future[None] = self.loop.create_future()
        header = self._header(PayloadKind.SLOT, grant.ticket, grant.capability, grant.generation)
        parcel = Parcel(header, data, lambda _: None, lambda: _resolve(future))
        self._slots[parcel] = future
        try:
            self.send(parcel)
            await future
        finally:
            del self._slots[parcel]
            parcel.is_cancelled = True

    def slot_writer(self, grant: SlotGrant) -> SlotWriter | None:
        """The slot is reached by frames only."""
        return None

    def page_writer(self, ticket: int, grant: Grant, source: PageSource, events: WriterEvents) -> PageWriter:
        self.check()
        pages = granted_pages(grant, pages_in(self._arena_bytes, source.layout))
        header = self._header(PayloadKind.PAGES, ticket, grant.capability, grant.generation)
        writer = ZmqPageWriter(self, header, source, events, len(pages))
        self._writers.add(writer)
        return writer

    def close(self) -> None:
        self._fail(PeerLost("the session to the other worker is over"))
        if self._pump is not None:
            self._pump.cancel()
        self._socket.close(0)

    def check(self) -> None:
        """Raises what broke the link, or PeerLost."""
        if self._error is not None:
            raise type(self._error)(self._error.message)

    def send(self, parcel: Parcel) -> None:
        """On the event loop. Raises what broke the link."""
        self.check()
        self._queue.append(parcel)
        self._wake.set()

    def relieved(self) -> None:
        for writer in list(self._writers):
            writer.events.relieved()

    def forget(self, writer: ZmqPageWriter) -> None:
        self._writers.discard(writer)

    def _header(self, kind: PayloadKind, ticket: int, capability: bytes, generation: int) -> DataHeader:
        return DataHeader(kind, self._session, self._session_key, ticket, capability, generation, 0, 0)

    async def _run(self) -> None:
        while True:
            while not self._queue:
                self._wake.clear()
                await self._wake.wait()
            try:
                await self._send(self._queue.popleft())
            except TimeoutError:
                return self._break(PeerLost("the other worker has stopped taking data"))
            except zmq.ZMQError:
                return self._break(PeerLost("the data socket to the other worker broke"))
            except TriptychError as error:
                return self._break(error)
            except Exception:
                _log.exception("data could not be sent")
                return self._break(TriptychError(INTERNAL_MESSAGE))

    async def _send(self, parcel: Parcel) -> None:
        size = len(parcel.data)
        for start in range(0, size, MAX_PAYLOAD_BYTES):
            payload = parcel.data[start : start + MAX_PAYLOAD_BYTES]
            await points.passing_async("link.before_frame", num_bytes=len(payload))
            if parcel.is_cancelled:
                parcel.sent(size - start)
                return
            header = replace(parcel.header, offset=parcel.header.offset + start, length=len(payload))
            async with asyncio.timeout(SEND_TIMEOUT_S):
                # Without a copy: libzmq holds the payload until it is out, and nobody changes it.
                await self._socket.send_multipart([pack(header, payload), payload], copy=False)
            parcel.sent(len(payload))
            await asyncio.sleep(0)  # a socket that takes all at once must not keep the loop from anything else
        parcel.ended()

    def _break(self, error: TriptychError) -> None:
        self._fail(error)
        self._broken(error)

    def _fail(self, error: TriptychError) -> None:
        if self._error is not None:
            return
        self._error = error
        self._queue.clear()
        for future in self._slots.values():
            if not future.done():
                future.set_exception(type(error)(error.message))
        for writer in list(self._writers):
            writer.fail(error)


class ZmqPageWriter:
    """Implements `PageWriter`: pages are gathered on the engine's thread and sent by the carrier's pump.

    `_offset` and `_digest` belong to the engine's thread until `flush`, which comes after its last copy.
    """

    def __init__(
        self, carrier: ZmqCarrier, header: DataHeader, source: PageSource, events: WriterEvents, num_pages: int
    ) -> None:
        self.events = events
        self._carrier = carrier
        self._header = header
        self._source = source
        self._room_bytes = num_pages * source.layout.page_bytes
        self._offset = 0
        self._digest = xxhash.xxh3_64()
        self._pending: set[Parcel] = set()
        self._error: TriptychError | None = None
        self._is_cancelled = False
        self._idle = asyncio.Event()

    @property
    def is_congested(self) -> bool:
        return not self._is_over and self._carrier.in_flight.num_bytes > CONGESTED_BYTES

    def copy(self, pages: Sequence[int], first: int) -> int:
        if not pages:
            return 0
        page_bytes = self._source.layout.page_bytes
        num_bytes = len(pages) * page_bytes
        if self._is_over:
            return num_bytes
        if first * page_bytes != self._offset or self._offset + num_bytes > self._room_bytes:
            self._post(self.fail, TransferRefused("pages were not written in order, or beyond the grant"))
            return num_bytes
        if not self._carrier.in_flight.try_add(num_bytes):
            self._post(self.fail, NoRoom("the network to the decode worker is slower than prefill; try again later"))
            return num_bytes
        data = self._source.gather(pages).reshape(-1).data
        self._digest.update(data)
        header = replace(self._header, offset=self._offset)
        self._offset += num_bytes
        self._post(self._send, header, data)
        return num_bytes

    async def flush(self) -> int | None:
        """Raises what kept the pages from being sent. What was copied before is in the queue by now: the commit's own
        event took the same way to the loop, later."""
        while self._pending and not self._is_over:
            self._idle.clear()
            await self._idle.wait()
        self._carrier.forget(self)
        if self._error is not None:
            raise self._error
        if self._is_cancelled:
            raise Aborted("the transfer was given up")
        self._carrier.check()
        return self._digest.intdigest()

    def cancel(self) -> None:
        self._is_cancelled = True
        self._idle.set()
        for parcel in self._pending:
            parcel.is_cancelled = True
        self._carrier.forget(self)

    async def settle(self) -> None:
        """Late frames find no grant."""

    def fail(self, error: TriptychError) -> None:
        """On the event loop. The rest of the grant's pages is not sent."""
        if self._error is not None:
            return
        self._error = error
        self.cancel()
        self.events.failed(error)

    @property
    def _is_over(self) -> bool:
        return self._is_cancelled or self._error is not None

    def _post(self, action: Callable[..., None], *args: object) -> None:
        try:
            self._carrier.loop.call_soon_threadsafe(action, *args)
        except RuntimeError:  # the loop is closed: the process is going down
            self._is_cancelled = True

    def _send(self, header: DataHeader, data: memoryview) -> None:
        parcel = Parcel(header, data, self._sent, lambda: self._ended(parcel))
        try:
            if self._is_over:
                raise self._error or PeerLost("the transfer was given up")
            self._pending.add(parcel)
            self._carrier.send(parcel)
        except TriptychError as error:
            self._pending.discard(parcel)
            self._sent(len(data))
            self.fail(error)

    def _sent(self, num_bytes: int) -> None:
        if self._carrier.in_flight.remove(num_bytes):
            self._carrier.relieved()

    def _ended(self, parcel: Parcel) -> None:
        self._pending.discard(parcel)
        self._idle.set()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _check_peer_socket(path: str) -> None:
    """Raises TransferRefused unless it is a socket of this user that others cannot reach."""
    try:
        found = os.lstat(path)
    except OSError as error:
        raise TransferRefused("the receiver's data socket is not on this host") from error
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise TransferRefused("the receiver's data socket belongs to someone else")
