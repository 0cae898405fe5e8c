"""`cuda_ipc` with a fake device in the driver's place: what lands, who waits for whom, and every way it can fail."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit import device_house
from tests.unit.device_house import GRANT, DeviceHost, bound_link, running, slot_of
from tests.unit.device_peer import DATA
from tests.unit.link_house import (
    ARENA_BYTES,
    EMBEDDING_LAYOUT,
    EVENTS,
    IDENTITY,
    PAGES,
    REF,
    Pages,
    eventually,
    page_of,
    send,
)
from triptych.core.errors import DeadlineExceeded, PeerLost, TransferRefused, TriptychError
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.plan import Token
from triptych.obs import metrics
from triptych.testing.fake_device import FakeDevice
from triptych.transport import device_carrier
from triptych.transport.carrier import WriterEvents
from triptych.transport.device_arena import DeviceArena, DeviceImports, ImportedArena
from triptych.transport.link_pool import LinkPool

ROOT = Path(__file__).parents[2]
host, mine, pool = device_house.host, device_house.mine, device_house.pool


# --- the straight way ------------------------------------------------------------------------------------------------


async def test_embeddings_land_in_device_memory(host: DeviceHost, pool: LinkPool, mine: FakeDevice) -> None:
    link: Any = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    counter = metrics.EMBEDDING_TRANSFER_BYTES.labels(transport="cuda_ipc")
    before = counter._value.get()
    assert link.transport == "cuda_ipc"
    assert host.embedding.arena.is_written_on_device_by(WorkerRef("encoder-1", 11))
    grants = [await send(link, AttemptRef(f"req-{n}"), 0, bytes([n]) * 100) for n in range(5)]
    for n in range(5):
        assert host.embedding.landed[AttemptRef(f"req-{n}"), 0].data == bytes([n]) * 100
    assert counter._value.get() == before + 500
    assert mine.num_copies == len(grants) and mine.num_opened == 1
    segment = host.embedding.arena.segment
    assert segment is not None and not any(segment.buffer), "nothing went through host memory"


async def test_pages_land_in_the_pool_each_cell_once(
    host: DeviceHost, pool: LinkPool, mine: FakeDevice, seed: int
) -> None:
    link, bound = await bound_link(host, pool)
    source = Pages(seed)
    writer = link.page_writer(bound, source, EVENTS)
    moved = await asyncio.to_thread(writer.copy, [5, 2], 0) + await asyncio.to_thread(writer.copy, [7], 2)
    assert moved == 3 * PAGES.page_bytes and writer.copy([], 3) == 0
    await link.commit_kv(REF, bound, 9, moved, Token(0, 5), -2)
    for page, sent in enumerate((5, 2, 7)):
        assert (page_of(host.kv.arena.buffer, page) == source.cells[sent]).all()
    assert not page_of(host.kv.arena.buffer, 3).any()
    assert mine.num_copies == 2, "one copy for each chunk, not for each page and plane"


async def test_two_links_to_one_arena_open_it_once(host: DeviceHost, pool: LinkPool, mine: FakeDevice) -> None:
    """As a link that is made again while the engine still has the writer of the first."""
    arena = host.arenas()[0]
    imports = DeviceImports(mine)
    first, second = (ImportedArena.open(imports, arena.address, ARENA_BYTES, number) for number in (1001, 1002))
    assert mine.num_opened == mine.num_open == 1
    first.close()
    first.close()
    await eventually(lambda: not arena.lease.is_mapped_as(1001))
    assert mine.num_open == 1 and arena.lease.is_mapped_as(1002)
    second.close()
    await eventually(lambda: not arena.lease.is_mapped())
    assert mine.num_open == 0


# --- commit and abort come after the event ----------------------------------------------------------------------------


async def test_a_commit_waits_for_the_copy(host: DeviceHost, pool: LinkPool, mine: FakeDevice) -> None:
    link: Any = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    mine.hold()
    sending = asyncio.create_task(send(link, REF, 0, b"x" * 64))
    await eventually(lambda: mine.num_waiting == 1)
    await asyncio.sleep(0.1)
    assert not sending.done() and not host.embedding.landed
    mine.release()
    await sending
    assert host.embedding.landed[REF, 0].data == b"x" * 64


async def test_who_is_cancelled_in_a_copy_leaves_only_after_it(
    host: DeviceHost, pool: LinkPool, mine: FakeDevice
) -> None:
    link: Any = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    grant = await slot_of(link)
    mine.hold()
    writing = asyncio.create_task(link.write_slot(grant, memoryview(bytearray(256))))
    await eventually(lambda: mine.num_waiting == 1)
    writing.cancel()
    await asyncio.sleep(0.05)
    assert not writing.done()
    mine.release()
    with pytest.raises(asyncio.CancelledError):
        await writing
    await link.abort(REF, None, "given up")
    await eventually(lambda: host.embedding.slots.free_bytes == ARENA_BYTES)


async def test_a_commit_of_pages_waits_and_so_does_an_abort(
    host: DeviceHost, pool: LinkPool, mine: FakeDevice, seed: int
) -> None:
    link, bound = await bound_link(host, pool)
    writer = link.page_writer(bound, Pages(seed), EVENTS)
    mine.hold()
    writer.copy([1, 2], 0)
    committing = asyncio.create_task(link.commit_kv(REF, bound, 9, 128, Token(0, 5), 0, timeout_s=0.05))
    await asyncio.sleep(0.15)
    assert not committing.done()
    mine.release()
    with pytest.raises(DeadlineExceeded):
        await committing
    assert not host.kv.landed
    mine.hold()
    writer.copy([3], 2)
    aborting = asyncio.create_task(link.abort(REF, GRANT.grant_id, "given up"))
    await asyncio.sleep(0.1)
    assert not aborting.done() and not host.kv.aborted
    writer.copy([4], 3)  # after the cancel: goes nowhere
    assert mine.num_waiting == 1
    mine.release()
    await aborting
    await eventually(lambda: len(host.kv.aborted) == 1)
    assert not page_of(host.kv.arena.buffer, 3).any()


async def test_congestion_is_told_and_ends(
    host: DeviceHost, pool: LinkPool, mine: FakeDevice, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_carrier, "CONGESTED_BYTES", 1)
    monkeypatch.setattr(device_carrier, "MAX_IN_FLIGHT_BYTES", 2 * PAGES.page_bytes)
    link, bound = await bound_link(host, pool)
    relieved, failed = asyncio.Event(), list[TriptychError]()
    writer = link.page_writer(bound, Pages(seed), WriterEvents(failed.append, relieved.set))
    mine.hold()
    assert not writer.is_congested
    writer.copy([1, 2], 0)
    assert writer.is_congested and not relieved.is_set()
    mine.release()
    await asyncio.wait_for(relieved.wait(), 5)
    assert not writer.is_congested and not failed
    mine.hold()
    writer.copy([1], 2)
    writer.copy([2, 3], 3)  # more than may be under way
    await eventually(lambda: len(failed) == 1)
    mine.release()
    with pytest.raises(TriptychError, match="slower than prefill"):
        await link.commit_kv(REF, bound, 9, 1, Token(0, 5), 0)


# --- ends -------------------------------------------------------------------------------------------------------------


async def test_a_device_that_fails_breaks_the_link_and_frees_nothing(
    host: DeviceHost, pool: LinkPool, mine: FakeDevice
) -> None:
    """Nobody knows whether the copy still runs: the slot is kept for as long as this process has the memory open."""
    link: Any = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    grant, open_circuits = await slot_of(link), metrics.OPEN_CIRCUITS._value.get()
    mine.hold()
    writing = asyncio.create_task(link.write_slot(grant, memoryview(bytearray(256))))
    await eventually(lambda: mine.num_waiting == 1)
    mine.break_down()
    with pytest.raises(TransferRefused, match="device of a worker failed"):
        await writing
    assert metrics.OPEN_CIRCUITS._value.get() == open_circuits, "the receiver is well"
    await link.abort(REF, None, "given up")
    await asyncio.wait_for(link.closed.wait(), 5)
    await asyncio.sleep(0.3)
    assert host.embedding.lost == [] and host.embedding.aborted == [] and host.embedding.slots.owned_bytes
    assert host.arenas()[0].lease.is_mapped()
    for pointer in list(mine._mapped):  # the process ends
        mine._unmap(pointer)
    device_house.unlock()
    await eventually(lambda: len(host.embedding.lost) == 1)


@pytest.mark.parametrize("way", ["slot", "slot writer", "pages"])
async def test_copies_that_a_bug_cuts_short_are_waited_for(
    host: DeviceHost, pool: LinkPool, mine: FakeDevice, seed: int, way: str
) -> None:
    """Part of them is under way, and nobody has an event to wait for before the receiver hears of an abort."""

    def cut_short(enqueue: Callable[..., None]) -> Callable[..., None]:
        def enqueue_and_fail(*arguments: Any) -> None:
            enqueue(*arguments)
            raise ValueError("a bug")

        return enqueue_and_fail

    mine.hold()
    mine.copy_async = cut_short(mine.copy_async)  # type: ignore[method-assign]
    mine.scatter_async = cut_short(mine.scatter_async)  # type: ignore[method-assign]
    failed = list[TriptychError]()
    if way == "pages":
        link, bound = await bound_link(host, pool)
        link.page_writer(bound, Pages(seed), WriterEvents(failed.append, lambda: None)).copy([1, 2], 0)
        await eventually(lambda: len(failed) == 1)
        await link.abort(REF, GRANT.grant_id, "given up")
    else:
        link = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
        grant = await slot_of(link)
        if way == "slot":
            with pytest.raises(TransferRefused, match="device"):
                await link.write_slot(grant, memoryview(bytearray(256)))
        else:
            assert not link.slot_writer(grant).write(torch.zeros(256, dtype=torch.uint8))
        await link.abort(REF, None, "given up")
    await asyncio.wait_for(link.closed.wait(), 5)
    await asyncio.sleep(0.3)
    receiver: Any = host.kv if way == "pages" else host.embedding
    assert receiver.lost == [] and receiver.aborted == [], "the memory is still its writer's"
    mine.release()
    await eventually(lambda: len(receiver.lost) == 1)


async def test_a_broken_link_is_closed_only_after_its_copies(
    host: DeviceHost, pool: LinkPool, mine: FakeDevice
) -> None:
    link: Any = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    grant = await slot_of(link)
    mine.hold()
    writing = asyncio.create_task(link.write_slot(grant, memoryview(bytearray(b"y" * 256))))
    await eventually(lambda: mine.num_waiting == 1)
    await link.close()
    with pytest.raises(PeerLost):
        await link.request_slot(REF, 1, IDENTITY, 1, 64)
    await asyncio.sleep(0.3)
    assert host.embedding.lost == [] and host.embedding.slots.owned_bytes, "still its writer's"
    mine.release()
    await writing
    await eventually(lambda: len(host.embedding.lost) == 1)
    assert mine.num_open == 0 and host.embedding.slots.free_bytes == ARENA_BYTES


async def test_the_owner_frees_after_the_importer_has_closed(tmp_path: Path) -> None:
    owner, peer = FakeDevice(tmp_path), FakeDevice(tmp_path)
    arena = DeviceArena.create(owner, ARENA_BYTES, "--flag")
    imported = ImportedArena.open(DeviceImports(peer), arena.address, ARENA_BYTES, 5)
    closing = asyncio.create_task(arena.close())
    await asyncio.sleep(0.1)
    assert not closing.done() and owner.num_allocations == 1
    imported.close()
    await closing
    assert owner.num_allocations == 0 and peer.num_open == 0 and owner.violations == []
    with pytest.raises(PeerLost):
        imported.launch(lambda _: None)
    for device in (owner, peer):
        device.close()


async def test_an_importer_that_stays_keeps_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.transport.device_arena.FREE_GRACE_S", 0.05)
    owner, peer = FakeDevice(tmp_path), FakeDevice(tmp_path)
    arena = DeviceArena.create(owner, ARENA_BYTES, "--flag")
    imported = ImportedArena.open(DeviceImports(peer), arena.address, ARENA_BYTES, 5)
    await arena.close()
    assert owner.num_allocations == 1 and owner.violations == []
    imported.close()
    await eventually(lambda: peer.num_open == 0)
    for device in (owner, peer):
        device.close()


async def test_a_worker_born_again_is_opened_anew_and_its_former_self_closed(
    host: DeviceHost, pool: LinkPool, mine: FakeDevice, tmp_path: Path
) -> None:
    former: Any = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    async with running(tmp_path, epoch=22) as reborn:
        link: Any = await pool.embedding_link(reborn.info, EMBEDDING_LAYOUT)
        await asyncio.wait_for(former.closed.wait(), 5)
        await eventually(lambda: not host.arenas()[0].lease.is_mapped())
        await send(link, REF, 0, b"to the new one")
        assert mine.num_open == 1 and mine.num_opened == 2
        await pool.close()
        await eventually(lambda: mine.num_open == 0)


# --- two processes ----------------------------------------------------------------------------------------------------


@contextmanager
def peer_process(host: DeviceHost, folder: Path) -> Iterator[subprocess.Popen[str]]:
    arguments = [host.info.grpc_address, str(host.info.epoch), str(folder)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.device_peer", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


async def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return (await asyncio.to_thread(process.stdout.readline)).strip()


def tell(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(word + "\n")
    process.stdin.flush()


async def test_another_process_commits_what_it_has_written_and_not_before(host: DeviceHost, tmp_path: Path) -> None:
    with peer_process(host, tmp_path) as peer:
        assert await heard(peer) == "held"
        await asyncio.sleep(0.1)
        assert not host.embedding.landed and not any(host.embedding.arena.buffer)
        tell(peer, "go")
        assert await heard(peer) == "committed"
        assert host.embedding.landed[REF, 0].data == DATA
        tell(peer, "leave")
        assert await asyncio.to_thread(peer.wait, 20) == 0
        await eventually(lambda: not host.arenas()[0].lease.is_mapped())


async def test_a_process_that_is_stopped_and_killed_in_a_copy_holds_its_slot_until_it_is_gone(
    host: DeviceHost, tmp_path: Path
) -> None:
    with peer_process(host, tmp_path) as peer:
        assert await heard(peer) == "held"
        peer.send_signal(signal.SIGSTOP)
        next(iter(host.servicer._talks.values())).hang_up()
        await asyncio.sleep(0.4)
        assert host.embedding.lost == [] and host.embedding.slots.owned_bytes == 256
        peer.kill()
        await eventually(lambda: len(host.embedding.lost) == 1)
        assert host.embedding.slots.free_bytes == ARENA_BYTES
