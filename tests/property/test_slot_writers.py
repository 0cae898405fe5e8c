"""The tower's thread writes when its pass ends, whatever has become of the slot. However grants, writes, aborts,
commits and ends of links interleave, a commit finds its bytes, and nothing is written to memory that was given back.
Links that do not wait, or do not revoke, are caught."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.seed import IS_FULL
from triptych.core.errors import TriptychError
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.plan import EmbeddingSource
from triptych.testing.receivers import FakeEmbeddingReceiver
from triptych.transport.inproc import InprocLink
from triptych.transport.receiver import Receivers
from triptych.transport.slot_writer import MemorySlotWriter, SlotWriter
from triptych.transport.slots import Slot
from triptych.transport.types import Arena, ArenaKind, SlotGrant

ARENA_BYTES, SLOT_BYTES = 256, 64
LAYOUT = b"l" * 32
POISON = 0xEE
ME = WorkerRef("encoder-0", 1)
STEPS = ("ask", "ask", "write", "write", "end", "commit", "abort", "cancel", "close", "pause")


class Receiver(FakeEmbeddingReceiver):
    """Poisons what is given back, at once."""

    def __init__(self) -> None:
        self.memory = np.full(ARENA_BYTES, POISON, dtype=np.uint8)
        super().__init__(Arena(ArenaKind.EMBEDDING, LAYOUT, self.memory.data))
        sound = self.slots.release

        def release(slot: Slot) -> None:
            self.memory[slot.offset : slot.offset + SLOT_BYTES] = POISON
            sound(slot)

        self.slots.release = release  # type: ignore[method-assign]


@dataclass(eq=False)
class Item:
    """One picture: its slot, and the pass that writes to it."""

    ref: AttemptRef
    index: int
    asking: asyncio.Task[object]
    link: InprocLink
    is_inside: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    writing: Future[bool] | None = None

    @property
    def rows(self) -> torch.Tensor:
        return torch.full((SLOT_BYTES,), self.index % 200, dtype=torch.uint8)


class World:
    def __init__(self, link: type[InprocLink]) -> None:
        self.receiver = Receiver()
        self.make = lambda: link(ME, Receivers(self.receiver), ArenaKind.EMBEDDING, LAYOUT)
        self.link = self.make()
        self.ref = AttemptRef("req", 0, 0)
        self.items: list[Item] = []
        self.ending: list[asyncio.Task[None]] = []
        self.threads = ThreadPoolExecutor(64)
        self.num_committed = self.num_items = 0

    async def run(self, steps: list[str]) -> None:
        for step in steps:
            await getattr(self, step)()
            await asyncio.sleep(0)
        await self.close()
        for item in self.items:
            item.go_on.set()
            item.asking.cancel()
        await asyncio.gather(*self.ending, *(item.asking for item in self.items), return_exceptions=True)
        self.threads.shutdown()
        assert self.receiver.slots.free_bytes == ARENA_BYTES
        assert (self.receiver.memory == POISON).all(), "written after it was given back"

    async def ask(self) -> None:
        self.num_items += 1
        asking = asyncio.create_task(self._ask(self.num_items))
        self.items.append(Item(self.ref, self.num_items, asking, self.link))
        await turns()

    async def _ask(self, index: int) -> SlotGrant | None:
        with suppress(TriptychError):
            grant = await self.link.request_slot(self.ref, index, bytes(32), 1, SLOT_BYTES)
            assert isinstance(grant, SlotGrant)
            return grant
        return None

    async def write(self) -> None:
        """The pass of the oldest one ends; it stays in the middle of its copy."""
        for item in self.items:
            if item.asking.done() and not item.asking.cancelled() and item.writing is None:
                grant = item.asking.result()
                writer = item.link.slot_writer(grant) if isinstance(grant, SlotGrant) else None
                if isinstance(writer, MemorySlotWriter):
                    item.writing = self.threads.submit(self._write, writer, item)
                    while not (item.is_inside.is_set() or item.writing.done()):  # noqa: ASYNC110 - a thread tells
                        await asyncio.sleep(0.0002)
                    return

    @staticmethod
    def _write(writer: MemorySlotWriter, item: Item) -> bool:
        sound = writer._view

        @contextmanager
        def held() -> Iterator[memoryview]:
            with sound() as view:
                item.is_inside.set()
                assert item.go_on.wait(10)
                yield view

        writer._view = held
        return writer.write(item.rows)

    async def end(self) -> None:
        for item in self.items:
            if item.writing is not None and not item.go_on.is_set():
                item.go_on.set()
                await asyncio.wrap_future(item.writing)
                return

    async def commit(self) -> None:
        for item in self.items:
            if item.writing is not None and item.writing.done() and item.writing.result():
                self.items.remove(item)
                grant = item.asking.result()
                assert isinstance(grant, SlotGrant)
                with suppress(TriptychError):
                    writer = item.link.slot_writer(grant)
                    if writer is not None:
                        checksum = await writer.finish()
                        await item.link.commit_embedding(item.ref, item.index, grant, EmbeddingSource.REMOTE, checksum)
                        landed = self.receiver.landed[item.ref, item.index]
                        assert landed.data == bytes(item.rows.tolist()), "committed before it was there"
                        self.num_committed += 1
                return

    async def abort(self) -> None:
        self.ending.append(asyncio.create_task(self.link.abort(self.ref, None, "given up")))
        self.ref = AttemptRef("req", 0, self.ref.attempt + 1)

    async def cancel(self) -> None:
        """One that waits for room speaks for the whole attempt, which writes no more."""
        for item in self.items:
            if not item.asking.done() and item.ref == self.ref:
                item.asking.cancel()
                self.ref = AttemptRef("req", 0, self.ref.attempt + 1)
                return

    async def close(self) -> None:
        self.ending.append(asyncio.create_task(self.link.close()))
        await turns()
        for item in self.items:
            item.go_on.set()
        await asyncio.gather(*self.ending, return_exceptions=True)
        self.link = self.make()

    async def pause(self) -> None:
        await turns()


async def turns() -> None:
    """Of the event loop: whatever waits for nothing but the loop has happened then."""
    for _ in range(20):
        await asyncio.sleep(0)


def live(steps: list[str], link: type[InprocLink] = InprocLink) -> World:
    async def run() -> World:
        world = World(link)
        await asyncio.wait_for(world.run(steps), 20)
        return world

    return asyncio.run(run())


@given(st.lists(st.sampled_from(STEPS), max_size=30))
@settings(max_examples=1000 if IS_FULL else 40)
def test_what_is_committed_is_there_and_what_is_given_back_stays_so(steps: list[str]) -> None:
    live(steps)


def test_the_steps_do_write_and_commit() -> None:
    assert live(["ask", "write", "end", "commit", "ask", "ask", "write", "abort", "end"]).num_committed == 1


# --- broken builds ---------------------------------------------------------------------------------------------------


class Hasty(InprocLink):
    """Waits for no write."""

    async def _settle(self, written: Mapping[int, SlotWriter]) -> None:
        for slot_id in written:
            self._slot_writers.pop(slot_id, None)


class Lenient(InprocLink):
    """Revokes nothing that has not begun."""

    def _revoke_slots(self, ref: AttemptRef | None) -> dict[int, SlotWriter]:
        mine = {slot: writer for slot, (owner, writer) in self._slot_writers.items() if ref in (None, owner)}
        return {slot: writer for slot, writer in mine.items() if writer.is_writing}


class Forgetful(InprocLink):
    """Forgets what is being written when it is given up first, and waits for it no second time."""

    def _revoke_slots(self, ref: AttemptRef | None) -> dict[int, SlotWriter]:
        written = super()._revoke_slots(ref)
        for slot in written:
            del self._slot_writers[slot]
        return written


@pytest.mark.parametrize(
    ("link", "steps"),
    [
        (Hasty, ["ask", "write", "abort", "pause", "end"]),
        (Hasty, ["ask", "ask", "ask", "ask", "ask", "write", "cancel", "pause", "end"]),
        (Hasty, ["ask", "write", "close"]),
        (Lenient, ["ask", "abort", "pause", "write", "end"]),
        (Forgetful, ["ask", "ask", "ask", "ask", "ask", "write", "cancel_and_abort", "pause", "end"]),
    ],
)
def test_a_link_that_lets_go_too_early_is_caught(
    link: type[InprocLink], steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancel_and_abort(world: World) -> None:
        ref = world.ref
        await world.cancel()
        await turns()
        world.ending.append(asyncio.create_task(world.link.abort(ref, None, "the call ended")))

    monkeypatch.setattr(World, "cancel_and_abort", cancel_and_abort, raising=False)
    live(steps)
    with pytest.raises(AssertionError, match="written after"):
        live(steps, link)
