"""Links and the Transfer service over real gRPC on loopback, against receivers that check everything."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import numpy.typing as npt
import pytest

from triptych.core.errors import DeadlineExceeded, NoRoom, PeerLost, TransferRefused, TriptychError, Unauthenticated
from triptych.core.grant import Grant
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.plan import EmbeddingSource, Token
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.kv.pages import PageLayout
from triptych.obs import metrics
from triptych.rpc.client import ChannelPool, transfer_stub
from triptych.rpc.server import RpcServer
from triptych.testing.receivers import FakeEmbeddingReceiver, FakeKvReceiver
from triptych.transport.carrier import WriterEvents
from triptych.transport.layout import checksum64, embedding_layout_fingerprint, host_id, kv_layout_fingerprint
from triptych.transport.link import AskingLink
from triptych.transport.link_pool import LinkPool
from triptych.transport.pages import MappedPages
from triptych.transport.receiver import Receivers
from triptych.transport.receiver_link import ReceiverLink
from triptych.transport.servicer import TransferServicer
from triptych.transport.shm import SharedSegment
from triptych.transport.types import Arena, ArenaKind, Endpoint, HaveIt, SlotGrant
from triptych.transport.ways import DataSockets, Ways
from triptych.transport.zmq_port import DataPort, data_socket_path
from triptych.wire.v1 import transfer_pb2 as wire
from triptych.wire.v1 import transfer_pb2_grpc

TOKEN = "a-token-for-tests"
ARENA_BYTES = 64 * 16
EMBEDDING_LAYOUT = embedding_layout_fingerprint("float32", 8, 1, b"m" * 32)
KV_LAYOUT = kv_layout_fingerprint("float32", 2, 16, 2, 8, b"m" * 32)
REF = AttemptRef("req-1")
FULL = AttemptRef("req-full")
IDENTITY = b"i" * 32
SENDER = Endpoint(WorkerRef("encoder-1", 11), host_id(), ("inproc", "shm"))
TRANSPORTS = ("inproc", "shm", "zmq-ipc", "zmq-tcp")
PAGES = PageLayout(num_planes=4, cell_bytes=16)
NO_SOCKETS = Ways(DataSockets(), "127.0.0.1")


def sender_by(transport: str, host: Host) -> Endpoint:
    """A sender that will choose that transport."""
    me = Endpoint.of(host.info) if transport == "inproc" else SENDER
    return replace(me, transports=(transport,))


class Pages:
    """A pool to send from, of random bytes: (pages, planes, cell bytes)."""

    layout = PAGES

    def __init__(self, seed: int, num_pages: int = 8) -> None:
        shape = (num_pages, PAGES.num_planes, PAGES.cell_bytes)
        self.cells = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)

    def gather(self, pages: Sequence[int]) -> npt.NDArray[np.uint8]:
        return self.cells[list(pages)]


def page_of(arena: memoryview, page: int) -> npt.NDArray[np.uint8]:
    """(planes, cell bytes) of the receiver's page."""
    return np.frombuffer(arena, dtype=np.uint8).reshape(PAGES.num_planes, -1, PAGES.cell_bytes)[:, page]


def heard(*_: object) -> None:
    """What a page writer says, for those who do not care."""


EVENTS = WriterEvents(failed=heard, relieved=heard)


@dataclass
class Host:
    """A receiver process, in this one."""

    info: WorkerInfo
    embedding: FakeEmbeddingReceiver
    kv: FakeKvReceiver
    servicer: TransferServicer
    server: RpcServer
    channels: ChannelPool
    data_port: DataPort

    def pool(self, me: Endpoint = SENDER) -> LinkPool:
        return LinkPool(me, partial(transfer_stub, self.channels), Receivers(self.embedding, self.kv))


