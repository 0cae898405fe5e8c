"""The sender's handle on one receiver's arena: ask for room, write, commit."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Final, Protocol

import grpc

from triptych.core.errors import DeadlineExceeded, NoRoom, PeerLost, TransferRefused, TriptychError
from triptych.core.grant import Grant
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.plan import EmbeddingSource, Token
from triptych.obs import metrics
from triptych.rpc.client import TransferStub
from triptych.rpc.errors import error_from_rpc
from triptych.transport import frames
from triptych.transport.session import MAX_OUTSTANDING, SHM, Answered, SenderSession, check_slot
from triptych.transport.shm import SharedSegment
from triptych.transport.types import (
    AbortAsked,
    Answer,
    ArenaKind,
    Asked,
    BindAsked,
    Bound,
    EmbeddingCommitted,
    Endpoint,
    HaveIt,
    KvCommitted,
    SlotAsked,
    SlotGrant,
)
from triptych.wire.v1 import transfer_pb2 as wire

DEFAULT_TIMEOUT_S: Final = 30.0
CONNECT_TIMEOUT_S: Final = 10.0
_OVER: Final = "the session to the other worker is over"

_log = logging.getLogger(__name__)


class Stream(Protocol):
    """The part of a gRPC bidirectional call that a link uses. `read` answers no frame at the end of the stream."""

    async def write(self, request: wire.SessionRequest) -> None: ...

    async def read(self) -> object: ...

    def cancel(self) -> bool: ...


class Link(Protocol):
    """One session to one receiver. It breaks once; then every call raises PeerLost and a new link is needed.

    Every call may raise the TriptychError that the receiver answered, PeerLost, or DeadlineExceeded.
    """

    @property
    def transport(self) -> str:
        """`shm` or `inproc`: the label of the transfer metrics."""
        ...

    @property
    def closed(self) -> asyncio.Event:
        """Set when the session is over, whoever ended it. Drop views of the arena then."""
        ...

    async def abort(self, ref: AttemptRef, grant_id: str | None, reason: str) -> None:
        """Gives up what `ref` (or the one grant) holds at the receiver. Call it only after the last write into it has
        ended. Never blocks, never raises."""
        ...

    async def close(self) -> None:
        """Idempotent."""
        ...


class EmbeddingLink(Link, Protocol):
    async def request_slot(
        self,
        ref: AttemptRef,
        item_index: int,
        identity: bytes,
        num_tokens: int,
        num_bytes: int,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> SlotGrant | HaveIt:
        """Waits for room. Cancelled or late, it aborts `ref` at the receiver, so nothing leaks."""
        ...

    def slot_view(self, grant: SlotGrant) -> memoryview:
        """The slot's bytes, writable. Raises TransferRefused when the grant lies outside the arena.

        Ask for it when you write and keep it no longer: it may be revoked (ValueError on use) when the link closes.
        """
        ...

    async def commit_embedding(
        self,
        ref: AttemptRef,
        item_index: int,
        grant: SlotGrant,
        source: EmbeddingSource,
        checksum: int,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Returns when the receiver took it; raises TransferRefused. `checksum` is `layout.checksum64` of the slot."""
        ...


