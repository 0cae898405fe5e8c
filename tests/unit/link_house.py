"""A receiver that checks everything, as a host of its own in this process, and links to it over real gRPC on loopback.

A test module names the fixtures that it uses as its own: `host = link_house.host`. The links ask for `host`.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.kv_format import KvDtype, KvTerms, PageFormat
from triptych.core.plan import EmbeddingSource
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.kv.pages import PageLayout
from triptych.rpc.client import ChannelPool, transfer_stub
from triptych.rpc.server import RpcServer
from triptych.testing.fake_nixl import FakeNetwork, FakeNixl
from triptych.testing.receivers import FakeEmbeddingReceiver, FakeKvReceiver
from triptych.transport.carrier import WriterEvents
from triptych.transport.control_port import ControlPort
from triptych.transport.curve import CurveKeys
from triptych.transport.layout import checksum64, embedding_layout_fingerprint, host_id, kv_layout_fingerprint
from triptych.transport.link import AskingLink
from triptych.transport.link_pool import LinkPool
from triptych.transport.receiver import Receivers
from triptych.transport.receiver_link import ReceiverLink
from triptych.transport.servicer import TransferServicer
from triptych.transport.shm import SharedSegment
from triptych.transport.types import Arena, ArenaKind, Endpoint, SlotGrant
from triptych.transport.ways import DataSockets, Ways
from triptych.transport.zmq_port import DataPort, data_socket_path
from triptych.wire.v1 import transfer_pb2_grpc

TOKEN = "a-token-for-tests"
ARENA_BYTES = 64 * 16
EMBEDDING_LAYOUT = embedding_layout_fingerprint("float32", 8, 1, b"m" * 32)
KV_LAYOUT = kv_layout_fingerprint(2, 2, 8, b"m" * 32)
REF = AttemptRef("req-1")
FULL = AttemptRef("req-full")
IDENTITY = b"i" * 32
SENDER = Endpoint(WorkerRef("encoder-1", 11), host_id(), ("inproc", "shm"))
TRANSPORTS = ("inproc", "shm", "nixl", "zmq-ipc", "zmq-tcp")
PAGES = PageLayout(num_planes=4, cell_bytes=16, format=PageFormat(2, KvDtype.FLOAT32))
KV = KvTerms(PAGES.format)
NO_SOCKETS = Ways(DataSockets(), "127.0.0.1")


def sender_by(transport: str, host: Host) -> Endpoint:
    """A sender that will choose that transport."""
    me = Endpoint.of(host.info) if transport == "inproc" else SENDER
    return replace(me, transports=(transport,))


class Pages:
    """A pool to send from, of random bytes: (pages, planes, cell bytes)."""

    layout = PAGES
    host_planes = None

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
    network: FakeNetwork
    control_port: ControlPort

    def pool(self, me: Endpoint = SENDER, kv: KvTerms = KV) -> LinkPool:
        receivers = Receivers(self.embedding, self.kv)
        return LinkPool(me, partial(transfer_stub, self.channels), receivers, kv=kv, nixl=FakeNixl(self.network))


@asynccontextmanager
async def running(
    epoch: int = 21,
    arena_bytes: int = ARENA_BYTES,
    data_host: str = "127.0.0.1",
    keys: CurveKeys | None = None,
) -> AsyncIterator[Host]:
    segments = [SharedSegment.create(arena_bytes, kind) for kind in ("embed", "kv")]
    embedding = FakeEmbeddingReceiver(Arena.shared(ArenaKind.EMBEDDING, EMBEDDING_LAYOUT, segments[0]))
    kv = FakeKvReceiver(Arena.shared(ArenaKind.KV, KV_LAYOUT, segments[1], PAGES))
    me = Endpoint(WorkerRef("prefill-1", epoch), host_id(), TRANSPORTS)
    sockets = tempfile.TemporaryDirectory(prefix="triptych-test-")
    data_port = DataPort(data_host, 0, data_socket_path(Path(sockets.name), "prefill-1"), keys=keys)
    await data_port.open()
    network = FakeNetwork()
    control_port = ControlPort(Path(sockets.name, "control.sock"))
    await control_port.open()
    receivers = Receivers(embedding, kv)
    servicer = TransferServicer(me, receivers, data_port, nixl=FakeNixl(network), control_port=control_port)
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
        yield Host(info, embedding, kv, servicer, server, channels, data_port, network, control_port)
    finally:
        await channels.close()
        await servicer.close()
        await server.stop(0)
        await data_port.close()
        await control_port.close()
        sockets.cleanup()
        for segment in segments:
            segment.close()
        assert network.violations == [] and network.arenas == {}


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