@asynccontextmanager
async def running(epoch: int = 21, arena_bytes: int = ARENA_BYTES, data_host: str = "127.0.0.1") -> AsyncIterator[Host]:
    segments = [SharedSegment.create(arena_bytes, kind) for kind in ("embed", "kv")]
    embedding = FakeEmbeddingReceiver(Arena.shared(ArenaKind.EMBEDDING, EMBEDDING_LAYOUT, segments[0]))
    kv = FakeKvReceiver(Arena.shared(ArenaKind.KV, KV_LAYOUT, segments[1], PAGES))
    me = Endpoint(WorkerRef("prefill-1", epoch), host_id(), TRANSPORTS)
    sockets = tempfile.TemporaryDirectory(prefix="triptych-test-")
    data_port = DataPort(data_host, 0, data_socket_path(Path(sockets.name), "prefill-1"))
    await data_port.open()
    servicer = TransferServicer(me, Receivers(embedding, kv), data_port)
    server = RpcServer("127.0.0.1", 0, token=TOKEN)
    server.add(transfer_pb2_grpc.add_TransferServicer_to_server, servicer)
    port = await server.start()
    info = WorkerInfo(
        "prefill-1",
        epoch,
        frozenset({Role.PREFILL}),
        WorkerState.READY,
        f"127.0.0.1:{port}",
        host_id=host_id(),
        transports=me.transports,
    )
    channels = ChannelPool(TOKEN)
    try:
        yield Host(info, embedding, kv, servicer, server, channels, data_port)
    finally:
        await channels.close()
        await servicer.close()
        await server.stop(0)
        await data_port.close()
        sockets.cleanup()
        for segment in segments:
            segment.close()


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    async with running() as started:
        yield started


@pytest.fixture(params=TRANSPORTS)
async def link(request: pytest.FixtureRequest, host: Host) -> AsyncIterator[AskingLink]:
    pool = host.pool(sender_by(request.param, host))
    made = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    assert isinstance(made, AskingLink) and made.transport == request.param.split("-")[0]
    yield made
    await pool.close()


@pytest.fixture
async def shm_link(host: Host) -> AsyncIterator[ReceiverLink]:
    made = ReceiverLink(SENDER, host.info.ref, ArenaKind.EMBEDDING, EMBEDDING_LAYOUT)
    await made.connect(transfer_stub(host.channels, host.info), NO_SOCKETS)
    yield made
    await made.close()


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - what is waited for is in other objects
            await asyncio.sleep(0.005)


async def send(link: AskingLink, ref: AttemptRef, index: int, data: bytes) -> SlotGrant:
    grant = await link.request_slot(ref, index, IDENTITY, 1, len(data))
    assert isinstance(grant, SlotGrant)
    await link.write_slot(grant, memoryview(data))
    await link.commit_embedding(ref, index, grant, EmbeddingSource.REMOTE, checksum64(data))
    return grant


async def fill(link: AskingLink, ref: AttemptRef = FULL) -> SlotGrant:
    grant = await link.request_slot(ref, 0, IDENTITY, 1, ARENA_BYTES)
    assert isinstance(grant, SlotGrant)
    await link.write_slot(grant, memoryview(bytes(ARENA_BYTES)))
    return grant


# --- the straight way ------------------------------------------------------------------------------------------------


async def test_an_embedding_lands(host: Host, link: AskingLink) -> None:
    counter = metrics.EMBEDDING_TRANSFER_BYTES.labels(transport=link.transport)
    before = counter._value.get()
    await send(link, REF, 3, b"x" * 100)
    assert host.embedding.landed[REF, 3].data == b"x" * 100
    assert counter._value.get() - before == 100


async def test_have_it_needs_no_slot(host: Host, link: AskingLink) -> None:
    host.embedding.have[IDENTITY] = EmbeddingSource.RADIX
    assert await link.request_slot(REF, 0, IDENTITY, 1, 64) == HaveIt(EmbeddingSource.RADIX)


async def test_a_request_that_waits_blocks_no_other(host: Host, link: AskingLink) -> None:
    grant = await fill(link)
    waiting = asyncio.create_task(link.request_slot(REF, 0, IDENTITY, 1, 64))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    data = bytes(ARENA_BYTES)
    await link.commit_embedding(FULL, 0, grant, EmbeddingSource.CACHE, checksum64(data))
    assert isinstance(await waiting, SlotGrant)


