"""What the tower's thread writes to a granted slot, and what becomes of it when the slot is given up meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.unit import link_house
from tests.unit.link_house import ARENA_BYTES, EMBEDDING_LAYOUT, IDENTITY, REF, Host, eventually, sender_by
from triptych.core.errors import PeerLost
from triptych.core.ids import AttemptRef
from triptych.core.plan import EmbeddingSource
from triptych.obs import metrics
from triptych.transport.layout import checksum64
from triptych.transport.link import AskingLink
from triptych.transport.slot_writer import MemorySlotWriter
from triptych.transport.types import SlotGrant

host = link_house.host
MAPPED = ("inproc", "shm")
NUM_BYTES = 256


@pytest.fixture(params=MAPPED)
async def link(request: pytest.FixtureRequest, host: Host) -> AsyncIterator[AskingLink]:
    pool = host.pool(sender_by(request.param, host))
    made = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    assert isinstance(made, AskingLink)
    yield made
    await pool.close()


def rows_of(value: float, num_bytes: int = NUM_BYTES) -> torch.Tensor:
    return torch.full((num_bytes // 32, 8), value)


def bytes_of(rows: torch.Tensor) -> bytes:
    return rows.contiguous().numpy().tobytes()


async def granted(link: AskingLink, ref: AttemptRef = REF, index: int = 0) -> tuple[SlotGrant, MemorySlotWriter]:
    grant = await link.request_slot(ref, index, IDENTITY, 1, NUM_BYTES)
    assert isinstance(grant, SlotGrant)
    writer = link.slot_writer(grant)
    assert isinstance(writer, MemorySlotWriter)
    return grant, writer


class Writing:
    """A write that another thread is in the middle of."""

    def __init__(self, writer: MemorySlotWriter, rows: torch.Tensor) -> None:
        self.is_inside, self.go_on = threading.Event(), threading.Event()
        self.was_written: bool | None = None
        sound = writer._view

        @contextmanager
        def held() -> Iterator[memoryview]:
            with sound() as view:
                self.is_inside.set()
                assert self.go_on.wait(10)
                yield view

        writer._view = held
        self._thread = threading.Thread(target=self._run, args=(writer, rows))
        self._thread.start()
        assert self.is_inside.wait(5)

    def _run(self, writer: MemorySlotWriter, rows: torch.Tensor) -> None:
        self.was_written = writer.write(rows)

    async def end(self) -> None:
        self.go_on.set()
        await asyncio.to_thread(self._thread.join, 5)


async def test_rows_of_any_layout_land_as_they_are_and_are_counted_once(host: Host, link: AskingLink) -> None:
    rows = torch.arange(64.0).view(8, 8)
    layouts = {"whole": rows, "turned": rows.t(), "repeated": rows[:1].expand(8, 8), "half": rows.to(torch.bfloat16)}
    for index, (name, given) in enumerate(layouts.items()):
        counter = metrics.EMBEDDING_TRANSFER_BYTES.labels(transport=link.transport)
        before, data = counter._value.get(), given.contiguous().view(torch.uint8).numpy().tobytes()
        grant = await link.request_slot(REF, index, IDENTITY, 1, len(data))
        assert isinstance(grant, SlotGrant)
        writer = link.slot_writer(grant)
        assert writer is not None
        assert await asyncio.to_thread(writer.write, given), name
        checksum = await writer.finish()
        assert checksum == checksum64(data)
        await link.commit_embedding(REF, index, grant, EmbeddingSource.REMOTE, checksum)
        assert host.embedding.landed[REF, index].data == data
        assert counter._value.get() - before == len(data)


async def test_a_slot_of_another_size_is_not_touched(host: Host, link: AskingLink) -> None:
    _, writer = await granted(link)
    for num_bytes in (NUM_BYTES - 32, NUM_BYTES + 32):
        assert not writer.write(rows_of(1.0, num_bytes))
    assert not any(host.embedding.arena.buffer)


async def test_it_is_written_once(host: Host, link: AskingLink) -> None:
    grant, writer = await granted(link)
    assert writer.write(rows_of(1.0)) and not writer.write(rows_of(2.0))
    await link.commit_embedding(REF, 0, grant, EmbeddingSource.REMOTE, await writer.finish())
    assert host.embedding.landed[REF, 0].data == bytes_of(rows_of(1.0))
    assert link.slot_writer(grant) is None
    assert not link._slot_writers


@pytest.mark.parametrize("how", ["abort", "abort_soon", "commit", "close"])
async def test_nothing_is_written_once_the_slot_was_given_up(host: Host, link: AskingLink, how: str) -> None:
    grant, writer = await granted(link)
    match how:
        case "abort":
            await link.abort(REF, None, "given up")
        case "abort_soon":
            link.abort_soon(REF, None, "given up")
        case "commit":
            zeros = checksum64(bytes(NUM_BYTES))
            await link.commit_embedding(REF, 0, grant, EmbeddingSource.REMOTE, zeros)
        case "close":
            await link.close()
    await eventually(lambda: host.embedding.slots.free_bytes == ARENA_BYTES)
    assert not writer.write(rows_of(1.0))
    assert not any(host.embedding.arena.buffer)
    assert not link._slot_writers


async def test_an_abort_leaves_the_slots_of_others(host: Host, link: AskingLink) -> None:
    (_, mine), (grant, other) = await granted(link), await granted(link, AttemptRef("req-2"))
    await link.abort(REF, None, "given up")
    assert not mine.write(rows_of(1.0)) and other.write(rows_of(2.0))
    await link.commit_embedding(AttemptRef("req-2"), 0, grant, EmbeddingSource.REMOTE, await other.finish())
    assert host.embedding.landed[AttemptRef("req-2"), 0].data == bytes_of(rows_of(2.0))


@pytest.mark.parametrize("how", ["abort", "abort_soon", "cancelled request"])
async def test_the_receiver_hears_of_it_only_after_a_write_that_has_begun(
    host: Host, link: AskingLink, how: str
) -> None:
    """Whatever gives up: the attempt, or one of its other items, which speaks for all of it."""
    _, writer = await granted(link)
    writing = Writing(writer, rows_of(1.0))
    giving_up: asyncio.Task[object] | None = None
    if how == "abort":
        giving_up = asyncio.create_task(link.abort(REF, None, "given up"))
    elif how == "abort_soon":
        link.abort_soon(REF, None, "given up")
    else:
        giving_up = asyncio.create_task(link.request_slot(REF, 1, IDENTITY, 1, ARENA_BYTES))
        await asyncio.sleep(0.05)
        giving_up.cancel()
    await asyncio.sleep(0.05)
    second = asyncio.create_task(link.abort(REF, None, "given up again"))
    await asyncio.sleep(0.1)
    assert host.embedding.aborted == [] and host.embedding.slots.owned_bytes, "still its writer's"
    await writing.end()
    await second
    await asyncio.gather(*[task for task in (giving_up,) if task is not None], return_exceptions=True)
    await eventually(lambda: host.embedding.slots.free_bytes == ARENA_BYTES and len(host.embedding.aborted) == 2)
    assert writing.was_written
    assert not link._slot_writers


async def test_a_link_that_ends_in_the_middle_of_a_write_frees_nothing_before_it(host: Host, link: AskingLink) -> None:
    _, writer = await granted(link)
    _, waiting = await granted(link, index=1)
    writing = Writing(writer, rows_of(1.0))
    closing = asyncio.create_task(link.close())
    await asyncio.sleep(0.3)
    assert host.embedding.lost == [] and host.embedding.slots.owned_bytes == 2 * NUM_BYTES
    assert not waiting.write(rows_of(2.0))
    await writing.end()
    await closing
    await eventually(lambda: len(host.embedding.lost) == 1 and host.embedding.slots.free_bytes == ARENA_BYTES)
    with pytest.raises(PeerLost):
        await waiting.finish()


async def test_frames_have_no_such_writer(host: Host) -> None:
    pool = host.pool(sender_by("zmq-tcp", host))
    link = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    grant = await link.request_slot(REF, 0, IDENTITY, 1, NUM_BYTES)
    assert isinstance(grant, SlotGrant) and link.slot_writer(grant) is None
    await pool.close()
