"""The data socket and what sends to it, over real sockets."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zmq
import zmq.asyncio

from tests.unit.test_transport_link import (
    ARENA_BYTES,
    EMBEDDING_LAYOUT,
    EVENTS,
    IDENTITY,
    KV_LAYOUT,
    PAGES,
    REF,
    TOKEN,
    Host,
    Pages,
    eventually,
    page_of,
    running,
    send,
    sender_by,
)
from triptych.core.errors import (
    Aborted,
    InvalidRequest,
    NoRoom,
    PeerLost,
    StartupError,
    TransferRefused,
    TriptychError,
)
from triptych.core.grant import Grant
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.plan import EmbeddingSource, Token
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.obs import metrics
from triptych.rpc.client import ChannelPool, transfer_stub
from triptych.transport import frames, zmq_carrier, zmq_port
from triptych.transport.carrier import WriterEvents
from triptych.transport.data_frame import DataHeader, PayloadKind, pack
from triptych.transport.layout import checksum64, host_id
from triptych.transport.link_pool import LinkPool
from triptych.transport.receiver_link import ReceiverLink
from triptych.transport.shm import sweep_dead_segments
from triptych.transport.types import ArenaKind, Endpoint, SlotGrant
from triptych.transport.ways import DataSockets, Ways, host_of
from triptych.transport.zmq_carrier import ZmqCarrier
from triptych.transport.zmq_gate import credentials
from triptych.transport.zmq_port import DataPort, data_socket_path, sweep_dead_sockets
from triptych.wire.v1 import transfer_pb2 as wire

WAYS = ("zmq-ipc", "zmq-tcp")


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    async with running() as started:
        yield started


@asynccontextmanager
async def zmq_link(
    host: Host, way: str = "zmq-tcp", kind: ArenaKind = ArenaKind.EMBEDDING, address: str = "127.0.0.1"
) -> AsyncIterator[ReceiverLink]:
    sockets = DataSockets()
    layout = EMBEDDING_LAYOUT if kind is ArenaKind.EMBEDDING else KV_LAYOUT
    link = ReceiverLink(sender_by(way, host), host.info.ref, kind, layout)
    await link.connect(transfer_stub(host.channels, host.info), Ways(sockets, address))
    try:
        yield link
    finally:
        await link.close()
        sockets.close()


def carrier_of(link: ReceiverLink) -> ZmqCarrier:
    carrier = link._carrier()
    assert isinstance(carrier, ZmqCarrier)
    return carrier


def dropped(reason: str) -> float:
    return float(metrics.DATA_FRAMES_DROPPED.labels(reason)._value.get())


@asynccontextmanager
async def raw_socket(host: Host, username: bytes, password: bytes) -> AsyncIterator[zmq.asyncio.Socket]:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.PUSH)
    socket.linger, socket.immediate = 0, True
    if username:
        socket.plain_username, socket.plain_password = username, password
    socket.connect(f"tcp://127.0.0.1:{host.data_port.address.port}")
    try:
        yield socket
    finally:
        socket.close(0)
        context.destroy(linger=0)


async def slot_of(link: ReceiverLink, num_bytes: int = 64) -> SlotGrant:
    grant = await link.request_slot(REF, 0, IDENTITY, 1, num_bytes)
    assert isinstance(grant, SlotGrant)
    return grant


# --- strangers --------------------------------------------------------------------------------------------------------


class Canary:
    """Unpickled, it leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.trace),)


def canary(trace: Path) -> bytes:
    import pickle

    return pickle.dumps(Canary(trace))


async def test_a_connection_without_a_sessions_key_delivers_nothing(host: Host, tmp_path: Path) -> None:
    async with zmq_link(host) as link:
        session = carrier_of(link)._session
        wrong = [
            (b"", b""),
            (str(session).encode(), b"0" * 32),
            (b"9" * 30, b"0" * 32),
            credentials(session + 1, b"k" * 16),
        ]
        for username, password in wrong:
            before = dropped("unauthenticated")
            async with raw_socket(host, username, password) as socket:
                assert not await socket.poll(200, zmq.POLLOUT)
                if password:  # without one the handshake ends before anybody is asked
                    await eventually(lambda before=before: dropped("unauthenticated") > before)
                with pytest.raises(zmq.Again):
                    await socket.send(canary(tmp_path / "trace"), zmq.NOBLOCK)
        await send(link, REF, 0, b"unharmed")
    assert not (tmp_path / "trace").exists()


