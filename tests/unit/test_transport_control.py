"""Control frames by a Unix-domain socket: the session goes on there, strangers get nowhere, gRPC serves without it."""

from __future__ import annotations

import asyncio
import os
import socket as sockets
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.canary import Canary, listening
from tests.unit import link_house
from tests.unit.link_house import ARENA_BYTES, EMBEDDING_LAYOUT, IDENTITY, REF, SENDER, Host, eventually, fill, send
from tests.unit.zmq_house import dropped
from triptych.core.errors import InvalidRequest, PeerLost, StartupError, TransferRefused
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.obs import metrics
from triptych.rpc.client import transfer_stub
from triptych.transport import control_port, control_wire, frames, wakefulness
from triptych.transport.control_port import ControlPort
from triptych.transport.control_wire import KNOCK, KNOCK_MAGIC, FrameWire
from triptych.transport.link_pool import LinkPool
from triptych.transport.receiver_link import ReceiverLink
from triptych.transport.types import ArenaKind, ControlAddress, Endpoint, SlotGrant
from triptych.transport.wakefulness import RESTS, Wakefulness
from triptych.transport.ways import DataSockets, Ways
from triptych.wire.v1 import transfer_pb2 as wire

host, shm_link = link_house.host, link_house.shm_link


def wire_of(link: ReceiverLink) -> FrameWire:
    assert link._wire is not None
    return link._wire


def waiting_session(host: Host) -> tuple[int, bytes, list[FrameWire]]:
    """A session that may be joined, with its key, and who has joined."""
    joined: list[FrameWire] = []
    address = host.control_port.expect(99, joined.append)
    return 99, address.key, joined


def fallbacks() -> float:
    return float(metrics.FALLBACKS.labels("control_socket")._value.get())


def path_of(host: Host) -> str:
    return host.control_port.expect(0, lambda _: None).socket_path


# --- the session goes on there ----------------------------------------------------------------------------------------


async def test_after_the_greeting_no_frame_goes_by_grpc(
    host: Host, monkeypatch: pytest.MonkeyPatch, shm_link: ReceiverLink
) -> None:
    def broken(*_: object) -> None:
        raise AssertionError("a frame went by the stream")

    assert shm_link._call is not None
    monkeypatch.setattr(shm_link._call, "write", broken)
    await fill(shm_link)
    waiting = asyncio.create_task(shm_link.request_slot(REF, 0, IDENTITY, 1, 64))
    await asyncio.sleep(0.02)
    await shm_link.abort(link_house.FULL, None, "enough")
    assert isinstance(await waiting, SlotGrant)
    await shm_link.abort(REF, None, "enough")
    await send(shm_link, AttemptRef("req-2"), 0, b"by the socket")
    assert host.embedding.landed[AttemptRef("req-2"), 0].data == b"by the socket"
    assert len(host.embedding.aborted) == 2


async def test_frames_that_had_to_wait_leave_before_those_that_need_not(host: Host, shm_link: ReceiverLink) -> None:
    """Sequences must ascend: a frame that was passed would be refused."""
    real = wire_of(shm_link)
    sent: list[int] = []

    class Slow:
        wakefulness = real.wakefulness
        close = real.close

        def __init__(self) -> None:
            self.room = asyncio.Event()

        @property
        def has_room(self) -> bool:
            return self.room.is_set()

        async def drained(self) -> None:
            await self.room.wait()

        def write(self, raw: bytes) -> None:
            sent.append(wire.SessionRequest.FromString(raw).sequence)
            real.write(raw)

    slow: Any = Slow()
    shm_link._wire = slow
    ask = [asyncio.create_task(shm_link.request_slot(REF, n, IDENTITY, 1, 64)) for n in range(3)]
    await asyncio.sleep(0.02)
    assert sent == []
    slow.room.set()
    ask.append(asyncio.create_task(shm_link.request_slot(REF, 3, IDENTITY, 1, 64)))
    shm_link.abort_soon(AttemptRef("req-9"), None, "at once")
    grants = await asyncio.wait_for(asyncio.gather(*ask), 5)
    assert all(isinstance(grant, SlotGrant) for grant in grants)
    assert len(sent) == 5 and sent == sorted(sent)


async def test_the_end_of_the_socket_is_the_end_of_the_session(host: Host, shm_link: ReceiverLink) -> None:
    await fill(shm_link)
    waiting = asyncio.create_task(shm_link.request_slot(REF, 0, IDENTITY, 1, 64))
    await asyncio.sleep(0.02)
    wire_of(shm_link).close()
    with pytest.raises(PeerLost):
        await waiting
    await asyncio.wait_for(shm_link.closed.wait(), 5)
    await eventually(lambda: host.embedding.lost == [SENDER.ref])
    assert host.embedding.slots.free_bytes == ARENA_BYTES


