"""The protocol of one session, without I/O: what may follow what, and who answers whom.

Sender and receiver see the same two streams of frames, so one table serves both:

    NEW --hello--> HELLO_SENT --hello_ack--> READY --slot_request, bind_request, commit, abort, and answers--> READY
                       '------refused------> CLOSED

A frame that may not come, or holds what it may not, changes nothing: at the receiver it is answered by `refused`, at
the sender it fails the one request it belongs to.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from triptych.core.errors import InvalidRequest, NoRoom, PeerLost, TransferRefused, TriptychError
from triptych.core.ids import WorkerRef
from triptych.core.kv_format import KvTerms, PageFormat, why_not
from triptych.transport import frames
from triptych.transport.device import DeviceAddress
from triptych.transport.names import CUDA_IPC, SHM, shared_transports
from triptych.transport.nixl_api import NixlAddress
from triptych.transport.types import (
    AbortAsked,
    Acknowledged,
    Answer,
    ArenaKind,
    Asked,
    BindAsked,
    Bound,
    ControlAddress,
    DataAddress,
    EmbeddingCommitted,
    Endpoint,
    HaveIt,
    KvCommitted,
    SlotAsked,
    SlotGrant,
)
from triptych.wire.v1 import transfer_pb2 as wire

MAX_OUTSTANDING: Final = 4096
NO_DATA: Final = DataAddress()
NO_CONTROL: Final = ControlAddress()
_ABORT_HEADROOM: Final = 2  # aborts make room, so they may come when the rest is full


class State(enum.Enum):
    NEW = "new"
    HELLO_SENT = "hello_sent"
    READY = "ready"
    CLOSED = "closed"


_REQUESTS: Final = ("slot_request", "bind_request", "commit", "abort")
_ANSWERS: Final = ("slot_grant", "have_it", "bound", "ack", "refused")

_NEXT: Final[dict[tuple[State, str], State]] = {
    (State.NEW, "hello"): State.HELLO_SENT,
    (State.HELLO_SENT, "hello_ack"): State.READY,
    (State.HELLO_SENT, "refused"): State.CLOSED,
    **{(State.READY, frame): State.READY for frame in (*_REQUESTS, *_ANSWERS)},
}

# What a request may be answered with, besides `refused`.
_ANSWERED_BY: Final[dict[type[Asked], tuple[type[Answer], ...]]] = {
    SlotAsked: (SlotGrant, HaveIt),
    BindAsked: (Bound,),
    EmbeddingCommitted: (Acknowledged,),
    KvCommitted: (Acknowledged,),
    AbortAsked: (Acknowledged,),
}

_OTHER_LAYOUT: Final[dict[ArenaKind, str]] = {
    ArenaKind.EMBEDDING: "the two workers lay out embeddings differently: have they the same model and --dtype?",
    ArenaKind.KV: "the two workers lay out KV differently: have they the same model, and all heads of it?",
}

_ASKED_OF: Final[dict[ArenaKind, tuple[type[Asked], ...]]] = {
    ArenaKind.EMBEDDING: (SlotAsked, EmbeddingCommitted, AbortAsked),
    ArenaKind.KV: (BindAsked, KvCommitted, AbortAsked),
}


def choose_transport(sender: Endpoint, receiver: Endpoint) -> str:
    """The sender's first choice that both can do. Raises TransferRefused when there is none."""
    is_same_host = bool(sender.host_id) and sender.host_id == receiver.host_id
    shared = shared_transports(
        sender.transports,
        receiver.transports,
        is_same_host=is_same_host,
        is_same_process=sender.ref == receiver.ref,
    )
    if shared:
        return shared[0]
    raise TransferRefused(
        "the two workers share no way to move data: for shm run them on one host, as one user, with one /dev/shm;"
        " between hosts leave --transport at auto, or give zmq to both"
    )


def check_slot(grant: SlotGrant, num_bytes: int, arena_bytes: int) -> None:
    """Raises TransferRefused unless the grant is as large as asked and lies within the arena."""
    if grant.num_bytes != num_bytes or not 0 <= grant.offset <= arena_bytes - num_bytes:
        raise TransferRefused("the slot lies outside the arena, or has another size")


def check_terms(kind: ArenaKind, sender: KvTerms | None, receiver: KvTerms | None) -> None:
    """Raises TransferRefused when a side does not say how its pages lie, or KV of the one cannot become the other's."""
    if kind is not ArenaKind.KV:
        return
    if sender is None or receiver is None:
        raise TransferRefused("a worker does not say how the pages of its KV pool lie")
    reason = why_not(sender, receiver)
    if reason is not None:
        raise TransferRefused(reason)


