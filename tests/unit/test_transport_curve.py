"""Encrypted data connections: what crosses the wire, who is let in, and that nobody is talked out of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import zmq

from tests.unit.link_house import (
    ARENA_BYTES,
    EMBEDDING_LAYOUT,
    EVENTS,
    KV,
    KV_LAYOUT,
    REF,
    Host,
    Pages,
    eventually,
    page_of,
    running,
    send,
    sender_by,
)
from tests.unit.test_transport_zmq_pages import bound
from tests.unit.zmq_house import WAYS, carrier_of, dropped, raw_socket, zmq_link
from triptych.core.errors import InvalidRequest, StartupError, TransferRefused
from triptych.core.grant import Grant
from triptych.core.ids import AttemptRef
from triptych.core.plan import Token
from triptych.rpc.client import transfer_stub
from triptych.transport import frames
from triptych.transport.curve import CurveKeys
from triptych.transport.data_frame import MAX_PAYLOAD_BYTES
from triptych.transport.link_pool import LinkPool
from triptych.transport.receiver_link import ReceiverLink
from triptych.transport.types import ArenaKind
from triptych.transport.ways import DataSockets, Ways
from triptych.transport.zmq_gate import CurveAdmission, credentials
from triptych.transport.zmq_port import DataPort
from triptych.wire.v1 import common_pb2 as pb
from triptych.wire.v1 import transfer_pb2 as wire

SECRET = b"what nobody on the way may read"


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    async with running(keys=CurveKeys.make()) as started:
        yield started


class Tap:
    """Forwards to a port, and keeps what it saw."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.seen = bytearray()
        self._pipes: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        yield int(server.sockets[0].getsockname()[1])
        server.close()
        for pipe in self._pipes:
            pipe.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)
        await server.wait_closed()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        self._pipes |= {
            asyncio.create_task(self._forward(reader, back)),
            asyncio.create_task(self._forward(there, writer)),
        }

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                self.seen += data
                writer.write(data)
        finally:
            writer.close()


