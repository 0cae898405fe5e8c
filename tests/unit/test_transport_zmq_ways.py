"""Where the data socket listens, and which way a link takes when the best one does not work."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit import link_house
from tests.unit.link_house import EMBEDDING_LAYOUT, REF, Host, running, send, sender_by
from tests.unit.zmq_house import WAYS, zmq_link
from triptych.core.errors import InvalidRequest, StartupError, TransferRefused
from triptych.obs import metrics
from triptych.transport import frames
from triptych.transport.link_pool import LinkPool
from triptych.transport.ways import DataSockets, Ways, host_of
from triptych.transport.zmq_port import DataPort, data_socket_path, sweep_dead_sockets
from triptych.wire.v1 import transfer_pb2 as wire

host = link_house.host


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