def _limit(asked: Asked) -> int:
    return MAX_OUTSTANDING * (_ABORT_HEADROOM if isinstance(asked, AbortAsked) else 1)


@dataclass(frozen=True, slots=True)
class Answered:
    """The receiver's answer to what was asked under `sequence`; a refusal is the error itself."""

    sequence: int
    asked: Asked
    answer: Answer | TriptychError


@dataclass(slots=True)
class SenderSession:
    """Owner of the sequence numbers and of what is still unanswered. Nothing here raises on a peer's frame. `kv` says
    how the pages lie that are sent from; None for embeddings."""

    me: Endpoint
    receiver: WorkerRef
    kind: ArenaKind
    layout_fingerprint: bytes
    kv: KvTerms | None = None
    state: State = State.NEW
    arena_bytes: int = 0
    _sequence: int = 0
    _outstanding: dict[int, Asked] = field(default_factory=dict)

    def hello(self, curve_key: bytes = b"") -> wire.SessionRequest:
        """`curve_key`: the public one of the data connection that may follow, where that is to be encrypted."""
        self.state = _NEXT[self.state, "hello"]
        greeting = frames.Greeting(self.me, self.kind, self.layout_fingerprint, curve_key, self.kv)
        return frames.greeting_to_frame(self._sequence, greeting)

    def welcome(self, frame: wire.SessionResponse) -> frames.Welcome | TriptychError:
        """The answer to hello. An error leaves the session closed."""
        try:
            welcome = self._checked_welcome(frame)
        except TriptychError as error:
            self.state = State.CLOSED
            return error
        self.arena_bytes = welcome.segment_bytes
        self.state = _NEXT[self.state, "hello_ack"]
        return welcome

    def ask(self, asked: Asked) -> tuple[int, wire.SessionRequest]:
        """The frame to send and its sequence.

        Raises:
            PeerLost: the session is not ready, or over.
            NoRoom: too much is unanswered.
        """
        if self.state is not State.READY:
            raise PeerLost("the session to the other worker is over")
        if len(self._outstanding) >= _limit(asked):
            raise NoRoom("too many transfers to one worker are under way")
        self._sequence += 1
        self._outstanding[self._sequence] = asked
        return self._sequence, frames.asked_to_frame(self._sequence, asked)

    def receive(self, frame: wire.SessionResponse) -> Answered | None:
        """None: the frame answers nothing that was asked."""
        asked = self._outstanding.pop(frame.sequence, None)
        if asked is None or self.state is not State.READY:
            return None
        try:
            answer = frames.answer_from_frame(frame)
            self._check_answer(asked, answer)
        except TriptychError:
            return Answered(frame.sequence, asked, TransferRefused("the receiver's answer does not fit the question"))
        return Answered(frame.sequence, asked, answer)

    def close(self) -> None:
        self.state = State.CLOSED
        self._outstanding.clear()

    def _checked_welcome(self, frame: wire.SessionResponse) -> frames.Welcome:
        kind = frame.WhichOneof("kind")
        if kind == "refused":
            answer = frames.answer_from_frame(frame)
            raise answer if isinstance(answer, TriptychError) else AssertionError(answer)
        if kind != "hello_ack" or frame.sequence != self._sequence:
            raise TransferRefused("the receiver did not answer the greeting")
        if (frame.hello_ack.worker_id, frame.hello_ack.epoch) != (self.receiver.worker_id, self.receiver.epoch):
            raise PeerLost("another worker answers at that address now")
        welcome = frames.welcome_from_frame(frame.hello_ack)
        if welcome.transport not in self.me.transports:
            raise TransferRefused("the receiver chose a transport that was not offered")
        self._check_pages(welcome.pages)
        return welcome

    def _check_pages(self, pages: PageFormat | None) -> None:
        """Whether numbers may be rounded is not the receiver's to say alone."""
        if pages is not None and self.kind is not ArenaKind.KV:
            raise TransferRefused("the receiver named pages where there are none")
        may_narrow = self.kv is not None and self.kv.may_narrow
        check_terms(self.kind, self.kv, None if pages is None else KvTerms(pages, may_narrow))

    def _check_answer(self, asked: Asked, answer: Answer | TriptychError) -> None:
        if isinstance(answer, TriptychError):
            return
        if not isinstance(answer, _ANSWERED_BY[type(asked)]):
            raise TransferRefused("wrong kind of answer")
        if isinstance(asked, SlotAsked) and isinstance(answer, SlotGrant):
            check_slot(answer, asked.num_bytes, self.arena_bytes)


@dataclass(frozen=True, slots=True)
class Greeted:
    """A hello that may be welcomed: call `ReceiverSession.welcome` (or `refuse`) when the arena is ready for it."""

    sequence: int
    greeting: frames.Greeting
    transport: str