@pytest.mark.parametrize("is_encrypted", [True, False])
async def test_who_listens_on_the_wire_reads_nothing(is_encrypted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without keys he reads all: the tap works."""
    keys = CurveKeys.make() if is_encrypted else None
    async with running(keys=keys) as host:
        tap = Tap(host.data_port.address.port)
        async with tap.listening() as port:
            monkeypatch.setattr(Ways, "_endpoint", lambda self, welcome: f"tcp://127.0.0.1:{port}")
            async with zmq_link(host, keys=keys and CurveKeys.make()) as link:
                grant = await send(link, REF, 0, SECRET)
                session_key = carrier_of(link)._session_key
        assert host.embedding.landed[REF, 0].data == SECRET
        assert len(tap.seen) > len(SECRET)
        for hidden in (SECRET, grant.capability, session_key, session_key.hex().encode()):
            assert (hidden in tap.seen) != is_encrypted


@pytest.mark.parametrize("way", WAYS)
async def test_embeddings_and_pages_arrive_as_they_were(host: Host, way: str) -> None:
    source = Pages(seed=3)
    async with (
        zmq_link(host, way, keys=CurveKeys.make()) as link,
        zmq_link(host, way, ArenaKind.KV, keys=CurveKeys.make()) as kv,
    ):
        data = np.random.default_rng(7).bytes(ARENA_BYTES)
        await send(link, REF, 0, data)
        assert host.embedding.landed[REF, 0].data == data
        grant = await bound(kv, host)
        writer = kv.page_writer(grant, source, EVENTS)
        moved = writer.copy([5, 1], 0)
        await kv.commit_kv(REF, grant, 9, moved, Token(0, 5), 0)
        for local, page in zip([5, 1], grant_pages(grant), strict=False):
            assert (page_of(host.kv.arena.buffer, page) == source.cells[local]).all()


def grant_pages(grant: Grant) -> list[int]:
    return [page for group in grant.groups for page in group.pages]


async def test_the_largest_frame_fits() -> None:
    """On the wire it is larger than in clear."""
    keys = CurveKeys.make()
    async with running(arena_bytes=4 << 20, keys=keys) as host, zmq_link(host, keys=CurveKeys.make()) as link:
        data = np.random.default_rng(7).bytes(2 * MAX_PAYLOAD_BYTES + 1)
        await send(link, REF, 0, data)
        assert host.embedding.landed[REF, 0].data == data


async def test_strangers_are_turned_away_whatever_they_know_of_the_port(host: Host) -> None:
    """The port's public key is no secret: a sender's key must be that of a living session. Nor does a session's key
    open the door without encryption."""
    mine, port_key = CurveKeys.make(), host.data_port.address.curve_key
    async with zmq_link(host, keys=mine) as link:
        session = carrier_of(link)._session
        plain = credentials(session, carrier_of(link)._session_key)
        before = dropped("unauthenticated")
        stranger = CurveAdmission(CurveKeys.make(), port_key)
        async with raw_socket(host, b"", b"", stranger) as socket:
            assert not await socket.poll(300, zmq.POLLOUT)
            await eventually(lambda: dropped("unauthenticated") > before)
        for username, password in (plain, (b"", b"")):
            async with raw_socket(host, username, password) as socket:
                assert not await socket.poll(300, zmq.POLLOUT)
        async with raw_socket(host, b"", b"", CurveAdmission(mine, port_key)) as socket:
            assert await socket.poll(3000, zmq.POLLOUT)  # the right one does get in: the test can fail
        await send(link, REF, 0, b"unharmed")
    await eventually(lambda: not host.data_port._has_sender(mine.public))
    async with raw_socket(host, b"", b"", CurveAdmission(mine, port_key)) as socket:
        assert not await socket.poll(300, zmq.POLLOUT)  # its session is over
    assert host.embedding.landed[REF, 0].data == b"unharmed"


async def test_a_port_with_another_key_gets_nothing(host: Host) -> None:
    """Somebody else listens where the receiver should be."""
    sockets = DataSockets()
    link = ReceiverLink(sender_by("zmq-tcp", host), host.info.ref, ArenaKind.EMBEDDING, EMBEDDING_LAYOUT)
    async with running(keys=CurveKeys.make()) as impostor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("triptych.transport.zmq_carrier.CONNECT_TIMEOUT_S", 0.5)
            patch.setattr(Ways, "_endpoint", lambda self, welcome: f"tcp://127.0.0.1:{impostor.data_port.address.port}")
            with pytest.raises(Exception, match="cannot be reached"):
                await link.connect(
                    transfer_stub(host.channels, host.info), Ways(sockets, "127.0.0.1", CurveKeys.make())
                )
    sockets.close()


@pytest.mark.parametrize("who", ["sender", "receiver"])
async def test_nobody_is_talked_into_sending_in_clear(who: str) -> None:
    """A greeting without a key, on either side, is a refusal, and no frame is sent."""
    keys = CurveKeys.make()
    async with running(keys=keys if who == "receiver" else None) as host:
        me = sender_by("zmq-tcp", host)
        pool = LinkPool(me, host.pool(me)._stub_of, new_keys=(lambda: None) if who == "receiver" else CurveKeys.make)
        with pytest.raises(TransferRefused, match="encrypts its data connections"):
            await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
        await pool.close()


async def test_each_link_has_keys_of_its_own(host: Host) -> None:
    me = sender_by("zmq-tcp", host)
    pool = LinkPool(me, host.pool(me)._stub_of, new_keys=CurveKeys.make, kv=KV)
    embedding = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    await pool.kv_link(host.info, KV_LAYOUT)
    assert len(set(host.data_port._senders.values())) == 2
    assert isinstance(embedding, ReceiverLink)
    await send(embedding, AttemptRef("req-2"), 0, b"by pool")
    await pool.close()
    await eventually(lambda: not host.data_port._senders)


async def test_beyond_loopback_with_keys_it_listens_without_being_told() -> None:
    port = DataPort("0.0.0.0", 0, None, keys=CurveKeys.make())
    await port.open()
    assert port.address.port > 0 and len(port.address.curve_key) == 32
    await port.close()
    with pytest.raises(StartupError, match="--tls-cert"):
        DataPort("0.0.0.0", 0, None)


@pytest.mark.parametrize("length", [1, 31, 33, 40])
def test_a_key_of_another_length_is_refused(length: int) -> None:
    sound = wire.Hello(
        protocol_version=1,
        worker_id="w",
        epoch=1,
        arena=wire.ARENA_KIND_KV,
        layout_fingerprint=KV_LAYOUT,
        pages=wire.PageFormat(page_tokens=2, dtype=pb.KV_DTYPE_FLOAT32),
        curve_key=b"k" * 32,
    )
    assert frames.greeting_from_frame(sound).curve_key == b"k" * 32
    sound.curve_key = b"k" * length
    with pytest.raises(InvalidRequest, match="curve_key"):
        frames.greeting_from_frame(sound)
    ack = wire.HelloAck(worker_id="w", epoch=1, transport="zmq-tcp", curve_key=b"k" * length)
    with pytest.raises(InvalidRequest, match="curve_key"):
        frames.welcome_from_frame(ack)


def test_a_library_that_cannot_encrypt_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda what: False)
    with pytest.raises(StartupError, match="CURVE"):
        CurveKeys.make()


def test_a_secret_is_not_shown() -> None:
    keys = CurveKeys.make()
    assert repr(keys.secret) not in repr(keys)


def test_no_two_pairs_are_alike() -> None:
    assert len({CurveKeys.make().public for _ in range(8)}) == 8