async def test_many_at_once_never_mix(host: Host, link: AskingLink) -> None:
    refs = [AttemptRef(f"req-{n}") for n in range(200)]
    await asyncio.gather(*(send(link, ref, n % 7, bytes([n % 251]) * (1 + n)) for n, ref in enumerate(refs)))
    for n, ref in enumerate(refs):
        assert host.embedding.landed[ref, n % 7].data == bytes([n % 251]) * (1 + n)
    assert host.embedding.slots.free_bytes == ARENA_BYTES


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_kv_is_bound_and_committed(host: Host, transport: str, seed: int) -> None:
    pool, source = host.pool(sender_by(transport, host)), Pages(seed)
    link = await pool.kv_link(host.info, KV_LAYOUT)
    credit = Grant("grant-1", "prefill-1", 21, b"c" * 16, 4, 0)
    host.kv.credits["grant-1"] = credit
    bound = await link.bind_kv(REF, credit)
    assert bound.groups[0].pages == [0, 1, 2, 3] and bound.generation == 1
    writer = link.page_writer(bound, source, EVENTS)
    assert not writer.is_congested
    assert writer.copy([], 0) == 0
    moved = await asyncio.to_thread(writer.copy, [5, 2], 0) + await asyncio.to_thread(writer.copy, [7], 2)
    assert moved == 3 * PAGES.page_bytes
    await link.commit_kv(REF, bound, 9, moved, Token(0, 5), -2)
    for page, sent in enumerate((5, 2, 7)):
        assert (page_of(host.kv.arena.buffer, page) == source.cells[sent]).all()
    assert not page_of(host.kv.arena.buffer, 3).any()
    assert host.kv.landed["grant-1"].position_delta == -2
    with pytest.raises(TransferRefused, match=r"handle is wrong|no checksum"):
        await link.commit_kv(REF, replace(bound, generation=7), 9, moved, Token(0, 5), 0)
    with pytest.raises(TransferRefused, match="no such grant"):
        await link.bind_kv(REF, replace(credit, capability=b"d" * 16))
    await pool.close()


# --- what must be refused --------------------------------------------------------------------------------------------


async def test_forged_handles_are_refused_and_the_next_request_works(host: Host, link: AskingLink) -> None:
    grant = await link.request_slot(REF, 0, IDENTITY, 1, 64)
    assert isinstance(grant, SlotGrant)
    await link.write_slot(grant, memoryview(bytes(64)))
    right = checksum64(bytes(64))
    forged = [
        replace(grant, capability=b"0" * 16),
        replace(grant, generation=grant.generation + 1),
        replace(grant, slot_id=grant.slot_id + 1),
        replace(grant, num_bytes=63),
    ]
    for bad in forged:
        with pytest.raises(TransferRefused):
            await link.commit_embedding(REF, 0, bad, EmbeddingSource.REMOTE, right)
    with pytest.raises(TransferRefused, match="checksum"):
        await link.commit_embedding(REF, 0, grant, EmbeddingSource.REMOTE, right ^ 1)
    with pytest.raises(TransferRefused, match="no such slot"):
        await link.commit_embedding(AttemptRef("req-other"), 0, grant, EmbeddingSource.REMOTE, right)
    assert not host.embedding.landed
    await link.commit_embedding(REF, 0, grant, EmbeddingSource.REMOTE, right)


async def test_a_slot_outside_the_arena_is_never_written(link: AskingLink) -> None:
    for offset, num_bytes in ((ARENA_BYTES - 63, 64), (-1, 64), (0, ARENA_BYTES + 1), (2**62, 2**62)):
        with pytest.raises(TransferRefused, match="outside"):
            await link.write_slot(SlotGrant(1, offset, num_bytes, 1, b"c" * 16), memoryview(bytes(64)))
    with pytest.raises(TransferRefused, match="size"):
        await link.write_slot(SlotGrant(1, 0, 64, 1, b"c" * 16), memoryview(bytes(63)))


async def test_too_large_for_the_arena_is_refused(link: AskingLink) -> None:
    with pytest.raises(TransferRefused, match="larger"):
        await link.request_slot(REF, 0, IDENTITY, 1, ARENA_BYTES + 1)