async def test_a_canary_that_gets_in_is_never_unpickled(host: Host, tmp_path: Path) -> None:
    bird = canary(tmp_path / "trace")
    async with zmq_link(host) as link:
        carrier = carrier_of(link)
        async with raw_socket(host, *credentials(carrier._session, carrier._session_key)) as socket:
            assert await socket.poll(3000, zmq.POLLOUT)
            for parts in ([bird], [bird, bird], [bird] * 9, [b"", b""], [b""], [b"TPZ\0" + bird, bird]):
                before = dropped("malformed")
                await socket.send_multipart(parts)
                await eventually(lambda before=before: dropped("malformed") == before + 1)
        await send(link, REF, 0, b"unharmed")
    assert not (tmp_path / "trace").exists()
    assert host.embedding.landed[REF, 0].data == b"unharmed"


async def test_an_oversized_message_ends_its_connection_only(host: Host) -> None:
    async with zmq_link(host) as link:
        carrier = carrier_of(link)
        async with raw_socket(host, *credentials(carrier._session, carrier._session_key)) as socket:
            assert await socket.poll(3000, zmq.POLLOUT)
            await socket.send_multipart([b"x" * 88, bytes(zmq_port.MAX_PAYLOAD_BYTES + 1)])
            await send(link, REF, 0, b"unharmed")
    assert host.embedding.landed[REF, 0].data == b"unharmed"


FORGED: dict[str, tuple[str, Callable[[DataHeader], DataHeader]]] = {
    "kind": ("forged", lambda header: replace(header, kind=PayloadKind.PAGES)),
    "session": ("unknown_session", lambda header: replace(header, session=header.session + 1000)),
    "session_key": ("forged", lambda header: replace(header, session_key=b"x" * 16)),
    "ticket": ("late", lambda header: replace(header, ticket=header.ticket + 1)),
    "capability": ("forged", lambda header: replace(header, capability=b"x" * 16)),
    "generation": ("forged", lambda header: replace(header, generation=header.generation + 1)),
    "offset": ("out_of_order", lambda header: replace(header, offset=1)),
    "length": ("malformed", lambda header: replace(header, length=header.length + 1)),
}


@pytest.mark.parametrize("field", FORGED)
async def test_a_frame_with_any_field_forged_is_dropped_and_the_next_transfer_is_right(host: Host, field: str) -> None:
    reason, forge = FORGED[field]
    async with zmq_link(host) as link:
        carrier, grant = carrier_of(link), await slot_of(link)
        sound = DataHeader(
            PayloadKind.SLOT,
            carrier._session,
            carrier._session_key,
            grant.ticket,
            grant.capability,
            grant.generation,
            0,
            64,
        )
        before = dropped(reason)
        payload = memoryview(b"f" * 64)
        async with raw_socket(host, *credentials(carrier._session, carrier._session_key)) as socket:
            assert await socket.poll(3000, zmq.POLLOUT)
            await socket.send_multipart([pack(forge(sound), payload), payload])
            await eventually(lambda: dropped(reason) == before + 1)
        assert not any(host.embedding.arena.buffer)
        if field != "offset":  # that one leaves a gap in its own grant
            await link.write_slot(grant, memoryview(b"t" * 64))
            await link.commit_embedding(REF, 0, grant, EmbeddingSource.REMOTE, checksum64(b"t" * 64))
            assert host.embedding.landed[REF, 0].data == b"t" * 64
        await send(link, AttemptRef("req-2"), 0, b"next")
        assert host.embedding.landed[AttemptRef("req-2"), 0].data == b"next"


# --- on the way -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_what_is_larger_than_a_frame_lands_whole(host: Host, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_carrier, "MAX_PAYLOAD_BYTES", 100)
    async with zmq_link(host, way) as link:
        data = np.random.default_rng(7).bytes(ARENA_BYTES)
        await send(link, REF, 0, data)
        assert host.embedding.landed[REF, 0].data == data