async def test_a_link_that_ends_leaves_no_connection(host: Host, shm_link: ReceiverLink) -> None:
    await send(shm_link, REF, 0, b"something")
    (talk,) = host.servicer._talks.values()
    there = talk._wire
    assert there is not None and there._transport is not None
    await shm_link.close()
    await eventually(lambda: host.embedding.lost == [SENDER.ref])
    assert there._transport.is_closing() and not host.control_port._waiting and not host.control_port._strangers


# --- strangers --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def connection(host: Host) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_unix_connection(path_of(host))
    try:
        yield reader, writer
    finally:
        writer.close()


async def closed(reader: asyncio.StreamReader, patience_s: float) -> bool:
    """Whether the other end says nothing and is closed in time."""
    try:
        return await asyncio.wait_for(reader.read(), patience_s) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def framed(raw: bytes) -> bytes:
    return struct.pack("<I", len(raw)) + raw


WRONG_KNOCKS: dict[str, Callable[[int, bytes], bytes]] = {
    "nothing": lambda session, key: framed(b""),
    "another language": lambda session, key: framed(KNOCK.pack(b"TPC\x02", session, key)),
    "another session": lambda session, key: framed(KNOCK.pack(KNOCK_MAGIC, session + 1, key)),
    "another key": lambda session, key: framed(KNOCK.pack(KNOCK_MAGIC, session, bytes(16))),
    "too short": lambda session, key: framed(KNOCK.pack(KNOCK_MAGIC, session, key)[:-1]),
    "too long": lambda session, key: framed(KNOCK.pack(KNOCK_MAGIC, session, key) + b"x"),
    "a length beyond all": lambda session, key: b"\xff" * 64,
    "http": lambda session, key: b"GET / HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("what", WRONG_KNOCKS)
async def test_a_wrong_knock_opens_nothing(host: Host, shm_link: ReceiverLink, what: str) -> None:
    session, key, joined = waiting_session(host)
    before = dropped("unauthenticated")
    async with connection(host) as (reader, writer):
        writer.write(WRONG_KNOCKS[what](session, key))
        assert await closed(reader, 5)
    assert dropped("unauthenticated") == before + 1 and joined == []
    await send(shm_link, REF, 0, b"unharmed")
    right = await control_wire.knock(path_of(host), session, key)
    assert len(joined) == 1
    right.close()


async def test_a_key_opens_once(host: Host) -> None:
    session, key, joined = waiting_session(host)
    first = await control_wire.knock(path_of(host), session, key)
    with pytest.raises(TransferRefused):
        await control_wire.knock(path_of(host), session, key)
    assert len(joined) == 1
    first.close()


async def test_a_session_that_is_over_lets_nobody_in(host: Host) -> None:
    session, key, joined = waiting_session(host)
    host.control_port.forget(session)
    with pytest.raises(TransferRefused):
        await control_wire.knock(path_of(host), session, key)
    assert joined == []


async def test_another_user_is_closed_whatever_it_knows(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    session, key, joined = waiting_session(host)
    monkeypatch.setattr(control_wire, "peer_uid", lambda _: os.getuid() + 1)
    before = dropped("unauthenticated")
    async with connection(host) as (reader, writer):
        writer.write(framed(KNOCK.pack(KNOCK_MAGIC, session, key)))
        assert await closed(reader, 5)
    assert joined == [] and dropped("unauthenticated") == before + 1


async def test_the_kernel_tells_who_connects() -> None:
    ours, theirs = sockets.socketpair()
    made, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
    assert control_wire.peer_uid(made) == os.getuid()
    made.close()
    theirs.close()


async def test_who_does_not_knock_is_closed_in_time(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_port, "KNOCK_TIMEOUT_S", 0.1)
    async with connection(host) as (reader, writer):
        writer.write(b"\x1c")  # a part of a length is no knock
        assert await closed(reader, 5)
    assert not host.control_port._strangers


async def test_strangers_are_bounded(host: Host, shm_link: ReceiverLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_port, "MAX_STRANGERS", 3)
    connections = [await asyncio.open_unix_connection(path_of(host)) for _ in range(5)]
    ends = await asyncio.gather(*(closed(reader, 0.3) for reader, _ in connections))
    assert ends == [False, False, False, True, True]
    await send(shm_link, REF, 0, b"unharmed")
    for _, writer in connections:
        writer.close()


# --- who was let in, and says what it may not -------------------------------------------------------------------------


async def test_a_canary_from_a_sender_ends_its_session_only(host: Host, tmp_path: Path) -> None:
    canary = Canary(tmp_path / "trace")
    with listening() as looked_up:
        for raw in (framed(canary.raw), framed(canary.text.encode()), canary.raw):
            link = await connected(host)
            transport = wire_of(link)._transport
            assert transport is not None
            transport.write(raw)
            await asyncio.wait_for(link.closed.wait(), 5)
            await link.close()
        link = await connected(host)
        await send(link, REF, 0, b"unharmed")
        await link.close()
    assert not canary.sung() and looked_up == []


async def connected(host: Host) -> ReceiverLink:
    made = ReceiverLink(SENDER, host.info.ref, ArenaKind.EMBEDDING, EMBEDDING_LAYOUT)
    await made.connect(transfer_stub(host.channels, host.info), Ways(DataSockets(), "127.0.0.1"))
    return made


async def test_frames_out_of_turn_are_refused_there_too(host: Host, shm_link: ReceiverLink) -> None:
    """A second greeting, an old sequence, and a frame of the other kind of arena."""
    real, answers = wire_of(shm_link), asyncio.Queue[wire.SessionResponse]()
    real.take = lambda raw: answers.put_nowait(wire.SessionResponse.FromString(raw))
    await asyncio.sleep(0)
    bind = wire.BindRequest(grant_id="grant-1", capability=b"c" * 16)
    bind.ref.request_id = "req-1"
    for sequence, frame in (
        (1, wire.SessionRequest(hello=wire.Hello(protocol_version=1))),
        (2, wire.SessionRequest(bind_request=bind)),
        (2, wire.SessionRequest(bind_request=bind)),
        (3, wire.SessionRequest()),
    ):
        frame.sequence = sequence
        real.write(frame.SerializeToString())
        answer = await asyncio.wait_for(answers.get(), 5)
        assert answer.WhichOneof("kind") == "refused" and answer.sequence == sequence


# --- where there is no such socket ------------------------------------------------------------------------------------


def open_to_others(path: Path) -> None:
    path.chmod(0o666)


def gone(path: Path) -> None:
    path.unlink()


def no_socket(path: Path) -> None:
    path.unlink()
    path.write_bytes(b"")
    path.chmod(0o600)


def nobody_listens(path: Path) -> None:
    path.unlink()
    with sockets.socket(sockets.AF_UNIX) as dead:
        dead.bind(str(path))
    path.chmod(0o600)


@pytest.mark.parametrize("trouble", [open_to_others, gone, no_socket, nobody_listens])
async def test_without_the_socket_frames_go_by_grpc_and_it_is_counted(
    host: Host, trouble: Callable[[Path], None]
) -> None:
    trouble(Path(path_of(host)))
    before = fallbacks()
    link = await connected(host)
    assert link._wire is None and fallbacks() == before + 1
    await send(link, REF, 0, b"by the stream")
    assert host.embedding.landed[REF, 0].data == b"by the stream"
    await link.close()


async def test_strict_refuses_the_second_best(host: Host) -> None:
    gone(Path(path_of(host)))
    pool = LinkPool(SENDER, partial(transfer_stub, host.channels), strict=True)
    with pytest.raises(TransferRefused, match="not on this host"):
        await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    await pool.close()


async def test_a_receiver_without_a_control_port_is_sent_to_by_grpc(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host.servicer, "_control_port", None)
    before = fallbacks()
    link = await connected(host)
    await send(link, REF, 0, b"by the stream")
    assert link._wire is None and fallbacks() == before
    await link.close()


async def test_a_sender_of_another_host_is_told_of_no_socket(host: Host) -> None:
    sender = replace(SENDER, host_id="elsewhere", transports=("zmq-tcp",))
    link = ReceiverLink(sender, host.info.ref, ArenaKind.EMBEDDING, EMBEDDING_LAYOUT)
    sockets = DataSockets()
    await link.connect(transfer_stub(host.channels, host.info), Ways(sockets, "127.0.0.1"))
    assert link._wire is None
    await send(link, REF, 0, b"by tcp")
    await link.close()
    sockets.close()


async def test_where_it_cannot_listen_the_start_ends_with_a_sentence(tmp_path: Path) -> None:
    port = ControlPort(tmp_path / "no-such-folder" / "control.sock")
    with pytest.raises(StartupError, match="--runtime-dir"):
        await port.open()
    await port.close()


async def test_the_socket_is_for_its_owner_and_goes_with_its_port(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    port = ControlPort(path)
    await port.open()
    assert path.stat().st_mode & 0o777 == 0o600
    await port.close()
    assert not path.exists()


SOUND = ControlAddress("/run/prefill-0.sock", b"k" * 16)


@pytest.mark.parametrize(
    "address",
    [
        replace(SOUND, key=b"k" * 15),
        replace(SOUND, key=b""),
        replace(SOUND, socket_path=""),
        replace(SOUND, socket_path="run/prefill-0.sock"),
        replace(SOUND, socket_path="/" + "d" * 107),
        replace(SOUND, socket_path="/run/\n.sock"),
    ],
)
def test_a_control_address_that_cannot_be_one_is_refused(address: ControlAddress) -> None:
    me = Endpoint(WorkerRef("prefill-0", 1), "host", ("shm",))

    def told(control: ControlAddress) -> ControlAddress:
        frame = frames.welcome_to_frame(1, me, frames.Welcome("shm", control=control))
        return frames.welcome_from_frame(frame.hello_ack).control

    assert told(SOUND) == SOUND
    if address.socket_path:
        with pytest.raises(InvalidRequest):
            told(address)


# --- frames of a stream of bytes --------------------------------------------------------------------------------------


@asynccontextmanager
async def pair(max_frame_bytes: int = 1 << 20) -> AsyncIterator[tuple[FrameWire, sockets.socket, list[bytes]]]:
    ours, theirs = sockets.socketpair()
    got: list[bytes] = []
    made = FrameWire(got.append, lambda: got.append(b"lost"), max_frame_bytes)
    await asyncio.get_running_loop().create_connection(lambda: made, sock=ours)
    theirs.setblocking(False)
    try:
        yield made, theirs, got
    finally:
        made.close()
        theirs.close()


async def test_a_cut_anywhere_changes_no_frame() -> None:
    sent = [b"a", b"", b"frame of some length", b"b" * 300]
    raw = b"".join(map(framed, sent))
    async with pair() as (made, _, got):
        for cut in range(len(raw) + 1):
            got.clear()
            for part in (raw[:cut], raw[cut:]):
                if part:
                    made.data_received(part)
            assert got == sent, cut


async def test_a_frame_above_the_limit_ends_the_connection_unread() -> None:
    async with pair(max_frame_bytes=8) as (_, theirs, got):
        theirs.send(framed(b"8 bytes.") + struct.pack("<I", 9))
        await eventually(lambda: b"lost" in got)
        assert got == [b"8 bytes.", b"lost"]


async def test_a_flood_is_taken_in_turns() -> None:
    async with pair() as (_, theirs, got):
        theirs.send(framed(b"x") * 1000)
        turns = 0
        async with asyncio.timeout(5):
            while len(got) < 1000:
                before = len(got)
                await asyncio.sleep(0)
                assert len(got) - before <= 2 * control_wire.FRAMES_A_TURN
                turns += 1
        assert turns >= 1000 / (2 * control_wire.FRAMES_A_TURN)
        theirs.send(framed(b"and on"))
        await eventually(lambda: got[-1] == b"and on")


async def test_a_peer_that_reads_nothing_is_waited_for() -> None:
    async with pair() as (made, theirs, _):
        while made.has_room:
            made.write(b"x" * 4096)
        waiting = asyncio.create_task(made.drained())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        while not waiting.done():
            with suppress(BlockingIOError):
                theirs.recv(1 << 20)
            await asyncio.sleep(0)
        made.close()
        await made.drained()


# --- waiting awake ----------------------------------------------------------------------------------------------------


async def test_after_a_time_awake_in_vain_it_sleeps_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(wakefulness.time, "perf_counter", lambda: now_s)
    monkeypatch.setattr(wakefulness.os, "sched_getaffinity", lambda _: {0, 1})
    awake = Wakefulness()
    awake.expect()
    assert awake._is_turning
    await asyncio.sleep(0)
    awake.heard()
    await asyncio.sleep(0)
    assert not awake._is_turning
    awake.expect()  # it was not in vain
    assert awake._is_turning
    now_s = 1.0
    await asyncio.sleep(0)
    assert not awake._is_turning
    for _ in range(RESTS):
        awake.expect()
        assert not awake._is_turning
    awake.expect()
    assert awake._is_turning
    awake.heard()
    await asyncio.sleep(0)


async def test_on_one_core_it_always_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakefulness.os, "sched_getaffinity", lambda _: {0})
    awake = Wakefulness()
    awake.expect()
    assert not awake._is_turning