@pytest.mark.parametrize(
    ("kind", "layout", "sender", "error"),
    [
        (ArenaKind.EMBEDDING, KV_LAYOUT, SENDER, TransferRefused),
        (ArenaKind.EMBEDDING, EMBEDDING_LAYOUT, replace(SENDER, host_id="another"), TransferRefused),
        (ArenaKind.EMBEDDING, EMBEDDING_LAYOUT, replace(SENDER, transports=("nixl",)), TransferRefused),
        (ArenaKind.EMBEDDING, b"short", SENDER, TriptychError),
        (ArenaKind.EMBEDDING, EMBEDDING_LAYOUT, replace(SENDER, ref=WorkerRef("bad name!", 1)), TriptychError),
    ],
)
async def test_a_wrong_hello_is_refused_and_a_right_one_works(
    host: Host, kind: ArenaKind, layout: bytes, sender: Endpoint, error: type[TriptychError]
) -> None:
    stub = transfer_stub(host.channels, host.info)
    wrong = ReceiverLink(sender, host.info.ref, kind, layout)
    with pytest.raises(error):
        await wrong.connect(stub, NO_SOCKETS)
    assert wrong.closed.is_set()
    right = ReceiverLink(SENDER, host.info.ref, ArenaKind.EMBEDDING, EMBEDDING_LAYOUT)
    await right.connect(stub, NO_SOCKETS)
    await send(right, REF, 0, b"works")
    await right.close()


async def test_another_epoch_at_the_address_is_a_lost_peer(host: Host) -> None:
    link = ReceiverLink(SENDER, WorkerRef("prefill-1", 99), ArenaKind.EMBEDDING, EMBEDDING_LAYOUT)
    with pytest.raises(PeerLost, match="another worker"):
        await link.connect(transfer_stub(host.channels, host.info), NO_SOCKETS)


async def test_no_token_no_session(host: Host) -> None:
    link = ReceiverLink(SENDER, host.info.ref, ArenaKind.EMBEDDING, EMBEDDING_LAYOUT)
    channels = ChannelPool("another-token")
    with pytest.raises(Unauthenticated):
        await link.connect(transfer_stub(channels, host.info), NO_SOCKETS)
    await channels.close()


async def test_nobody_there_is_a_lost_peer(host: Host) -> None:
    gone = replace(host.info, worker_id="gone", grpc_address="127.0.0.1:1")
    link = ReceiverLink(SENDER, gone.ref, ArenaKind.EMBEDDING, EMBEDDING_LAYOUT)
    with pytest.raises(PeerLost):
        await link.connect(transfer_stub(host.channels, gone), NO_SOCKETS)


def hello() -> wire.SessionRequest:
    return wire.SessionRequest(
        sequence=0,
        hello=wire.Hello(
            protocol_version=1,
            worker_id="raw",
            epoch=5,
            host_id=host_id(),
            transports=["shm"],
            arena=wire.ARENA_KIND_EMBEDDING,
            layout_fingerprint=EMBEDDING_LAYOUT,
        ),
    )


async def test_illegal_frames_are_answered_and_harm_nobody(host: Host, shm_link: ReceiverLink) -> None:
    call = transfer_stub(host.channels, host.info).Session(None)

    async def ask(frame: wire.SessionRequest) -> wire.SessionResponse:
        await call.write(frame)
        answer = await call.read()
        assert isinstance(answer, wire.SessionResponse)
        return answer

    slot = wire.SlotRequest(identity=IDENTITY, num_tokens=1, num_bytes=64)
    slot.ref.request_id = "req-raw"
    early = await ask(wire.SessionRequest(sequence=1, slot_request=slot))
    assert early.refused.error.code == "transfer_refused"
    assert (await ask(hello())).WhichOneof("kind") == "hello_ack"
    bind = wire.BindRequest(grant_id="grant-1", capability=b"c" * 16)
    bind.ref.CopyFrom(slot.ref)
    bad_identity = wire.SlotRequest(ref=slot.ref, identity=b"short", num_tokens=1, num_bytes=64)
    huge = wire.SlotRequest(ref=slot.ref, identity=IDENTITY, num_tokens=1, num_bytes=2**64 - 1)
    illegal = [
        wire.SessionRequest(sequence=2, hello=hello().hello),
        wire.SessionRequest(sequence=3),
        wire.SessionRequest(sequence=4, bind_request=bind),
        wire.SessionRequest(sequence=5, slot_request=bad_identity),
        wire.SessionRequest(sequence=6, slot_request=huge),
        wire.SessionRequest(sequence=7, commit=wire.Commit(ref=slot.ref, capability=b"c" * 16)),
        wire.SessionRequest(sequence=7, slot_request=slot),
        wire.SessionRequest(sequence=1, slot_request=slot),
    ]
    for frame in illegal:
        answer = await ask(frame)
        assert answer.WhichOneof("kind") == "refused" and answer.sequence == frame.sequence
    assert (await ask(wire.SessionRequest(sequence=8, slot_request=slot))).WhichOneof("kind") == "slot_grant"
    await send(shm_link, REF, 0, b"unharmed")
    call.cancel()
    await eventually(lambda: WorkerRef("raw", 5) in host.embedding.lost)
    assert host.embedding.slots.free_bytes == ARENA_BYTES