def tampered(carrier: ZmqCarrier, change: Callable[[int, list[bytes]], list[list[bytes]]]) -> None:
    """What leaves the carrier's socket goes through `change` first: number of the message, its parts, what is sent."""
    sent = carrier._socket.send_multipart
    count = 0

    async def send_changed(parts: list[bytes], **_: object) -> None:
        nonlocal count
        for message in change(count, [bytes(part) for part in parts]):
            await sent(message)
        count += 1

    carrier._socket.send_multipart = send_changed  # type: ignore[method-assign, assignment]


WAYS_TO_LOSE: dict[str, Callable[[int, list[bytes]], list[list[bytes]]]] = {
    "the first is lost": lambda n, parts: [] if n == 0 else [parts],
    "the last is lost": lambda n, parts: [] if n == 4 else [parts],
    "one is damaged": lambda n, parts: [[parts[0], b"\xff" + parts[1][1:]]] if n == 2 else [parts],
    "one is cut": lambda n, parts: [[parts[0], parts[1][:-1]]] if n == 2 else [parts],
    "one lacks its payload": lambda n, parts: [parts[:1]] if n == 2 else [parts],
}


@pytest.mark.parametrize("loss", WAYS_TO_LOSE)
async def test_a_lost_frame_is_a_refusal_that_can_be_tried_again(
    host: Host, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_carrier, "MAX_PAYLOAD_BYTES", 16)
    monkeypatch.setattr("triptych.transport.landings.STALLED_S", 0.3)
    async with zmq_link(host) as link:
        tampered(carrier_of(link), WAYS_TO_LOSE[loss])
        with pytest.raises(TransferRefused) as refused:
            await send(link, REF, 0, b"x" * 80)
        assert refused.value.retriable and not host.embedding.landed
        await link.abort(REF, None, "lost")
        await send(link, AttemptRef("req-2"), 0, b"y" * 80)
        assert host.embedding.landed[AttemptRef("req-2"), 0].data == b"y" * 80


class CuttingProxy:
    """Forwards to the data port. The first connection is cut after `num_bytes` from the sender."""

    def __init__(self, port: int, num_bytes: int) -> None:
        self._target = port
        self._left = num_bytes
        self.is_cut = False
        self._pipes: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> int:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for pipe in list(self._pipes):
            pipe.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)
        await self._server.wait_closed()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        pipes = {asyncio.create_task(self._forth(reader, back)), asyncio.create_task(_back(there, writer))}
        self._pipes |= pipes
        await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
        for pipe in pipes:
            pipe.cancel()
        for stream in (writer, back):
            stream.close()

    async def _forth(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 if not self.is_cut else 65536):
            if not self.is_cut and self._left == 0:
                self.is_cut = True
                return
            self._left -= 0 if self.is_cut else 1
            writer.write(data)


async def _back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)


