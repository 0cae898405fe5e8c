"""The session protocol under arbitrary frames: an illegal one is a refusal, never an exception, and changes nothing."""

from __future__ import annotations

from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.core.errors import NoRoom, PeerLost, TransferRefused, TriptychError
from triptych.core.grant import GroupRegions, Region
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.kv_format import KvDtype, KvTerms, PageFormat
from triptych.core.plan import EmbeddingSource, Token
from triptych.transport import frames
from triptych.transport.session import (
    MAX_OUTSTANDING,
    Answered,
    ArenaOffer,
    Greeted,
    ReceiverSession,
    SenderSession,
    State,
    Work,
    choose_transport,
)
from triptych.transport.types import (
    AbortAsked,
    Acknowledged,
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

LAYOUT = b"l" * 32
ARENA_BYTES = 2**20
SENDER = Endpoint(WorkerRef("encoder-1", 1), "host-1", ("shm",))
RECEIVER = Endpoint(WorkerRef("prefill-1", 2), "host-1", ("inproc", "shm"))

refs = st.builds(AttemptRef, st.from_regex(r"req-[0-9a-f]{1,24}", fullmatch=True), st.integers(0, 3), st.integers(0, 9))
indices = st.integers(0, 1023)
u63 = st.integers(1, 2**63 - 1)
u64 = st.integers(0, 2**64 - 1)
capabilities = st.binary(min_size=16, max_size=16)
identities = st.binary(min_size=32, max_size=32)
sources = st.sampled_from(EmbeddingSource)
grant_ids = st.from_regex(r"grant-[0-9a-f]{1,16}", fullmatch=True)
slot_asked = st.builds(SlotAsked, refs, indices, identities, st.integers(1, 2**20), u63)
bind_asked = st.builds(BindAsked, refs, grant_ids, capabilities)
embedding_committed = st.builds(EmbeddingCommitted, refs, indices, u64, u64, capabilities, u63, u64, sources)
kv_committed = st.builds(
    KvCommitted,
    refs,
    grant_ids,
    u64,
    capabilities,
    st.integers(1, 2**20),
    u63,
    st.builds(Token, st.integers(0, 2**20), st.integers(0, 999_999)),
    st.integers(-(2**20), 2**20),
)
abort_asked = st.builds(
    AbortAsked, refs, st.none() | grant_ids, st.text(st.characters(codec="ascii", categories=["L", "N"]), max_size=99)
)
of_kind: dict[ArenaKind, st.SearchStrategy[Asked]] = {
    ArenaKind.EMBEDDING: slot_asked | embedding_committed | abort_asked,
    ArenaKind.KV: bind_asked | kv_committed | abort_asked,
}
groups = st.lists(st.integers(1, 9), max_size=4).map(
    lambda runs: (GroupRegions(0, 0, tuple(Region(100 * n, run) for n, run in enumerate(runs))),)
)
answers: st.SearchStrategy[Answer] = (
    st.builds(SlotGrant, u64, st.integers(0, ARENA_BYTES), u63, u64, capabilities)
    | st.builds(HaveIt, sources)
    | st.builds(Bound, u64, groups)
    | st.just(Acknowledged())
)


def offer(kind: ArenaKind) -> ArenaOffer | None:
    return ArenaOffer(LAYOUT, "triptych-kv-0123456789abcdef", ARENA_BYTES, kv=terms(kind))


def terms(kind: ArenaKind) -> KvTerms | None:
    return KvTerms(PageFormat(16, KvDtype.FLOAT32)) if kind is ArenaKind.KV else None


def connected(kind: ArenaKind) -> tuple[SenderSession, ReceiverSession]:
    sender = SenderSession(SENDER, RECEIVER.ref, kind, LAYOUT, terms(kind))
    receiver = ReceiverSession(RECEIVER, offer)
    greeted = receiver.receive(sender.hello())
    assert isinstance(greeted, Greeted) and greeted.transport == "shm"
    welcome = sender.welcome(receiver.welcome(greeted, 7))
    assert isinstance(welcome, frames.Welcome) and welcome.mapping_id == 7
    assert sender.state is receiver.state is State.READY
    return sender, receiver


@given(st.data(), st.sampled_from(ArenaKind))
def test_what_is_asked_arrives_as_it_was(data: st.DataObject, kind: ArenaKind) -> None:
    sender, receiver = connected(kind)
    for asked in data.draw(st.lists(of_kind[kind], min_size=1, max_size=5)):
        sequence, frame = sender.ask(asked)
        work = receiver.receive(wire.SessionRequest.FromString(frame.SerializeToString()))
        assert work == Work(sequence, asked)


@given(asked=st.one_of(*of_kind.values()), answer=answers, kind=st.sampled_from(ArenaKind))
def test_an_answer_fits_its_question_or_is_refused(asked: Asked, answer: Answer, kind: ArenaKind) -> None:
    sender, _ = connected(kind)
    sequence, _ = sender.ask(asked)
    answered = sender.receive(frames.answer_to_frame(sequence, answer))
    assert answered is not None
    right = {SlotAsked: (SlotGrant, HaveIt), BindAsked: (Bound,)}.get(type(asked), (Acknowledged,))
    fits = isinstance(answer, right)
    if isinstance(asked, SlotAsked) and isinstance(answer, SlotGrant):
        fits = answer.num_bytes == asked.num_bytes and answer.offset + answer.num_bytes <= ARENA_BYTES
    assert answered.answer == answer if fits else isinstance(answered.answer, TransferRefused)
    assert sender.receive(frames.answer_to_frame(sequence, answer)) is None  # each question is answered once


raw_requests = st.binary(max_size=80).map(lambda raw: parse(wire.SessionRequest, raw))
raw_responses = st.binary(max_size=80).map(lambda raw: parse(wire.SessionResponse, raw))


def parse(message: type[Message], raw: bytes) -> Message:
    parsed = message()
    try:
        parsed.MergeFromString(raw)
    except DecodeError:  # gRPC refuses these before they reach a session
        return message()
    return parsed


@st.composite
def mutated(draw: st.DrawFn) -> wire.SessionRequest:
    """A legal frame with some bytes changed, or with an odd sequence."""
    asked = draw(st.one_of(*of_kind.values()))
    raw = bytearray(frames.asked_to_frame(draw(st.integers(0, 9)), asked).SerializeToString())
    for _ in range(draw(st.integers(0, 3))):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    frame = parse(wire.SessionRequest, bytes(raw))
    assert isinstance(frame, wire.SessionRequest)
    return frame


hellos = st.builds(
    lambda version, worker, epoch, host, transports, arena, layout, pages: wire.SessionRequest(
        hello=wire.Hello(
            protocol_version=version,
            worker_id=worker,
            epoch=epoch,
            host_id=host,
            transports=transports,
            arena=arena,
            layout_fingerprint=layout,
            pages=pages,
        )
    ),
    st.integers(0, 3),
    st.sampled_from(["encoder-1", "", "bad name"]),
    st.sampled_from([0, 1, 2**64 - 1]),
    st.sampled_from(["host-1", "host-2", ""]),
    st.lists(st.sampled_from(["shm", "inproc", "zmq-ipc", "zmq-tcp", "nixl", "rdma", "?"]), max_size=20),
    st.sampled_from([0, 1, 2, 77]),
    st.sampled_from([LAYOUT, b"", b"x" * 32]),
    st.none()
    | st.builds(wire.PageFormat, page_tokens=st.sampled_from([0, 16, 2**31]), dtype=st.sampled_from([0, 1, 9])),
)


@settings(max_examples=120, deadline=None)
@given(st.lists(hellos | mutated() | raw_requests, max_size=12), st.booleans())
def test_a_receiver_survives_any_frames(stream: list[wire.SessionRequest], greeted_first: bool) -> None:
    receiver = connected(ArenaKind.EMBEDDING)[1] if greeted_first else ReceiverSession(RECEIVER, offer)
    for frame in stream:
        before = receiver.state
        outcome = receiver.receive(frame)
        if isinstance(outcome, wire.SessionResponse):
            assert outcome.WhichOneof("kind") == "refused" and outcome.sequence == frame.sequence
            is_bad_hello = before is State.NEW and receiver.state is State.CLOSED
            assert is_bad_hello or receiver.state is before
        elif isinstance(outcome, Greeted):
            assert before is State.NEW and outcome.greeting.layout_fingerprint == LAYOUT
            receiver.welcome(outcome, 1)
        else:
            assert receiver.state is State.READY
            answered = receiver.answer(outcome.sequence, NoRoom("full"))
            assert answered.refused.error.code == "no_room"


@settings(max_examples=100, deadline=None)
@given(st.lists(raw_responses, max_size=8), st.sampled_from(ArenaKind))
def test_a_sender_survives_any_frames(stream: list[wire.SessionResponse], kind: ArenaKind) -> None:
    fresh = SenderSession(SENDER, RECEIVER.ref, kind, LAYOUT, terms(kind))
    fresh.hello()
    if stream:
        assert isinstance(fresh.welcome(stream[0]), TriptychError | frames.Welcome)
    sender, _ = connected(kind)
    sender.ask(AbortAsked(AttemptRef("req-1"), None, "x"))
    for frame in stream:
        answered = sender.receive(frame)
        assert answered is None or isinstance(answered, Answered)


def test_a_closed_session_asks_nothing() -> None:
    sender, receiver = connected(ArenaKind.KV)
    sender.close()
    receiver.close()
    asked = AbortAsked(AttemptRef("req-1"), None, "x")
    try:
        sender.ask(asked)
    except PeerLost:
        pass
    else:
        raise AssertionError("a closed session asked")
    assert isinstance(receiver.receive(frames.asked_to_frame(9, asked)), wire.SessionResponse)


def test_what_is_outstanding_is_bounded_and_aborts_still_pass() -> None:
    _, receiver = connected(ArenaKind.EMBEDDING)
    slot = SlotAsked(AttemptRef("req-1"), 0, b"i" * 32, 1, 64)
    for sequence in range(1, MAX_OUTSTANDING + 1):
        assert isinstance(receiver.receive(frames.asked_to_frame(sequence, slot)), Work)
    refused = receiver.receive(frames.asked_to_frame(MAX_OUTSTANDING + 1, slot))
    assert isinstance(refused, wire.SessionResponse) and refused.refused.error.code == "no_room"
    abort = AbortAsked(slot.ref, None, "room, please")
    assert isinstance(receiver.receive(frames.asked_to_frame(MAX_OUTSTANDING + 2, abort)), Work)


def test_the_transport_is_the_best_that_both_can_do() -> None:
    same = Endpoint(RECEIVER.ref, "host-1", ("inproc", "shm"))
    assert choose_transport(same, RECEIVER) == "inproc"
    assert choose_transport(SENDER, RECEIVER) == "shm"
    both = ("shm", "zmq-ipc", "zmq-tcp")
    able = Endpoint(RECEIVER.ref, "host-1", ("inproc", *both))
    assert choose_transport(Endpoint(SENDER.ref, "host-1", both), able) == "shm"
    assert choose_transport(Endpoint(SENDER.ref, "host-1", both[1:]), able) == "zmq-ipc"
    assert choose_transport(Endpoint(SENDER.ref, "host-2", both), able) == "zmq-tcp"
    ladder = ("shm", "nixl", "zmq-ipc", "zmq-tcp")
    with_nixl = Endpoint(RECEIVER.ref, "host-1", ("inproc", *ladder))
    assert choose_transport(Endpoint(SENDER.ref, "host-1", ladder), with_nixl) == "shm"
    assert choose_transport(Endpoint(SENDER.ref, "host-1", ladder[1:]), with_nixl) == "nixl"
    assert choose_transport(Endpoint(SENDER.ref, "host-2", ladder), with_nixl) == "nixl"
    assert choose_transport(Endpoint(SENDER.ref, "host-2", ladder), able) == "zmq-tcp"
    assert choose_transport(Endpoint(SENDER.ref, "", both), Endpoint(RECEIVER.ref, "", both)) == "zmq-tcp"
    for lonely in (
        Endpoint(SENDER.ref, "host-2", ("shm",)),
        Endpoint(SENDER.ref, "", ("shm", "inproc")),
        Endpoint(SENDER.ref, "host-2", both),
    ):
        try:
            choose_transport(lonely, RECEIVER)
        except TransferRefused:
            continue
        raise AssertionError("there is no common transport")