async def test_an_oversized_frame_ends_its_session_only(host: Host, shm_link: ReceiverLink) -> None:
    async def ask(num_bytes: int) -> object:
        await call.write(wire.SessionRequest(abort=wire.Abort(reason="x" * num_bytes)))
        return await call.read()

    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(host.info.grpc_address, options=options) as channel:
        call = transfer_pb2_grpc.TransferStub(channel).Session(metadata=host.channels.metadata())
        answer = await ask(3 * 2**20)
        assert isinstance(answer, wire.SessionResponse) and answer.refused.error.code == "transfer_refused"
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await ask(5 * 2**20)
        assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await send(shm_link, REF, 0, b"unharmed")


# --- giving up -------------------------------------------------------------------------------------------------------


async def give_up_by_cancelling(link: AskingLink) -> None:
    waiting = asyncio.create_task(link.request_slot(REF, 0, IDENTITY, 1, 64))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def give_up_by_deadline(link: AskingLink) -> None:
    with pytest.raises(DeadlineExceeded):
        await link.request_slot(REF, 0, IDENTITY, 1, 64, timeout_s=0.05)


@pytest.mark.parametrize("give_up", [give_up_by_cancelling, give_up_by_deadline])
async def test_a_request_given_up_is_aborted_and_leaks_nothing(
    host: Host, link: AskingLink, give_up: Callable[[AskingLink], Awaitable[None]]
) -> None:
    await fill(link)
    await give_up(link)
    await eventually(lambda: [ref for ref, _ in host.embedding.aborted] == [REF])
    await link.abort(FULL, None, "line\nbreak " + "x" * 999)
    await eventually(lambda: host.embedding.slots.free_bytes == ARENA_BYTES)
    await send(link, AttemptRef("req-2"), 0, b"next")


async def test_requests_cancelled_at_any_moment_leak_nothing(host: Host, link: AskingLink) -> None:
    for n in range(60):
        ref = AttemptRef(f"req-{n}")
        waiting = asyncio.create_task(link.request_slot(ref, 0, IDENTITY, 1, 300))
        for _ in range(n % 12):
            await asyncio.sleep(0)
        if n % 5 == 0:
            await asyncio.sleep(0.001)
        waiting.cancel()
        (outcome,) = await asyncio.gather(waiting, return_exceptions=True)
        if isinstance(outcome, SlotGrant):
            await link.abort(ref, None, "not needed")
    await eventually(lambda: host.embedding.slots.free_bytes == ARENA_BYTES)


async def test_a_bind_given_up_is_aborted(host: Host) -> None:
    pool = host.pool()
    link = await pool.kv_link(host.info, KV_LAYOUT)
    credit = Grant("grant-1", "prefill-1", 21, b"c" * 16, 4, 0)
    host.kv.credits["grant-1"] = credit
    host.kv.may_bind.clear()
    with pytest.raises(DeadlineExceeded):
        await link.bind_kv(REF, credit, timeout_s=0.05)
    await eventually(lambda: bool(host.kv.aborted))
    assert host.kv.aborted[0][:2] == (REF, "grant-1") and not host.kv.bound
    await pool.close()
    await eventually(lambda: host.kv.lost == [SENDER.ref])


