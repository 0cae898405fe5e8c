"""Copies on a device complete when they like. However writes, cancellations, commits and broken sessions interleave, a
commit finds its bytes, and nothing is written to memory that was given back. Parts that do not wait are caught."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.seed import IS_FULL
from triptych.core.errors import TriptychError
from triptych.testing.fake_device import FakeDevice
from triptych.transport import device_carrier
from triptych.transport.device import DeviceEvent
from triptych.transport.device_arena import DeviceArena, DeviceImports, ImportedArena
from triptych.transport.device_carrier import DeviceCarrier
from triptych.transport.slots import Slot, SlotAllocator
from triptych.transport.types import SlotGrant

ARENA_BYTES, SLOT_BYTES = 256, 64
POISON = 0xEE
STEPS = ("write", "write", "write", "cancel", "hold", "release", "break", "pause")


class World:
    """A receiver with four slots, poisoned while they are free, and a sender whose session may break."""

    def __init__(self, folder: Path) -> None:
        self.owner, self.peer = FakeDevice(folder), FakeDevice(folder)
        self.arena = DeviceArena.create(self.owner, ARENA_BYTES, "--flag")
        self.memory = self.arena.tensor.numpy()
        self.memory[:] = POISON
        self.slots = SlotAllocator(ARENA_BYTES)
        self.imports = DeviceImports(self.peer)
        self.num_sessions = self.num_written = self.num_committed = 0
        self.writes: list[asyncio.Task[None]] = []
        self.held: set[int] = set()  # slot ids of the living session
        self.open()

    def open(self) -> None:
        self.num_sessions += 1
        imported = ImportedArena.open(self.imports, self.arena.address, ARENA_BYTES, self.num_sessions)
        self.carrier = DeviceCarrier(imported, lambda _: None)

    async def write(self) -> None:
        reserved = self.slots.try_reserve([SLOT_BYTES])
        if reserved is None:
            return
        self.num_written += 1
        self.held.add(reserved[0].slot_id)
        self.writes.append(asyncio.create_task(self._write(reserved[0], self.num_written % 200, self.carrier)))

    async def _write(self, slot: Slot, value: int, carrier: DeviceCarrier) -> None:
        grant = SlotGrant(slot.slot_id, slot.offset, slot.num_bytes, slot.generation, slot.capability)
        try:
            await carrier.write_slot(grant, memoryview(bytearray([value]) * SLOT_BYTES))
        except (TriptychError, asyncio.CancelledError):
            self.give_back(slot, carrier)  # the abort
            return
        if carrier is self.carrier:
            assert (self.memory[slot.offset : slot.offset + SLOT_BYTES] == value).all(), "committed before it was there"
            self.num_committed += 1
        self.give_back(slot, carrier)

    def give_back(self, slot: Slot, carrier: DeviceCarrier) -> None:
        """What a broken session says is not heard."""
        if carrier is self.carrier and slot.slot_id in self.held:
            self.held.discard(slot.slot_id)
            self.free(slot)

    def free(self, slot: Slot) -> None:
        self.slots.release(slot)
        self.memory[slot.offset : slot.offset + SLOT_BYTES] = POISON

    async def cancel(self) -> None:
        for write in self.writes:
            if not write.done() and not write.cancelling():
                write.cancel()
                return

    async def break_session(self) -> None:
        """The next session begins when the mapping of this one is gone, as with `TransferServicer`."""
        lost, former = [self.slots.find(slot_id) for slot_id in self.held], self.num_sessions
        self.held = set()
        broken, self.carrier = self.carrier, None  # type: ignore[assignment]
        broken.close()
        asyncio.get_running_loop().call_later(0.01, self.peer.release)
        while self.arena.lease.is_mapped_as(former):  # noqa: ASYNC110 - the kernel tells nobody
            await asyncio.sleep(0.001)
        for slot in lost:
            assert slot is not None
            self.free(slot)
        self.open()

    async def run(self, steps: list[str]) -> None:
        actions: dict[str, Callable[[], object]] = {"hold": self.peer.hold, "release": self.peer.release}
        for step in steps:
            match step:
                case "write":
                    await self.write()
                case "cancel":
                    await self.cancel()
                case "break":
                    await self.break_session()
                case "pause":
                    await asyncio.sleep(0.002)
                case _:
                    actions[step]()
            await asyncio.sleep(0)
        self.peer.release()
        results = await asyncio.gather(*self.writes, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        while self.peer.num_waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert self.slots.free_bytes == ARENA_BYTES
        assert (self.memory == POISON).all(), "written after it was given back"
        self.carrier.close()
        await self.arena.close()
        assert self.owner.violations == self.peer.violations == []

    def end(self) -> None:
        self.arena.lease.close()
        for device in (self.owner, self.peer):
            device.close()


def live(steps: list[str]) -> World:
    async def run(folder: Path) -> World:
        world = World(folder)
        try:
            await asyncio.wait_for(world.run(steps), 20)
        finally:
            world.end()
        return world

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(run(Path(folder)))


@given(st.lists(st.sampled_from(STEPS), max_size=30))
@settings(max_examples=1000 if IS_FULL else 25)
def test_what_is_committed_is_there_and_what_is_free_stays_so(steps: list[str]) -> None:
    live(steps)


def test_the_world_does_something() -> None:
    world = live(["write", "write", "release", "pause", "pause", "hold", "write", "cancel", "write", "break", "write"])
    assert world.num_written == 5 and world.num_committed >= 1 and world.num_sessions == 2


# --- parts that do not wait -------------------------------------------------------------------------------------------


async def _at_once(event: DeviceEvent) -> None:
    return


async def _until_cancelled(event: DeviceEvent) -> None:
    while not event.query():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def _close_at_once(imported: ImportedArena) -> None:
    imported._memory, imported._running = None, []
    imported._lease.close()


def test_a_commit_before_its_event_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_carrier, "_completed", _at_once)
    with pytest.raises(AssertionError, match="committed before"):
        live(["hold", "write", "pause"])


def test_an_abort_before_its_event_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_carrier, "_completed", _until_cancelled)
    with pytest.raises(AssertionError, match="given back"):
        live(["hold", "write", "pause", "cancel", "pause"])


def test_an_unlock_before_the_events_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImportedArena, "close", _close_at_once)
    with pytest.raises(AssertionError, match="given back"):
        live(["hold", "write", "pause", "break"])
