"""The link to another process: a session that begins over gRPC, and a carrier for the bytes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import grpc
from google.protobuf.message import DecodeError

from triptych.core.errors import DeadlineExceeded, NoRoom, PeerLost, TransferRefused, TriptychError
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.kv_format import KvTerms, PageFormat
from triptych.rpc.client import TransferStub
from triptych.rpc.errors import error_from_rpc
from triptych.transport import frames
from triptych.transport.carrier import Carrier
from triptych.transport.circuit import out_of_time
from triptych.transport.control_wire import FrameWire
from triptych.transport.in_flight import InFlightLimit
from triptych.transport.link import AskingLink, deadline
from triptych.transport.session import MAX_OUTSTANDING, Answered, SenderSession
from triptych.transport.types import (
    AbortAsked,
    Answer,
    ArenaKind,
    Asked,
    BindAsked,
    Bound,
    Endpoint,
    SlotAsked,
    SlotGrant,
)
from triptych.transport.ways import WayBlocked, Ways
from triptych.wire.v1 import transfer_pb2 as wire

CONNECT_TIMEOUT_S: Final = 10.0
# A bind, a commit or an abort waits for nothing but the receiver itself.
SILENT_AFTER_S: Final = 10.0
_ANSWERED_AT_ONCE: Final = ("slot_request", "bind_request", "commit")
OVER: Final = "the session to the other worker is over"

_log = logging.getLogger(__name__)


class Stream(Protocol):
    """The part of a gRPC bidirectional call that a link uses. `read` answers no frame at the end of the stream."""

    async def write(self, request: wire.SessionRequest) -> None: ...

    async def read(self) -> object: ...

    def cancel(self) -> bool: ...


def unheard(*_: object) -> None:
    """For those who do not care how a receiver is."""


@dataclass(frozen=True, slots=True)
class PeerEvents:
    """What a link tells of its receiver: that it `answered`, or why nothing should be sent there for a while."""

    answered: Callable[[], None] = unheard
    failed: Callable[[str], None] = unheard


class ReceiverLink(AskingLink):
    """A link over the Transfer service: bytes as the two agree in the greeting; control frames by gRPC, or after the
    greeting by the control socket of a receiver on this host.

    Owns the stream, the socket, the carrier and the requests that wait for an answer. `connect` before anything else.
    """

    def __init__(
        self,
        me: Endpoint,
        receiver: WorkerRef,
        kind: ArenaKind,
        layout_fingerprint: bytes,
        kv: KvTerms | None = None,
        events: PeerEvents | None = None,
        in_flight: InFlightLimit | None = None,
    ) -> None:
        super().__init__(in_flight)
        self._events = events or PeerEvents()
        self._session = SenderSession(me, receiver, kind, layout_fingerprint, kv)
        self._page_format: PageFormat | None = None
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._outgoing: asyncio.Queue[wire.SessionRequest] = asyncio.Queue(maxsize=2 * MAX_OUTSTANDING)
        self._bytes: Carrier | None = None
        self._call: Stream | None = None
        self._wire: FrameWire | None = None
        self._is_behind = False
        self._pump: asyncio.Task[None] | None = None

    async def connect(self, stub: TransferStub, ways: Ways, *, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Greets the receiver and gets at its arena.

        Raises:
            WayBlocked: the transport that both agreed on does not work between them.
            TransferRefused: layouts differ, or no transport is shared.
            PeerLost, DeadlineExceeded: the receiver is not there, or is another process by now.
        """
        call: Stream = stub.Session(None)
        try:
            welcome = await self._greet(call, ways.curve_key, timeout_s)
            self._page_format = welcome.pages
            self._bytes = await self._open_way(ways, welcome)
            await self._join(ways, welcome)
        except BaseException:
            call.cancel()
            self._end()
            raise
        self._call = call
        self._pump = asyncio.create_task(self._run(call), name="transfer-link")

    @property
    def page_format(self) -> PageFormat:
        assert self._page_format is not None, "this link goes to a KV pool and was welcomed"
        return self._page_format

    def _send_abort(self, ref: AttemptRef, grant_id: str | None, reason: str) -> None:
        """A link that cannot even queue an abort is broken, and closes."""
        try:
            _, frame = self._session.ask(AbortAsked(ref, grant_id, printable(reason)))
            if not self._say(frame):
                self._outgoing.put_nowait(frame)
        except PeerLost:
            return  # the receiver frees everything when the session ends
        except (NoRoom, asyncio.QueueFull):
            _log.warning("a receiver answers too slowly: closing the link")
            self._break()

    async def close(self) -> None:
        self._break()
        if self._pump is not None:
            await asyncio.gather(self._pump, return_exceptions=True)
        self._end()

    async def _greet(self, call: Stream, curve_key: bytes, timeout_s: float) -> frames.Welcome:
        try:
            async with asyncio.timeout(timeout_s):
                with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
                    await call.write(self._session.hello(curve_key))  # when it fails, `read` knows why
                frame = await call.read()
        except TimeoutError:
            raise DeadlineExceeded("a worker did not answer the greeting in time") from None
        except grpc.aio.AioRpcError as err:
            raise error_from_rpc(err) from err
        if not isinstance(frame, wire.SessionResponse):
            raise PeerLost(OVER)
        welcome = self._session.welcome(frame)
        if isinstance(welcome, TriptychError):
            raise welcome
        return welcome

    async def _ask(self, asked: Asked, timeout_s: float) -> tuple[int, Answer]:
        sequence, frame = self._session.ask(asked)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[sequence] = future
        is_patient = isinstance(asked, SlotAsked) or timeout_s < SILENT_AFTER_S  # room may be long in coming
        tell = unheard if is_patient else partial(self._peer_failed, "silent")
        try:
            with out_of_time(tell, timeout_s):
                async with deadline(timeout_s):
                    if not self._say(frame):
                        await self._outgoing.put(frame)
                    return sequence, await future
        finally:
            self._waiting.pop(sequence, None)

    async def _run(self, call: Stream) -> None:
        """The session's life. Ends with the stream, whoever ends it."""
        try:
            async with asyncio.TaskGroup() as tasks:
                writer = tasks.create_task(self._write(call), name="transfer-link-write")
                await self._read(call)
                writer.cancel()
        except* (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            pass  # the stream broke: those who wait learn it below
        finally:
            call.cancel()
            self._end()

    def _say(self, frame: wire.SessionRequest) -> bool:
        """Whether it could leave at once; else it has to wait for its turn."""
        if self._wire is None or self._is_behind or not self._wire.has_room or not self._outgoing.empty():
            return False
        self._wire.write(frame.SerializeToString())
        if frame.WhichOneof("kind") in _ANSWERED_AT_ONCE:
            self._wire.wakefulness.expect()
        return True

    async def _write(self, call: Stream) -> None:
        while True:
            frame = await self._outgoing.get()
            if self._wire is None:
                await call.write(frame)
            else:
                self._is_behind = True  # sequences must ascend: nobody may pass this frame
                await self._wire.drained()
                self._wire.write(frame.SerializeToString())
                self._is_behind = False

    async def _read(self, call: Stream) -> None:
        while isinstance(frame := await call.read(), wire.SessionResponse):
            self._take(frame)

    def _take(self, frame: wire.SessionResponse) -> None:
        self._events.answered()
        answered = self._session.receive(frame)
        if answered is None:
            _log.warning("a receiver answered what nobody asked")
        else:
            self._deliver(answered)

    def _take_raw(self, raw: bytes) -> None:
        try:
            self._take(wire.SessionResponse.FromString(raw))
        except DecodeError:
            _log.warning("a receiver sent what is no frame: closing the link")
            self._break()

    async def _join(self, ways: Ways, welcome: frames.Welcome) -> None:
        joined = await ways.join(welcome)
        if joined is not None:
            joined.take, joined.lost = self._take_raw, self._break
            self._wire = joined

    def _deliver(self, answered: Answered) -> None:
        future = self._waiting.pop(answered.sequence, None)
        if future is None or future.done():
            self._give_back(answered)
        elif isinstance(answered.answer, TriptychError):
            future.set_exception(answered.answer)
        else:
            future.set_result(answered.answer)

    def _give_back(self, late: Answered) -> None:
        """Nobody waits any more: what was granted goes back."""
        if isinstance(late.asked, SlotAsked) and isinstance(late.answer, SlotGrant):
            self.abort_soon(late.asked.ref, None, "granted too late")
        elif isinstance(late.asked, BindAsked) and isinstance(late.answer, Bound):
            self.abort_soon(late.asked.ref, late.asked.grant_id, "bound too late")

    def _break(self) -> None:
        if self._call is not None:
            self._call.cancel()
        if self._pump is not None:
            self._pump.cancel()

    def _end(self) -> None:
        """Idempotent. From here on the receiver may learn that our mapping is gone: when no page writer is left."""
        self._session.close()
        self.closed.set()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(PeerLost(OVER))
        self.in_flight.close(OVER)
        if self._wire is not None:
            self._wire.close()
        self._revoke_slots(None)  # one that is being written keeps the mapping until it has been
        if self._bytes is not None:
            self._bytes.close()  # before the writers are dropped, so that they can say what happened
        self._drop_writers()

    def _carrier(self) -> Carrier:
        if self._bytes is None or self.closed.is_set():
            raise PeerLost(OVER)
        return self._bytes

    async def _open_way(self, ways: Ways, welcome: frames.Welcome) -> Carrier:
        try:
            return await ways.open(welcome, self._way_broke)
        except TransferRefused as error:
            raise WayBlocked(welcome.transport, error) from error

    def _peer_failed(self, reason: str) -> None:
        self.in_flight.turn_away("a worker takes no data just now")  # nobody is to find it out once more
        self._events.failed(reason)

    def _way_broke(self, error: TriptychError) -> None:
        if isinstance(error, PeerLost):
            self._peer_failed("stalled")
        _log.warning("the way to a receiver broke: closing the link", extra={"code": error.code})
        self._break()


def printable(reason: str) -> str:
    """A reason as the wire takes it: one line, bounded."""
    return "".join(char if char.isprintable() else " " for char in reason[: frames.MAX_REASON_CHARS])