class StubbornReceiver(FakeEmbeddingReceiver):
    """Grants only when told, whatever happens meanwhile."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self.go = asyncio.Event()

    async def request_slot(
        self, peer: WorkerRef, ref: AttemptRef, item_index: int, identity: bytes, num_tokens: int, num_bytes: int
    ) -> SlotGrant | HaveIt:
        while not self.go.is_set():
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                continue
        return await super().request_slot(peer, ref, item_index, identity, num_tokens, num_bytes)


async def test_a_grant_that_comes_too_late_is_given_back() -> None:
    segment = SharedSegment.create(ARENA_BYTES, "embed")
    receiver = StubbornReceiver(Arena.shared(ArenaKind.EMBEDDING, EMBEDDING_LAYOUT, segment))
    async with running() as host:
        host.servicer._receivers = Receivers(receiver)
        pool = host.pool()
        link = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
        await give_up_by_deadline(link)  # type: ignore[arg-type]
        receiver.go.set()
        await eventually(lambda: len(receiver.aborted) == 2)
        assert receiver.aborted[1] == (REF, "granted too late")
        assert receiver.slots.free_bytes == ARENA_BYTES
        await pool.close()
        await eventually(lambda: bool(receiver.lost))
    segment.close()


# --- breaking --------------------------------------------------------------------------------------------------------


async def test_a_cut_stream_fails_all_who_wait(host: Host, shm_link: ReceiverLink) -> None:
    await fill(shm_link)
    waiting = [asyncio.create_task(shm_link.request_slot(REF, n, IDENTITY, 1, 64)) for n in range(5)]
    await asyncio.sleep(0.05)
    await host.servicer.close()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(outcome, PeerLost) for outcome in outcomes)
    await asyncio.wait_for(shm_link.closed.wait(), 5)
    with pytest.raises(PeerLost):
        await shm_link.request_slot(REF, 0, IDENTITY, 1, 64)
    with pytest.raises(PeerLost):
        await shm_link.write_slot(SlotGrant(1, 0, 64, 1, b"c" * 16), memoryview(bytes(64)))
    await shm_link.abort(REF, None, "too late to matter")
    assert host.embedding.lost == [SENDER.ref]


async def test_closing_a_link_fails_who_waits_and_tells_the_receiver(host: Host, shm_link: ReceiverLink) -> None:
    await fill(shm_link)
    waiting = asyncio.create_task(shm_link.request_slot(REF, 0, IDENTITY, 1, 64))
    await asyncio.sleep(0.05)
    await shm_link.close()
    with pytest.raises(PeerLost):
        await waiting
    await eventually(lambda: host.embedding.lost == [SENDER.ref])
    assert host.embedding.slots.free_bytes == ARENA_BYTES


async def bound_writer(host: Host, pool: LinkPool, seed: int) -> MappedPages:
    """A page writer that maps the receiver's pool, over a grant of four pages."""
    link = await pool.kv_link(host.info, KV_LAYOUT)
    credit = Grant("grant-1", "prefill-1", 21, b"c" * 16, 4, 0)
    host.kv.credits["grant-1"] = credit
    writer = link.page_writer(await link.bind_kv(REF, credit), Pages(seed), EVENTS)
    assert isinstance(writer, MappedPages)
    return writer


async def test_what_a_lost_sender_may_still_write_is_not_freed(host: Host, seed: int) -> None:
    pool = host.pool()
    writer = await bound_writer(host, pool, seed)
    await pool.close()
    await asyncio.sleep(0.2)
    assert host.kv.lost == []
    writer.copy([1], 0)  # harms nobody: the pages are still this sender's
    del writer
    await eventually(lambda: host.kv.lost == [SENDER.ref])


async def test_a_sender_of_frames_is_let_go_at_once(host: Host, seed: int) -> None:
    """It maps nothing, so nothing is to be waited for; what it sends later finds no grant."""
    pool = host.pool(sender_by("zmq-tcp", host))
    link = await pool.kv_link(host.info, KV_LAYOUT)
    credit = Grant("grant-1", "prefill-1", 21, b"c" * 16, 4, 0)
    host.kv.credits["grant-1"] = credit
    writer = link.page_writer(await link.bind_kv(REF, credit), Pages(seed), EVENTS)
    await pool.close()
    await eventually(lambda: host.kv.lost == [SENDER.ref])
    assert writer.copy([1], 0) == PAGES.page_bytes
    await asyncio.sleep(0.05)
    assert not np.frombuffer(host.kv.arena.buffer, dtype=np.uint8).any()


async def test_a_new_session_waits_for_the_farewell_of_the_former(host: Host, seed: int) -> None:
    pool, second = host.pool(), host.pool()
    writer = await bound_writer(host, pool, seed)
    connecting = asyncio.create_task(second.kv_link(host.info, KV_LAYOUT))
    await asyncio.sleep(0.2)
    assert not connecting.done()
    del writer
    again = await connecting
    assert host.kv.lost == [SENDER.ref]
    assert not again.closed.is_set()
    await asyncio.gather(pool.close(), second.close())


