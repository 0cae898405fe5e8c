"""The Transfer service: drives the receivers of this process with the frames of many senders.

    frame --take--> a task of its own --answer--> outgoing queue --write--> stream, or at once --> control socket
                    abort: first cancels the tasks of its ref that still wait

The stream's coroutine only reads, and where a sender has joined by a control socket it only waits for the end. The work
lives in the conversation's own task group, so that a broken stream cancels nobody in the middle of a commit.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from triptych.core.errors import Aborted, NoRoom, PeerLost, TransferRefused, TriptychError
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.rpc.errors import INTERNAL_MESSAGE, AbortOnError
from triptych.rpc.server import MAX_MESSAGE_BYTES
from triptych.transport.control_port import ControlPort
from triptych.transport.control_wire import FrameWire
from triptych.transport.device_arena import SETTLE_S, DeviceArena
from triptych.transport.dispatch import carry_out, peer_lost
from triptych.transport.frames import answer_to_frame
from triptych.transport.landings import LandingSession, pages_landing, slot_landing
from triptych.transport.names import CUDA_IPC, NIXL, SAME_HOST, ZMQ_IPC, ZMQ_TCP
from triptych.transport.nixl_api import NixlAddress, NixlDriver
from triptych.transport.nixl_arena import Exposure, WrittenPages
from triptych.transport.receiver import Receivers
from triptych.transport.session import (
    MAX_OUTSTANDING,
    NO_CONTROL,
    NO_DATA,
    ArenaOffer,
    Greeted,
    ReceiverSession,
    State,
    Work,
)
from triptych.transport.types import (
    AbortAsked,
    Answer,
    ArenaKind,
    Asked,
    BindAsked,
    Bound,
    ControlAddress,
    DataAddress,
    EmbeddingCommitted,
    Endpoint,
    KvCommitted,
    SlotAsked,
    SlotGrant,
)
from triptych.transport.zmq_port import DataPort
from triptych.wire.v1 import transfer_pb2 as wire
from triptych.wire.v1 import transfer_pb2_grpc

# How long a greeting waits for the mapping of the same sender's previous session to go away.
SUPERSEDE_TIMEOUT_S: Final = 5.0
MAX_UNREAD: Final = 4 * MAX_OUTSTANDING
MAPPING_POLL_S: Final = 0.02
MAPPING_POLL_MAX_S: Final = 0.5
MAPPING_WARN_S: Final = 10.0

_log = logging.getLogger(__name__)
_mapping_ids = itertools.count(1)

Waiting = asyncio.Task[Answer | TriptychError]
PeerKey = tuple[WorkerRef, ArenaKind]


class TransferServicer(transfer_pb2_grpc.TransferServicer):
    """Owner of the conversations with all senders; at most one per (sender, arena).

    Args:
        me: this process, as the registry shows it; `inproc` senders never come here.
        receivers: what can be landed here.
        data_port: where data frames come in; without it `me` must not offer `zmq-*`.
        nixl: the library; without it `me` must not offer `nixl`.
        control_port: where senders of this host may go on after the greeting; without it they keep to the stream.
    """

    def __init__(
        self,
        me: Endpoint,
        receivers: Receivers,
        data_port: DataPort | None = None,
        nixl: NixlDriver | None = None,
        control_port: ControlPort | None = None,
    ) -> None:
        self._nixl = nixl
        self._me = me
        self._control_port = control_port
        self._receivers = receivers
        self._data_port = data_port
        self._talks: dict[PeerKey, Conversation] = {}
        self._lives: set[asyncio.Task[None]] = set()
        self._readers: set[asyncio.Task[None]] = set()

    async def Session(  # noqa: N802 - the name in the proto
        self, request_iterator: AsyncIterator[wire.SessionRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        talk = Conversation(self._me, self._receivers, self._data_port, context.write, self._nixl, self._control_port)
        life = self._spawn(talk.live())
        reader = asyncio.create_task(self._read(talk, life, request_iterator), name="transfer-read")
        talk.hang_up = reader.cancel
        self._readers.add(reader)
        try:
            async with AbortOnError(context):
                await _ended_by_sender(reader)
                talk.end()
                await talk.written.wait()
        finally:
            self._readers.discard(reader)
            talk.end()

    async def close(self) -> None:
        """Ends all conversations, before the arenas go away. The senders see PeerLost."""
        for reader in list(self._readers):
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        for life in list(self._lives):
            life.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)

    async def _read(
        self, talk: Conversation, life: asyncio.Task[None], frames: AsyncIterator[wire.SessionRequest]
    ) -> None:
        async for frame in frames:
            await self._take(talk, life, frame)
            if talk.is_over:
                return

    async def _take(self, talk: Conversation, life: asyncio.Task[None], frame: wire.SessionRequest) -> None:
        greeted = talk.take(frame)
        if greeted is None:
            return
        key = (greeted.greeting.sender.ref, greeted.greeting.kind)
        try:
            await self._supersede(key)
        except TriptychError as error:
            talk.refuse(greeted, error)
            return
        self._talks[key] = talk
        life.add_done_callback(lambda _: self._forget(key, talk))
        talk.welcome(greeted, await talk.expose(greeted))

    async def _supersede(self, key: PeerKey) -> None:
        """A sender greets again when its former link broke: what that one was granted must be settled first, or its
        farewell would free what the new session is granted."""
        former = self._talks.get(key)
        if former is None:
            return
        former.hang_up()
        try:
            async with asyncio.timeout(SUPERSEDE_TIMEOUT_S):
                await former.settled.wait()
        except TimeoutError:
            raise TransferRefused("the former session of this worker still has the arena mapped") from None
        if key in self._talks and self._talks[key] is not former:
            raise TransferRefused("another session of this worker was faster")

    def _forget(self, key: PeerKey, talk: Conversation) -> None:
        if self._talks.get(key) is talk:
            del self._talks[key]

    def _spawn(self, life: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(life, name="transfer-conversation")
        self._lives.add(task)
        task.add_done_callback(self._lives.discard)
        return task


async def _ended_by_sender(reader: asyncio.Task[None]) -> None:
    """Returns when the sender has said all. Raises PeerLost when we hung up: a stream whose coroutine is only cancelled
    would stay open on the wire."""
    try:
        await reader
    except asyncio.CancelledError:
        stream = asyncio.current_task()
        if stream is not None and stream.cancelling():
            raise
        raise PeerLost("the receiver has ended the session") from None


class Conversation:
    """One sender's session: its frames, the tasks that work on them, and the farewell to its receiver."""

    def __init__(
        self,
        me: Endpoint,
        receivers: Receivers,
        data_port: DataPort | None,
        write: Callable[[wire.SessionResponse], Awaitable[None]],
        nixl: NixlDriver | None = None,
        control_port: ControlPort | None = None,
    ) -> None:
        self._nixl = nixl
        self._exposure: Exposure | None = None
        self._written: WrittenPages | None = None
        self._receivers = receivers
        self._data_port = data_port
        self._control_port = control_port
        self._wire: FrameWire | None = None
        self._landings: LandingSession | None = None
        self._device: DeviceArena | None = None
        self._session = ReceiverSession(me, self._offer)
        self._write_frame = write
        self._mapping_id = next(_mapping_ids)
        self._outgoing: asyncio.Queue[wire.SessionResponse | None] = asyncio.Queue()  # at most MAX_UNREAD
        self._tasks: asyncio.TaskGroup | None = None
        self._no_more = asyncio.Event()
        self._waits: dict[AttemptRef, set[Waiting]] = defaultdict(set)
        self._welcomed = False
        self.written = asyncio.Event()
        self.settled = asyncio.Event()
        self.hang_up: Callable[[], object] = lambda: None

    @property
    def is_over(self) -> bool:
        return self._session.state is State.CLOSED

    def take(self, frame: wire.SessionRequest) -> Greeted | None:
        """Refuses an illegal frame, starts work on a legal one, and answers a greeting for the caller to decide.

        Raises:
            NoRoom: the sender floods us and reads no answers; its session must end.
        """
        if self._outgoing.qsize() >= MAX_UNREAD:
            raise NoRoom("too many unread answers: the session is over")
        outcome = self._session.receive(frame)
        match outcome:
            case Greeted():
                return outcome
            case Work():
                self._start(outcome)
            case wire.SessionResponse():
                self._say(outcome)
        return None

    async def expose(self, greeted: Greeted) -> NixlAddress | None:
        """For `nixl`, before the welcome: takes a tenth of a second or more."""
        if greeted.transport != NIXL:
            return None
        arena = self._receivers.arena(greeted.greeting.kind)
        assert arena is not None and self._nixl is not None, "the transport was offered"
        self._exposure, self._written = Exposure(self._nixl, arena), WrittenPages(arena)
        return await self._exposure.address()

    def welcome(self, greeted: Greeted, nixl: NixlAddress | None = None) -> None:
        self._welcomed = True
        data = self._open_landings() if greeted.transport in (ZMQ_IPC, ZMQ_TCP) else NO_DATA
        if greeted.transport == CUDA_IPC:
            self._open_device()
        control = self._open_control() if greeted.transport in SAME_HOST else NO_CONTROL
        self._say(self._session.welcome(greeted, self._mapping_id, data, nixl, control))

    def refuse(self, greeted: Greeted, error: TriptychError) -> None:
        self._say(self._session.refuse(greeted, error))

    def end(self) -> None:
        """No more frames will come. Idempotent; the rest happens in `live`."""
        self._no_more.set()

    async def live(self) -> None:
        """Whatever goes wrong in the session, the farewell waits until the sender can write no more."""
        try:
            try:
                await self._converse()
            except* Exception:
                _log.exception("a session met a bug and ends")
                self.hang_up()
            await self._wait_until_unmapped()
            if self._exposure is not None:
                await self._exposure.revoke()
        finally:
            self.written.set()
            self._close_control()
            self._close_landings()
            if self._exposure is not None:
                await self._exposure.try_revoke()
            await self._say_farewell()
            self.settled.set()

    async def _converse(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write(), name="transfer-write")
            async with asyncio.TaskGroup() as work:
                await self._work(work)
            self._session.close()
            self._outgoing.put_nowait(None)

    async def _work(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        try:
            await self._no_more.wait()
        finally:
            self._tasks = None
            self._close_control()  # whoever joined there has gone, or is to learn that the session is over, and no more
        for ref in list(self._waits):
            self._cancel_waits(ref)
        if self._landings is not None:
            self._close_landings()  # commits that wait for frames are refused now, and later frames find nothing

    def _start(self, work: Work) -> None:
        if self._tasks is None:
            return  # the session is over: nobody reads an answer
        asked = work.asked
        # What was asked for the ref before its abort, and still waits for room.
        cancelled = self._cancel_waits(asked.ref) if isinstance(asked, AbortAsked) else []
        task = self._tasks.create_task(self._answer(work, cancelled), name="transfer-work")
        if isinstance(asked, SlotAsked | BindAsked):
            self._waits[asked.ref].add(task)
        # Not in the task itself: one that is cancelled before its first step never runs, and still needs an answer.
        task.add_done_callback(partial(self._finish, work))

    def _cancel_waits(self, ref: AttemptRef) -> list[Waiting]:
        tasks = list(self._waits.get(ref, ()))
        for task in tasks:
            task.cancel()
        return tasks

    def _finish(self, work: Work, task: Waiting) -> None:
        waiting = self._waits.get(work.asked.ref)
        if waiting is not None:
            waiting.discard(task)
            if not waiting:
                del self._waits[work.asked.ref]
        answer = Aborted("given up by the sender") if task.cancelled() else task.result()
        self._say(self._framed(work.sequence, answer))

    def _framed(self, sequence: int, answer: Answer | TriptychError) -> wire.SessionResponse:
        """The sender hears of a bug of ours, too, and does not wait for its deadline."""
        try:
            return self._session.answer(sequence, answer)
        except Exception:
            _log.exception("a receiver's answer fits no frame")
            return answer_to_frame(sequence, TriptychError(INTERNAL_MESSAGE))

    async def _answer(self, work: Work, after: list[Waiting]) -> Answer | TriptychError:
        try:
            if after:
                await asyncio.wait(after)
            return await self._carry_out(work)
        except TriptychError as error:
            return error
        except Exception:
            _log.exception("a receiver failed with an error that is no TriptychError")
            return TriptychError(INTERNAL_MESSAGE)

    async def _carry_out(self, work: Work) -> Answer:
        """With data frames the grant is expected before its answer leaves, and ends before the receiver hears that it
        does: see `landings.py`."""
        asked, landings = work.asked, self._landings
        if self._written is not None:
            return await self._carry_out_written(self._written, asked)
        if landings is None:
            return await carry_out(self._receivers, self._kind(), self._peer(), asked)
        match asked:
            case EmbeddingCommitted():
                await landings.complete((asked.ref, asked.item_index), asked.num_bytes, None)
            case KvCommitted():
                await landings.complete((asked.ref, asked.grant_id), asked.num_bytes, _shown(asked.checksum))
            case AbortAsked():
                landings.forget(asked.ref, asked.grant_id)
        answer = await carry_out(self._receivers, self._kind(), self._peer(), asked)
        self._expect(landings, work, answer)
        return answer

    async def _carry_out_written(self, written: WrittenPages, asked: Asked) -> Answer:
        if isinstance(asked, KvCommitted):
            await written.check(asked)
        answer = await carry_out(self._receivers, self._kind(), self._peer(), asked)
        match asked, answer:
            case BindAsked(ref=ref, grant_id=grant_id), Bound() as bound:
                written.expect(ref, grant_id, bound)
            case (KvCommitted() | AbortAsked()) as ended, _:
                written.forget(ended.ref, ended.grant_id)
        return answer

    def _expect(self, landings: LandingSession, work: Work, answer: Answer) -> None:
        arena = self._receivers.arena(self._kind())
        assert arena is not None
        match work.asked, answer:
            case SlotAsked(ref=ref, item_index=index), SlotGrant() as slot:
                landings.expect((ref, index), work.sequence, slot_landing(arena, slot))
            case BindAsked(ref=ref, grant_id=grant_id, capability=capability), Bound() as bound:
                landings.expect((ref, grant_id), work.sequence, pages_landing(arena, capability, bound))
            case EmbeddingCommitted(ref=ref, item_index=index), _:
                landings.forget(ref, index)
            case KvCommitted(ref=ref, grant_id=grant_id), _:
                landings.forget(ref, grant_id)

    def _say(self, frame: wire.SessionResponse) -> None:
        if self._wire is not None and self._wire.has_room and self._outgoing.empty():
            try:
                self._wire.write(frame.SerializeToString())
            except Exception:
                return self._cannot_answer()
            if frame.WhichOneof("kind") == "slot_grant":
                self._wire.wakefulness.expect()  # what the sender has computed already it writes and commits at once
        else:
            self._outgoing.put_nowait(frame)

    async def _write(self) -> None:
        """Until the stream breaks; then the rest of the answers go nowhere."""
        try:
            while (frame := await self._outgoing.get()) is not None:
                if self._wire is None:
                    await self._write_frame(frame)
                else:
                    await self._wire.drained()
                    self._wire.write(frame.SerializeToString())
        except (grpc.aio.BaseError, grpc.RpcError, asyncio.InvalidStateError):
            self.end()
        except Exception:
            self._cannot_answer()
        finally:
            self.written.set()

    def _cannot_answer(self) -> None:
        _log.exception("answers cannot be sent: the session ends")
        self.hang_up()
        self.end()

    async def _wait_until_unmapped(self) -> None:
        """A sender that lost the stream may still be writing: nothing it was granted is free before its mapping is
        gone. When the process is dead, that is already so. One that sends data frames has no mapping."""
        if not self._welcomed or self._landings is not None:
            return
        arena = self._receivers.arena(self._kind())
        waited_s, pause_s = 0.0, MAPPING_POLL_S
        while arena is not None and arena.is_mapped_as(self._mapping_id):
            await asyncio.sleep(pause_s)
            waited_s += pause_s
            if waited_s >= MAPPING_WARN_S > waited_s - pause_s:
                _log.warning("a lost sender still has the arena mapped", extra={"worker": self._peer().worker_id})
            pause_s = min(2 * pause_s, MAPPING_POLL_MAX_S)
        if self._device is not None:
            await asyncio.sleep(SETTLE_S)

    async def _say_farewell(self) -> None:
        if not self._welcomed:
            return
        try:
            await peer_lost(self._receivers, self._kind(), self._peer())
        except Exception:
            _log.exception("a receiver failed while it let go of a lost peer")
        if self._device is not None:
            self._device.closed_to(self._peer())

    def _open_control(self) -> ControlAddress:
        if self._control_port is None:
            return NO_CONTROL
        return self._control_port.expect(self._mapping_id, self._join)

    def _join(self, joined: FrameWire) -> None:
        """The sender goes on here; nothing of it is under way on the stream any more."""
        self._wire = joined
        joined.take, joined.lost = self._take_raw, self._lose_control
        joined.max_frame_bytes = MAX_MESSAGE_BYTES

    def _lose_control(self) -> None:
        self.hang_up()

    def _take_raw(self, raw: bytes) -> None:
        try:
            self.take(wire.SessionRequest.FromString(raw))
        except (DecodeError, NoRoom):
            self._close_control()  # as the stream ends by such a frame

    def _close_control(self) -> None:
        if self._control_port is not None:
            self._control_port.forget(self._mapping_id)
        if self._wire is not None:
            self._wire.close()

    def _open_device(self) -> None:
        arena = self._receivers.arena(self._kind())
        assert arena is not None and arena.device is not None, "the transport was offered"
        self._device = arena.device
        self._device.opened_to(self._peer())

    def _open_landings(self) -> DataAddress:
        assert self._data_port is not None, "the transport was offered"
        assert self._session.greeting is not None
        self._landings = self._data_port.open_session(self._mapping_id, self._session.greeting.curve_key)
        return replace(self._data_port.address, session_key=self._landings.session_key)

    def _close_landings(self) -> None:
        if self._data_port is not None:
            self._data_port.close_session(self._mapping_id)

    def _offer(self, kind: ArenaKind) -> ArenaOffer | None:
        arena = self._receivers.arena(kind)
        if arena is None or not arena.is_open:
            return None
        name = "" if arena.segment is None else arena.segment.name
        device = None if arena.device is None else arena.device.address
        return ArenaOffer(arena.layout_fingerprint, name, arena.num_bytes, device, arena.kv_terms)

    def _peer(self) -> WorkerRef:
        assert self._session.greeting is not None
        return self._session.greeting.sender.ref

    def _kind(self) -> ArenaKind:
        assert self._session.greeting is not None
        return self._session.greeting.kind


def _shown(checksum: int | None) -> int:
    """Bytes that came in frames are always summed up."""
    if checksum is None:
        raise TransferRefused("the commit shows no checksum of its data frames")
    return checksum