class KvLink(Link, Protocol):
    @property
    def arena_buffer(self) -> memoryview:
        """The receiver's whole page pool, writable."""
        ...

    async def bind_kv(self, ref: AttemptRef, grant: Grant, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Grant:
        """The grant with `groups` and `generation` filled in. Cancelled or late, it aborts the grant."""
        ...

    async def commit_kv(
        self,
        ref: AttemptRef,
        grant: Grant,
        num_tokens: int,
        num_bytes: int,
        first_token: Token,
        position_delta: int,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Returns when the receiver took it; raises TransferRefused. `grant` is what `bind_kv` answered."""
        ...


class ReceiverLink:
    """A link over the Transfer service: control frames by gRPC, bytes through the receiver's mapped segment.

    Owns the stream, the mapping and the requests that wait for an answer. `connect` before anything else.
    """

    def __init__(self, me: Endpoint, receiver: WorkerRef, kind: ArenaKind, layout_fingerprint: bytes) -> None:
        offered = replace(me, transports=tuple(entry for entry in me.transports if entry == SHM))
        self._session = SenderSession(offered, receiver, kind, layout_fingerprint)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._outgoing: asyncio.Queue[wire.SessionRequest] = asyncio.Queue(maxsize=2 * MAX_OUTSTANDING)
        self._segment: SharedSegment | None = None
        self._views: dict[int, weakref.ref[memoryview]] = {}
        self._call: Stream | None = None
        self._pump: asyncio.Task[None] | None = None
        self.closed = asyncio.Event()

    @property
    def transport(self) -> str:
        return SHM

    @property
    def arena_buffer(self) -> memoryview:
        if self._segment is None or self.closed.is_set():
            raise PeerLost(_OVER)
        return self._segment.buffer

    async def connect(self, stub: TransferStub, *, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Greets the receiver and maps its arena.

        Raises:
            TransferRefused: layouts differ, or no transport is shared.
            PeerLost, DeadlineExceeded: the receiver is not there, or is another process by now.
        """
        call: Stream = stub.Session(None)
        try:
            welcome = await self._greet(call, timeout_s)
            self._segment = SharedSegment.open(
                welcome.segment_name, welcome.segment_bytes, mapping_id=welcome.mapping_id
            )
        except BaseException:
            call.cancel()
            self._end()
            raise
        self._call = call
        self._pump = asyncio.create_task(self._run(call), name="transfer-link")

    async def request_slot(
        self,
        ref: AttemptRef,
        item_index: int,
        identity: bytes,
        num_tokens: int,
        num_bytes: int,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> SlotGrant | HaveIt:
        asked = SlotAsked(ref, item_index, identity, num_tokens, num_bytes)
        async with abort_when_given_up(self, ref, None):
            answer = await self._ask(asked, timeout_s)
        assert isinstance(answer, SlotGrant | HaveIt)
        return answer

    def slot_view(self, grant: SlotGrant) -> memoryview:
        view = view_of(self.arena_buffer, grant)
        key = id(view)
        self._views[key] = weakref.ref(view, lambda _: self._views.pop(key, None))
        return view

    async def commit_embedding(
        self,
        ref: AttemptRef,
        item_index: int,
        grant: SlotGrant,
        source: EmbeddingSource,
        checksum: int,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        await self._ask(embedding_commit(ref, item_index, grant, source, checksum), timeout_s)
        metrics.EMBEDDING_TRANSFER_BYTES.labels(transport=self.transport).inc(grant.num_bytes)

    async def bind_kv(self, ref: AttemptRef, grant: Grant, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Grant:
        async with abort_when_given_up(self, ref, grant.grant_id):
            answer = await self._ask(BindAsked(ref, grant.grant_id, grant.capability), timeout_s)
        assert isinstance(answer, Bound)
        return bound_grant(grant, answer)

    async def commit_kv(
        self,
        ref: AttemptRef,
        grant: Grant,
        num_tokens: int,
        num_bytes: int,
        first_token: Token,
        position_delta: int,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        await self._ask(kv_commit(ref, grant, num_tokens, num_bytes, first_token, position_delta), timeout_s)
        metrics.KV_TRANSFER_BYTES.labels(transport=self.transport).inc(num_bytes)

    async def abort(self, ref: AttemptRef, grant_id: str | None, reason: str) -> None:
        self.abort_soon(ref, grant_id, reason)

    def abort_soon(self, ref: AttemptRef, grant_id: str | None, reason: str) -> None:
        """`abort` for where nothing can be awaited. A link that cannot even queue an abort is broken, and closes."""
        try:
            _, frame = self._session.ask(AbortAsked(ref, grant_id, printable(reason)))
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

    async def _greet(self, call: Stream, timeout_s: float) -> frames.Welcome:
        try:
            async with asyncio.timeout(timeout_s):
                with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
                    await call.write(self._session.hello())  # when it fails, `read` knows why
                frame = await call.read()
        except TimeoutError:
            raise DeadlineExceeded("a worker did not answer the greeting in time") from None
        except grpc.aio.AioRpcError as err:
            raise error_from_rpc(err) from err
        if not isinstance(frame, wire.SessionResponse):
            raise PeerLost(_OVER)
        welcome = self._session.welcome(frame)
        if isinstance(welcome, TriptychError):
            raise welcome
        return welcome

    async def _ask(self, asked: Asked, timeout_s: float) -> Answer:
        sequence, frame = self._session.ask(asked)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[sequence] = future
        try:
            async with asyncio.timeout(timeout_s):
                await self._outgoing.put(frame)
                return await future
        except TimeoutError:
            raise DeadlineExceeded("a worker did not answer a transfer request in time") from None
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

    async def _write(self, call: Stream) -> None:
        while True:
            await call.write(await self._outgoing.get())

    async def _read(self, call: Stream) -> None:
        while isinstance(frame := await call.read(), wire.SessionResponse):
            answered = self._session.receive(frame)
            if answered is None:
                _log.warning("a receiver answered what nobody asked")
            else:
                self._deliver(answered)

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
        """Idempotent. From here on the receiver may learn that our mapping is gone, as soon as no view is left."""
        self._session.close()
        self.closed.set()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(PeerLost(_OVER))
        self._revoke_views()
        if self._segment is not None:
            self._segment.close()

    def _revoke_views(self) -> None:
        """So that a view kept alive by a traceback does not keep the mapping, and with it the receiver's slots."""
        for known in list(self._views.values()):
            view = known()
            if view is not None:
                with suppress(BufferError):  # an array over it lives on, and the mapping with it
                    view.release()


class _CanAbort(Protocol):
    def abort_soon(self, ref: AttemptRef, grant_id: str | None, reason: str) -> None: ...


@asynccontextmanager
async def abort_when_given_up(link: _CanAbort, ref: AttemptRef, grant_id: str | None) -> AsyncIterator[None]:
    """Aborts at the receiver when the waiting caller was cancelled or ran out of time."""
    try:
        yield
    except (asyncio.CancelledError, DeadlineExceeded):
        link.abort_soon(ref, grant_id, "the sender gave up waiting")
        raise


def view_of(arena: memoryview, grant: SlotGrant) -> memoryview:
    """The grant's bytes. Raises TransferRefused when they lie outside the arena."""
    check_slot(grant, grant.num_bytes, arena.nbytes)
    return arena[grant.offset : grant.offset + grant.num_bytes]


def bound_grant(grant: Grant, bound: Bound) -> Grant:
    """Raises TransferRefused when a group has more pages than the credit was for (a credit of 0 counts none)."""
    for group in bound.groups:
        if grant.num_pages and sum(region.num_pages for region in group.regions) > grant.num_pages:
            raise TransferRefused("the receiver bound more pages than it had granted")
    return replace(grant, generation=bound.generation, groups=bound.groups)


def embedding_commit(
    ref: AttemptRef, item_index: int, grant: SlotGrant, source: EmbeddingSource, checksum: int
) -> EmbeddingCommitted:
    return EmbeddingCommitted(
        ref, item_index, grant.slot_id, grant.generation, grant.capability, grant.num_bytes, checksum, source
    )


def kv_commit(
    ref: AttemptRef, grant: Grant, num_tokens: int, num_bytes: int, first_token: Token, position_delta: int
) -> KvCommitted:
    return KvCommitted(
        ref, grant.grant_id, grant.generation, grant.capability, num_tokens, num_bytes, first_token, position_delta
    )


def printable(reason: str) -> str:
    """A reason as the wire takes it: one line, bounded."""
    return "".join(char if char.isprintable() else " " for char in reason[: frames.MAX_REASON_CHARS])
