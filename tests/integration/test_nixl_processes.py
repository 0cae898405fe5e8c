"""The library between two processes, one of which is stopped, killed or hung up on at the worst moment. Nothing here
runs where the extra `nixl` is not installed."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.nixl_peer import DATA, NUM_BYTES
from tests.unit.link_house import REF, eventually
from tests.unit.nixl_house import NixlHost, running
from triptych.transport import nixl_driver
from triptych.transport.nixl_api import NixlAddress, NixlError
from triptych.transport.nixl_driver import UcxDriver, UcxTarget

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="the extra `nixl` is not installed here"
)
ROOT = Path(__file__).parents[2]
ARENA_BYTES = 2 * NUM_BYTES
ROUNDS = 6
LISTENS = "0A"
OTHERS = b"\xa5" * ARENA_BYTES
"""What somebody else has in the arena by the time that a late write comes."""


@pytest.fixture
async def host() -> AsyncIterator[NixlHost]:
    async with running(await asyncio.to_thread(UcxDriver, "127.0.0.1"), ARENA_BYTES) as started:
        yield started


@contextmanager
def peer_process(host: NixlHost, way: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.nixl_peer", host.info.grpc_address, way],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


async def heard(peer: subprocess.Popen[str]) -> str:
    assert peer.stdout is not None
    return (await asyncio.wait_for(asyncio.to_thread(peer.stdout.readline), 30)).strip()


def tell(peer: subprocess.Popen[str]) -> None:
    assert peer.stdin is not None
    peer.stdin.write("go\n")
    peer.stdin.flush()


def hang_up(host: NixlHost) -> None:
    for talk in list(host.servicer._talks.values()):
        talk.hang_up()


async def test_bytes_of_another_process_land(host: NixlHost) -> None:
    with peer_process(host, "once") as peer:
        assert await heard(peer) == "granted"
        tell(peer)
        assert await heard(peer) == "committed"
        assert host.embedding.landed[REF, 0].data == DATA
        assert await asyncio.to_thread(peer.wait, 20) == 0


async def late_write(host: NixlHost) -> tuple[str, bytes]:
    """What its writer says of it, and what is in the arena then. The writer is stopped between grant and write; the
    slot goes to somebody else, for which nobody needs the stopped process; then it goes on, and does not know yet that
    its session is over."""
    with peer_process(host, "late") as peer:
        assert await heard(peer) == "granted"
        assert host.embedding.slots.owned_bytes == NUM_BYTES
        peer.send_signal(signal.SIGSTOP)
        hang_up(host)
        await eventually(lambda: len(host.embedding.lost) == 1)
        assert host.embedding.slots.free_bytes == ARENA_BYTES
        host.embedding.arena.buffer[:] = OTHERS
        tell(peer)
        peer.send_signal(signal.SIGCONT)
        return await heard(peer), bytes(host.embedding.arena.buffer)


async def test_a_write_of_a_process_that_was_stopped_for_long_finds_nothing(host: NixlHost) -> None:
    assert await late_write(host) == ("lost", OTHERS)


async def test_without_revoking_it_finds_its_way(host: NixlHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation."""
    kept: list[UcxTarget] = []
    with monkeypatch.context() as broken:
        broken.setattr(UcxTarget, "revoke", lambda target: kept.append(target))
        said, arena = await late_write(host)
    assert said == "written" and arena != OTHERS
    for target in kept:
        target.revoke()


async def test_on_loopback_nothing_of_it_listens_elsewhere(host: NixlHost) -> None:
    with peer_process(host, "target") as peer:
        await heard(peer)
        listening = listening_addresses(peer.pid)
        assert listening and listening == {"127.0.0.1"}


def listening_addresses(pid: int) -> set[str]:
    """Of the TCP sockets of that process, from the kernel's own table."""
    links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    sockets = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:[")}
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == LISTENS and fields[9] in sockets:
                words = bytes.fromhex(fields[1].partition(":")[0])
                raw = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                found.add(socket.inet_ntop(family, raw))
    return found


async def test_a_process_that_does_not_answer_is_refused_and_not_waited_for(
    host: NixlHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything depends on it, so that the link can go another way."""
    monkeypatch.setattr(nixl_driver, "CONNECT_TIMEOUT_S", 0.5)
    driver = UcxDriver("127.0.0.1")
    with peer_process(host, "target") as peer:
        metadata, base = (await heard(peer)).split()
        address = NixlAddress(bytes.fromhex(metadata), int(base))
        (await asyncio.to_thread(driver.connect, address, NUM_BYTES, 4096)).close()
        peer.send_signal(signal.SIGSTOP)
        with pytest.raises(NixlError, match="does not answer"):
            await asyncio.to_thread(driver.connect, address, NUM_BYTES, 4096)
        peer.kill()
        await asyncio.to_thread(peer.wait)
        with pytest.raises(NixlError):
            await asyncio.to_thread(driver.connect, address, NUM_BYTES, 4096)


async def test_a_process_that_is_killed_leaves_its_slot(host: NixlHost) -> None:
    with peer_process(host, "once") as peer:
        assert await heard(peer) == "granted"
        peer.kill()
        await eventually(lambda: len(host.embedding.lost) == 1)
        assert host.embedding.slots.free_bytes == ARENA_BYTES


async def test_hanging_up_in_the_middle_of_writes_ends_them(host: NixlHost) -> None:
    """Whatever is under way: once the receiver calls a slot free, no byte of it changes."""
    with peer_process(host, "ever") as peer:
        for number in range(ROUNDS):
            assert await heard(peer) == "sent"
            await asyncio.sleep(0.001 * number)  # another moment of the transfer each time
            hang_up(host)
            await eventually(lambda number=number: len(host.embedding.lost) > number)
            assert host.embedding.slots.free_bytes == ARENA_BYTES
            host.embedding.arena.buffer[:] = OTHERS
            while await heard(peer) != "lost":
                pass
            assert bytes(host.embedding.arena.buffer) == OTHERS
            host.embedding.landed.clear()
            tell(peer)