@dataclass(frozen=True, slots=True)
class Work:
    """A valid request: answer it once through `ReceiverSession.answer`."""

    sequence: int
    asked: Asked


@dataclass(frozen=True, slots=True)
class ArenaOffer:
    """What a receiver says about one of its arenas in a hello. `segment_name` is empty when it has none, `device` is
    None when no peer may map device memory of it, `kv` when it is no KV pool."""

    layout_fingerprint: bytes
    segment_name: str
    segment_bytes: int
    device: DeviceAddress | None = None
    kv: KvTerms | None = None


@dataclass(slots=True)
class ReceiverSession:
    """The other end. `offers` are the arenas that can be written here, by kind."""

    me: Endpoint
    offer_of: Callable[[ArenaKind], ArenaOffer | None]
    state: State = State.NEW
    greeting: frames.Greeting | None = None
    _last_sequence: int = -1
    _outstanding: set[int] = field(default_factory=set)

    def receive(self, frame: wire.SessionRequest) -> Greeted | Work | wire.SessionResponse:
        """What to do; or, for an illegal frame, the refusal to send back. Never raises."""
        try:
            return self._receive(frame)
        except TriptychError as error:
            if self.state is State.HELLO_SENT and self.greeting is None:
                self.state = _NEXT[self.state, "refused"]
            return frames.answer_to_frame(frame.sequence, error)

    def welcome(
        self,
        greeted: Greeted,
        mapping_id: int,
        data: DataAddress = NO_DATA,
        nixl: NixlAddress | None = None,
        control: ControlAddress = NO_CONTROL,
    ) -> wire.SessionResponse:
        """`data` for the transports `zmq-*`, `control` for senders of this host."""
        self.state = _NEXT[self.state, "hello_ack"]
        offer = self._offer(greeted.greeting.kind)
        segment_name = offer.segment_name if greeted.transport == SHM else ""
        device = offer.device if greeted.transport == CUDA_IPC else None
        pages = None if offer.kv is None else offer.kv.pages
        welcome = frames.Welcome(
            greeted.transport, segment_name, offer.segment_bytes, mapping_id, data, device, pages, nixl, control
        )
        return frames.welcome_to_frame(greeted.sequence, self.me, welcome)

    def refuse(self, greeted: Greeted, error: TriptychError) -> wire.SessionResponse:
        self.state = _NEXT[self.state, "refused"]
        return frames.answer_to_frame(greeted.sequence, error)

    def answer(self, sequence: int, answer: Answer | TriptychError) -> wire.SessionResponse:
        self._outstanding.remove(sequence)
        return frames.answer_to_frame(sequence, answer)

    def close(self) -> None:
        self.state = State.CLOSED

    def _receive(self, frame: wire.SessionRequest) -> Greeted | Work:
        kind = frame.WhichOneof("kind") or ""
        after = _NEXT.get((self.state, kind))
        if after is None:
            raise TransferRefused(f"a frame of this kind may not come now ({self.state.value})")
        if frame.sequence <= self._last_sequence:
            raise TransferRefused("the sequence of a frame must be above that of the one before")
        self._last_sequence = frame.sequence
        self.state = after
        return self._greet(frame) if kind == "hello" else self._work(frame)

    def _greet(self, frame: wire.SessionRequest) -> Greeted:
        greeting = frames.greeting_from_frame(frame.hello)
        offer = self._offer(greeting.kind)
        if offer.layout_fingerprint != greeting.layout_fingerprint:
            raise TransferRefused(_OTHER_LAYOUT[greeting.kind])
        check_terms(greeting.kind, greeting.kv, offer.kv)
        transport = choose_transport(greeting.sender, self._as_offered(offer))
        self.greeting = greeting
        return Greeted(frame.sequence, greeting, transport)

    def _work(self, frame: wire.SessionRequest) -> Work:
        assert self.greeting is not None
        asked = frames.asked_from_frame(frame)
        if not isinstance(asked, _ASKED_OF[self.greeting.kind]):
            raise InvalidRequest("this arena takes no frames of that kind")
        if len(self._outstanding) >= _limit(asked):
            raise NoRoom("too many transfers of one worker are under way")
        self._outstanding.add(frame.sequence)
        return Work(frame.sequence, asked)

    def _as_offered(self, offer: ArenaOffer) -> Endpoint:
        if offer.device is not None:
            return self.me
        return replace(self.me, transports=tuple(name for name in self.me.transports if name != CUDA_IPC))

    def _offer(self, kind: ArenaKind) -> ArenaOffer:
        offer = self.offer_of(kind)
        if offer is None:
            raise TransferRefused("this worker has no arena of that kind")
        return offer