@pytest.mark.parametrize("num_bytes", [*range(0, 720, 60), 1, 64, 65, 400, 433])
async def test_a_connection_cut_after_any_byte_is_a_refusal_or_a_right_transfer(
    host: Host, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZMQ connects again by itself; what was in the pipe is lost, and never half a frame."""
    monkeypatch.setattr(zmq_carrier, "MAX_PAYLOAD_BYTES", 16)
    monkeypatch.setattr("triptych.transport.landings.STALLED_S", 0.3)
    data = bytes(range(1, 81))
    proxy = CuttingProxy(host.data_port.address.port, num_bytes)
    async with proxy as port:
        monkeypatch.setattr(Ways, "_endpoint", lambda self, welcome: f"tcp://127.0.0.1:{port}")
        async with zmq_link(host) as link:
            with suppress(TransferRefused):
                await send(link, REF, 0, data)
            assert not host.embedding.landed or host.embedding.landed[REF, 0].data == data
            await link.abort(REF, None, "over")
            for attempt in range(20):  # the first may still go into the pipe that is being lost
                with suppress(TransferRefused):
                    await send(link, AttemptRef("req-2", 0, attempt), 0, data)
                    break
                await link.abort(AttemptRef("req-2", 0, attempt), None, "lost")
            assert host.embedding.landed[AttemptRef("req-2", 0, attempt), 0].data == data
            assert proxy.is_cut
    await eventually(lambda: host.embedding.slots.free_bytes == ARENA_BYTES)


async def test_a_bug_in_the_pump_fails_the_link_in_words(host: Host) -> None:
    async with zmq_link(host) as link:

        def broken(number: int, parts: list[bytes]) -> list[list[bytes]]:
            raise RuntimeError("a bug at 0x7f00")

        tampered(carrier_of(link), broken)
        grant = await slot_of(link)
        with pytest.raises(TriptychError) as caught:
            await link.write_slot(grant, memoryview(bytes(64)))
        assert "0x" not in str(caught.value)
        await asyncio.wait_for(link.closed.wait(), 5)


async def test_frames_that_come_twice_land_once(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_carrier, "MAX_PAYLOAD_BYTES", 16)
    async with zmq_link(host) as link:
        tampered(carrier_of(link), lambda n, parts: [parts, parts])
        data = bytes(range(80))
        await send(link, REF, 0, data)
        assert host.embedding.landed[REF, 0].data == data


async def test_a_late_frame_changes_nothing(host: Host) -> None:
    """After an abort, and after the very same slot was granted again."""
    async with zmq_link(host) as link:
        carrier, old = carrier_of(link), await slot_of(link)
        await link.abort(REF, None, "given up")
        await eventually(lambda: host.embedding.slots.free_bytes == ARENA_BYTES)
        before = dropped("late")
        await link.write_slot(old, memoryview(b"o" * 64))
        await eventually(lambda: dropped("late") == before + 1)
        assert not any(host.embedding.arena.buffer)
        new = await slot_of(link)
        assert new.offset == old.offset
        await link.write_slot(replace(new, ticket=old.ticket), memoryview(b"o" * 64))
        await link.write_slot(new, memoryview(b"n" * 64))
        await link.commit_embedding(REF, 0, new, EmbeddingSource.REMOTE, checksum64(b"n" * 64))
        assert host.embedding.landed[REF, 0].data == b"n" * 64
        await carrier.write_slot(new, memoryview(b"z" * 64))
        await eventually(lambda: dropped("late") == before + 3)
        assert bytes(host.embedding.arena.buffer[:64]) == b"n" * 64


# --- pages ------------------------------------------------------------------------------------------------------------


async def bound(link: ReceiverLink, host: Host, grant_id: str = "grant-1") -> Grant:
    credit = Grant(grant_id, "prefill-1", 21, b"c" * 16, 4, 0)
    host.kv.credits[grant_id] = credit
    return await link.bind_kv(REF, credit)


@pytest.mark.parametrize("payload_bytes", [7, 16, 64, 100])
async def test_pages_land_in_their_cells_whatever_a_frame_holds(
    host: Host, payload_bytes: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_carrier, "MAX_PAYLOAD_BYTES", payload_bytes)
    source = Pages(seed)
    async with zmq_link(host, kind=ArenaKind.KV) as link:
        grant = await bound(link, host)
        writer = link.page_writer(grant, source, EVENTS)
        moved = sum([await asyncio.to_thread(writer.copy, [page], first) for first, page in enumerate((3, 6, 1))])
        await link.commit_kv(REF, grant, 9, moved, Token(0, 5), 0)
        for page, sent in enumerate((3, 6, 1)):
            assert (page_of(host.kv.arena.buffer, page) == source.cells[sent]).all()


async def test_a_page_commit_shows_the_sum_of_all_that_was_sent(host: Host, seed: int) -> None:
    """Content that was swapped for other content with a sound frame of its own."""
    async with zmq_link(host, kind=ArenaKind.KV) as link:
        carrier, grant = carrier_of(link), await bound(link, host)

        def swap(number: int, parts: list[bytes]) -> list[list[bytes]]:
            header = DataHeader(
                PayloadKind.PAGES,
                carrier._session,
                carrier._session_key,
                1,
                grant.capability,
                grant.generation,
                0,
                len(parts[1]),
            )
            other = bytes(len(parts[1]))
            return [[pack(header, memoryview(other)), other]]

        tampered(carrier, swap)
        writer = link.page_writer(grant, Pages(seed), EVENTS)
        moved = writer.copy([1], 0)
        with pytest.raises(TransferRefused, match="checksum"):
            await link.commit_kv(REF, grant, 9, moved, Token(0, 5), 0)
        assert not host.kv.landed


async def test_pages_out_of_order_or_beyond_the_grant_fail_the_commit(host: Host, seed: int) -> None:
    for pages, first in (([1], 1), ([1, 2, 3, 4, 5], 0)):
        async with zmq_link(host, kind=ArenaKind.KV) as link:
            failures: list[TriptychError] = []
            grant = await bound(link, host)
            writer = link.page_writer(grant, Pages(seed), WriterEvents(failures.append, lambda: None))
            moved = writer.copy(pages, first)
            assert moved == len(pages) * PAGES.page_bytes
            await asyncio.sleep(0)
            with pytest.raises(TransferRefused):
                await link.commit_kv(REF, grant, 9, moved, Token(0, 5), 0)
            assert len(failures) == 1 and isinstance(failures[0], TransferRefused)
            assert not any(host.kv.arena.buffer)


async def test_pages_that_the_receiver_does_not_have_are_refused_before_anything_runs(host: Host, seed: int) -> None:
    for way in ("shm", *WAYS):
        async with zmq_link(host, way, ArenaKind.KV) as link:
            grant = await bound(link, host)
            (group,) = grant.groups
            (region,) = group.regions
            far = replace(grant, groups=(replace(group, regions=(replace(region, first_page=ARENA_BYTES),)),))
            with pytest.raises(TransferRefused, match="does not have"):
                link.page_writer(far, Pages(seed), EVENTS)
            with pytest.raises(TransferRefused, match="not bound"):
                link.page_writer(replace(grant, grant_id="grant-2"), Pages(seed), EVENTS)


async def test_a_writer_says_when_too_much_is_on_its_way_and_when_not_any_more(
    host: Host, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_carrier, "CONGESTED_BYTES", PAGES.page_bytes)
    relieved = asyncio.Event()
    async with zmq_link(host, kind=ArenaKind.KV) as link:
        grant = await bound(link, host)
        writer = link.page_writer(grant, Pages(seed), WriterEvents(lambda error: None, relieved.set))
        moved = writer.copy([1], 0)
        assert not writer.is_congested
        moved += writer.copy([2], 1)
        assert writer.is_congested
        await asyncio.wait_for(relieved.wait(), 5)
        assert not writer.is_congested
        await link.commit_kv(REF, grant, 9, moved, Token(0, 5), 0)


async def test_a_grant_given_up_while_its_commit_waits_ends_the_commit(
    host: Host, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with zmq_link(host, kind=ArenaKind.KV) as link:
        grant, gate = await bound(link, host), asyncio.Event()
        sent = carrier_of(link)._socket.send_multipart

        async def held(parts: list[bytes], **_: object) -> None:
            await gate.wait()
            await sent(parts)

        carrier_of(link)._socket.send_multipart = held  # type: ignore[method-assign, assignment]
        writer = link.page_writer(grant, Pages(seed), EVENTS)
        moved = writer.copy([1, 2], 0)
        committing = asyncio.create_task(link.commit_kv(REF, grant, 9, moved, Token(0, 5), 0))
        await asyncio.sleep(0.02)
        assert not committing.done()
        await link.abort(REF, grant.grant_id, "given up")
        with pytest.raises(Aborted):
            await asyncio.wait_for(committing, 5)
        gate.set()
        await eventually(lambda: [entry[:2] for entry in host.kv.aborted] == [(REF, "grant-1")])
        assert not host.kv.landed


async def test_more_than_may_ever_be_on_its_way_fails_that_grant_only(
    host: Host, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_carrier, "MAX_IN_FLIGHT_BYTES", 2 * PAGES.page_bytes)
    async with zmq_link(host, kind=ArenaKind.KV) as link:
        first, second = await bound(link, host, "grant-1"), await bound(link, host, "grant-2")
        failures: list[TriptychError] = []
        early = link.page_writer(first, Pages(seed), EVENTS)
        late = link.page_writer(second, Pages(seed), WriterEvents(failures.append, lambda: None))
        moved = early.copy([0, 1, 2], 0)  # alone on the link it may be as large as it is
        assert late.copy([1], 0) == PAGES.page_bytes
        await link.commit_kv(REF, first, 9, moved, Token(0, 5), 0)
        with pytest.raises(NoRoom):
            await link.commit_kv(REF, second, 9, PAGES.page_bytes, Token(0, 5), 0)
        assert [type(error) for error in failures] == [NoRoom]
        assert list(host.kv.landed) == ["grant-1"]


# --- a peer that stops ------------------------------------------------------------------------------------------------

RECEIVER_PROCESS = """
import asyncio, sys
from tests.unit import test_transport_link as base

async def main():
    async with base.running(arena_bytes=int(sys.argv[1])) as host:
        num_pages = int(sys.argv[1]) // base.PAGES.page_bytes
        host.kv.credits["grant-1"] = base.Grant("grant-1", "prefill-1", 21, b"c" * 16, num_pages, 0)
        print(host.info.grpc_address, flush=True)
        await asyncio.sleep(120)

asyncio.run(main())
"""
STOPPED_BYTES = 64 << 20


@asynccontextmanager
async def receiver_process(num_bytes: int) -> AsyncIterator[tuple[asyncio.subprocess.Process, WorkerInfo]]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RECEIVER_PROCESS, str(num_bytes), stdout=subprocess.PIPE, env={**os.environ}
    )
    assert child.stdout is not None
    try:
        address = (await asyncio.wait_for(child.stdout.readline(), 30)).decode().strip()
        info = WorkerInfo(
            "prefill-1",
            21,
            frozenset({Role.PREFILL}),
            WorkerState.READY,
            address,
            host_id=host_id(),
            transports=("shm", *WAYS),
        )
        yield child, info
    finally:
        with suppress(ProcessLookupError):
            child.send_signal(signal.SIGCONT)
            child.kill()
        await child.wait()
        sweep_dead_segments()


async def worst_lag_s(stop: asyncio.Event) -> float:
    """How late the loop was at worst."""
    worst = 0.0
    while not stop.is_set():
        due = time.monotonic() + 0.01
        await asyncio.sleep(0.01)
        worst = max(worst, time.monotonic() - due)
    return worst


@pytest.mark.parametrize("way", WAYS)
async def test_a_stopped_receiver_is_a_typed_error_in_time_and_never_blocks_the_loop(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hazard: a socket at its high-water mark blocks whoever sends. The bound on the lag is the hazard's own."""
    monkeypatch.setattr(zmq_carrier, "SEND_TIMEOUT_S", 1.0)
    channels, me = ChannelPool(TOKEN), Endpoint(WorkerRef("encoder-1", 11), host_id(), (way,))
    async with receiver_process(STOPPED_BYTES) as (child, info):
        pool = LinkPool(me, lambda worker: transfer_stub(channels, worker))
        link = await pool.embedding_link(info, EMBEDDING_LAYOUT)
        grant = await link.request_slot(REF, 0, IDENTITY, 1, STOPPED_BYTES)
        assert isinstance(grant, SlotGrant)
        data = memoryview(bytes(STOPPED_BYTES))
        child.send_signal(signal.SIGSTOP)
        stop = asyncio.Event()
        lag = asyncio.create_task(worst_lag_s(stop))
        with pytest.raises(PeerLost, match="stopped taking data"):
            await asyncio.wait_for(link.write_slot(grant, data), 20)
        stop.set()
        assert await lag < 1.0
        await asyncio.wait_for(link.closed.wait(), 5)
        with pytest.raises(PeerLost):
            await link.request_slot(REF, 0, IDENTITY, 1, 64)
        child.send_signal(signal.SIGCONT)
        again = await pool.embedding_link(info, EMBEDDING_LAYOUT, timeout_s=30)
        fresh = await again.request_slot(AttemptRef("req-2"), 0, IDENTITY, 1, STOPPED_BYTES)
        assert isinstance(fresh, SlotGrant)
        await again.write_slot(fresh, data)
        await again.commit_embedding(AttemptRef("req-2"), 0, fresh, EmbeddingSource.REMOTE, checksum64(data))
        await pool.close()
    await channels.close()


async def test_a_stopped_receiver_of_pages_never_holds_the_engines_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages go on being taken, up to the bound, while the peer reads nothing; then the link fails, and says so."""
    monkeypatch.setattr(zmq_carrier, "SEND_TIMEOUT_S", 1.0)
    monkeypatch.setattr(zmq_carrier, "CONGESTED_BYTES", 8 << 20)
    num_pages = STOPPED_BYTES // PAGES.page_bytes
    channels, me = ChannelPool(TOKEN), Endpoint(WorkerRef("prefill-9", 11), host_id(), ("zmq-tcp",))
    async with receiver_process(STOPPED_BYTES) as (child, info):
        pool = LinkPool(me, lambda worker: transfer_stub(channels, worker))
        link = await pool.kv_link(info, KV_LAYOUT)
        grant = await link.bind_kv(REF, Grant("grant-1", "prefill-1", 21, b"c" * 16, num_pages, 0))
        failed: asyncio.Queue[TriptychError] = asyncio.Queue()
        writer = link.page_writer(grant, Pages(1), WriterEvents(failed.put_nowait, lambda: None))
        child.send_signal(signal.SIGSTOP)
        step = num_pages // 16
        for first in range(0, num_pages, step):
            await asyncio.wait_for(asyncio.to_thread(writer.copy, [0] * step, first), 5)
        assert writer.is_congested
        with pytest.raises(PeerLost, match="stopped taking data"):
            await asyncio.wait_for(link.commit_kv(REF, grant, 9, STOPPED_BYTES, Token(0, 5), 0), 20)
        assert isinstance(await asyncio.wait_for(failed.get(), 5), PeerLost)
        assert not writer.is_congested, "what has failed holds nobody up"
        await pool.close()
    await channels.close()


async def test_a_killed_receiver_is_a_typed_error(seed: int) -> None:
    channels, me = ChannelPool(TOKEN), Endpoint(WorkerRef("prefill-9", 11), host_id(), ("zmq-tcp",))
    async with receiver_process(STOPPED_BYTES) as (child, info):
        pool = LinkPool(me, lambda worker: transfer_stub(channels, worker))
        link = await pool.embedding_link(info, EMBEDDING_LAYOUT)
        grant = await link.request_slot(REF, 0, IDENTITY, 1, STOPPED_BYTES)
        assert isinstance(grant, SlotGrant)
        child.kill()
        with pytest.raises(TriptychError):
            await asyncio.wait_for(send_again_and_again(link, grant), 20)
        await pool.close()
    await channels.close()


async def send_again_and_again(link: object, grant: SlotGrant) -> None:
    data = memoryview(bytes(STOPPED_BYTES))
    while True:
        await link.write_slot(grant, data)  # type: ignore[attr-defined]


# --- where it listens -------------------------------------------------------------------------------------------------


async def test_the_hosts_socket_is_private_and_goes_with_its_port(tmp_path: Path) -> None:
    path = data_socket_path(tmp_path, "decode-0")
    assert path is not None
    port = DataPort("127.0.0.1", 0, path)
    await port.open()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_ISSOCK(path.stat().st_mode)
    assert port.address.port > 0
    await port.close()
    await port.close()
    assert not os.listdir(tmp_path)


def test_a_path_that_is_too_long_for_the_system_is_none(tmp_path: Path) -> None:
    assert data_socket_path(tmp_path, "w" * 110) is None
    exact = Path("/" + "d" * (107 - len("/" + "/w.12345678.sock")))
    path = data_socket_path(exact, "w")
    assert path is not None and len(os.fsencode(path)) == 107
    assert data_socket_path(exact.with_name(exact.name + "d"), "w") is None


async def test_a_taken_port_is_told_with_the_setting(tmp_path: Path) -> None:
    first = DataPort("127.0.0.1", 0, None)
    await first.open()
    with pytest.raises(StartupError, match="--data-port"):
        await DataPort("127.0.0.1", first.address.port, None).open()
    await first.close()


def test_beyond_loopback_it_listens_only_when_told(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "10.1.2.3", "example.org"):
        with pytest.raises(StartupError, match="--insecure-network"):
            DataPort(host, 0, None)


async def test_it_listens_by_name_and_by_ipv6(tmp_path: Path) -> None:
    for host in ("localhost", "::1"):
        port = DataPort(host, 0, None)
        await port.open()
        assert port.address.port > 0
        await port.close()


async def test_data_goes_by_ipv6() -> None:
    async with running(data_host="::1") as host, zmq_link(host, address=host_of("[::1]:8101")) as link:
        await send(link, REF, 0, b"by six")
        assert host.embedding.landed[REF, 0].data == b"by six"


def ack(**fields: object) -> wire.HelloAck:
    sound = {"worker_id": "w", "epoch": 1, "transport": "zmq-tcp", "data_port": 9101, "session_key": b"k" * 16}
    return wire.HelloAck(**{**sound, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {"session_key": b"k" * 15},
        {"session_key": b"k" * 17},
        {"data_port": 65536},
        {"socket_path": "run/decode-0.sock"},
        {"socket_path": "/" + "d" * 107},
        {"socket_path": "/run/\n.sock"},
    ],
)
def test_a_data_address_that_cannot_be_one_is_refused(fields: dict[str, object]) -> None:
    assert frames.welcome_from_frame(ack()).data.port == 9101
    with pytest.raises(InvalidRequest):
        frames.welcome_from_frame(ack(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"session_key": b""},
        {"data_port": 0},
        {"transport": "zmq-ipc"},
        {"transport": "nixl"},
        {"transport": "zmq-ipc", "socket_path": "/dev/null"},
        {"transport": "zmq-ipc", "socket_path": "/tmp/triptych-nobody-is-here.sock"},
    ],
)
async def test_a_way_that_leads_nowhere_is_refused(fields: dict[str, object]) -> None:
    sockets = DataSockets()
    with pytest.raises(TransferRefused):
        await Ways(sockets, "127.0.0.1").open(frames.welcome_from_frame(ack(**fields)), lambda error: None)
    sockets.close()


async def test_sockets_of_the_dead_are_swept_and_those_of_the_living_stay(tmp_path: Path) -> None:
    living, twin = data_socket_path(tmp_path, "decode-0"), data_socket_path(tmp_path, "decode-0.a")
    assert living is not None and twin is not None
    ports = [DataPort("127.0.0.1", 0, path) for path in (living, twin)]
    for port in ports:
        await port.open()
    script = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen()"
    for name in ("decode-0.00000000.sock", "decode-0.a.00000000.sock", "decode-1.00000000.sock"):
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", script, str(tmp_path / name))
        assert await child.wait() == 0
    assert sweep_dead_sockets(tmp_path, "decode-0") == ["decode-0.00000000.sock"]
    left = set(os.listdir(tmp_path))
    assert left == {living.name, twin.name, "decode-0.a.00000000.sock", "decode-1.00000000.sock"}
    for port in ports:
        await port.close()


# --- the ladder -------------------------------------------------------------------------------------------------------


def fallbacks(reason: str) -> float:
    return float(metrics.FALLBACKS.labels(reason)._value.get())


async def test_a_segment_that_cannot_be_mapped_is_a_counted_fallback(host: Host) -> None:
    segment = host.embedding.arena.segment
    assert segment is not None and segment._owned_path is not None
    segment._owned_path.unlink()
    before = fallbacks("transport_shm")
    me = replace(sender_by("shm", host), transports=("shm", *WAYS))
    pool = host.pool(me)
    link = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    assert link.transport == "zmq" and fallbacks("transport_shm") == before + 1
    await send(link, REF, 0, b"by the socket")  # type: ignore[arg-type]
    await pool.close()
    for stubborn in (host.pool(sender_by("shm", host)), LinkPool(me, host.pool(me)._stub_of, strict=True)):
        with pytest.raises(TransferRefused, match="shm to another worker does not work"):
            await stubborn.embedding_link(host.info, EMBEDDING_LAYOUT)
        await stubborn.close()


async def test_a_socket_of_the_host_that_is_not_there_falls_back_to_tcp(host: Host) -> None:
    os.unlink(host.data_port.address.socket_path)
    pool = host.pool(replace(sender_by("zmq-ipc", host), transports=WAYS))
    before = fallbacks("transport_zmq_ipc")
    link = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    assert fallbacks("transport_zmq_ipc") == before + 1
    await send(link, REF, 0, b"by tcp")  # type: ignore[arg-type]
    await pool.close()


async def test_between_hosts_shm_alone_is_refused_in_words(host: Host) -> None:
    me = replace(sender_by("shm", host), host_id="another")
    pool = host.pool(me)
    with pytest.raises(TransferRefused, match="--transport"):
        await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    await pool.close()