SENDER_PROCESS = """
import asyncio, sys
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.rpc.client import ChannelPool, transfer_stub
from triptych.transport.layout import host_id
from triptych.transport.receiver_link import ReceiverLink
from triptych.transport.types import ArenaKind, Endpoint
from triptych.transport.ways import DataSockets, Ways

async def main(address, token, layout, transport):
    worker = WorkerInfo("prefill-1", 21, frozenset({Role.PREFILL}), WorkerState.READY, address)
    me = Endpoint(WorkerRef("child", 5), host_id(), (transport,))
    link = ReceiverLink(me, worker.ref, ArenaKind.EMBEDDING, bytes.fromhex(layout))
    await link.connect(transfer_stub(ChannelPool(token), worker), Ways(DataSockets(), "127.0.0.1"))
    grant = await link.request_slot(AttemptRef("req-child"), 0, b"i" * 32, 1, 1024)
    await link.write_slot(grant, memoryview(b"y" * 1024))
    print("written", flush=True)
    await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("transport", ["shm", "zmq-ipc", "zmq-tcp"])
async def test_a_killed_sender_frees_what_it_held(host: Host, transport: str) -> None:
    args = [host.info.grpc_address, TOKEN, EMBEDDING_LAYOUT.hex(), transport]
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", SENDER_PROCESS, *args, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert await asyncio.wait_for(child.stdout.readline(), 30) == b"written\n"
    await eventually(lambda: bytes(host.embedding.arena.buffer) == b"y" * ARENA_BYTES)
    assert host.embedding.slots.free_bytes == 0
    child.kill()
    await child.wait()
    await eventually(lambda: host.embedding.lost == [WorkerRef("child", 5)])
    assert host.embedding.slots.free_bytes == ARENA_BYTES and not host.embedding.landed


# --- the pool --------------------------------------------------------------------------------------------------------


async def test_the_pool_makes_one_link_for_all_who_ask(host: Host) -> None:
    pool = host.pool()
    links = await asyncio.gather(*(pool.embedding_link(host.info, EMBEDDING_LAYOUT) for _ in range(20)))
    assert len({id(link) for link in links}) == 1
    await pool.close()
    with pytest.raises(PeerLost):
        await links[0].request_slot(REF, 0, IDENTITY, 1, 64)


async def test_a_caller_that_gives_up_leaves_the_link_to_the_others(host: Host) -> None:
    pool = host.pool()
    hasty = asyncio.create_task(pool.embedding_link(host.info, EMBEDDING_LAYOUT))
    patient = asyncio.create_task(pool.embedding_link(host.info, EMBEDDING_LAYOUT))
    await asyncio.sleep(0)
    hasty.cancel()
    link = await patient
    assert not link.closed.is_set()
    await pool.close()


async def test_the_pool_replaces_a_broken_link(host: Host) -> None:
    pool = host.pool()
    first = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    await first.close()
    second = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    assert second is not first and not second.closed.is_set()
    await pool.close()


async def test_the_pool_forgets_a_failure_and_a_former_epoch(host: Host) -> None:
    pool = host.pool()
    with pytest.raises(TransferRefused):
        await pool.embedding_link(host.info, KV_LAYOUT)
    link = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    async with running(epoch=22) as reborn:
        again = await pool.embedding_link(reborn.info, EMBEDDING_LAYOUT)
        await asyncio.wait_for(link.closed.wait(), 5)
        grant = await again.request_slot(REF, 0, IDENTITY, 1, 64)
        assert isinstance(grant, SlotGrant)
        await pool.close()


async def test_too_much_unanswered_is_no_room(shm_link: ReceiverLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.transport.session.MAX_OUTSTANDING", 2)
    await fill(shm_link)
    waiting = [asyncio.create_task(shm_link.request_slot(REF, n, IDENTITY, 1, 64)) for n in range(2)]
    await asyncio.sleep(0.05)
    with pytest.raises(NoRoom):
        await shm_link.request_slot(REF, 9, IDENTITY, 1, 64)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
