"""Embeddings through a shared segment between two processes, as fast as they go: grant, write, commit, check, again.

    receiver                                            writer, another process
    grants slots of any size, wherever there is room    writes each through its mapping, in any order
    <-- commit: slot, generation, length, checksum --   says so when it is written
    compares the bytes with the commit and the truth, poisons them, and grants the room anew

What a slot's bytes must be follows from its generation, so what was there before never passes for it. A module of its
own: the writer runs it.
"""

from __future__ import annotations

import asyncio
import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from triptych.transport.carrier import MemoryCarrier
from triptych.transport.layout import checksum64
from triptych.transport.shm import SharedSegment
from triptych.transport.slots import Slot, SlotAllocator
from triptych.transport.types import SlotGrant

REPOSITORY = Path(__file__).parents[2]
ARENA_BYTES = 1 << 19
MAX_SLOT_BYTES = 4096
OUTSTANDING = 256
MAPPING_ID = 1
_RECORD = struct.Struct("<QQQQ")  # grant: slot, offset, length, generation; commit: slot, generation, length, checksum
_TABLE = random.Random(0).randbytes(1 << 20)


@dataclass
class Rounds:
    """`wrong`: commits whose bytes were not those that the commit, or the truth, says."""

    done: int = 0
    wrong: int = 0
    num_bytes: int = 0
    wall_s: float = 0.0


def bytes_of(generation: int, num_bytes: int) -> memoryview:
    start = generation * 7919 % (len(_TABLE) - MAX_SLOT_BYTES)
    return memoryview(_TABLE)[start : start + num_bytes]


def run_rounds(count: int, seed: int, mode: str = "sound") -> Rounds:
    """`mode` is how the writer behaves: "sound", or "early": it commits before it writes."""
    segment = SharedSegment.create(ARENA_BYTES, "rounds")
    command = [sys.executable, "-P", "-m", "tests.integration.shm_rounds", segment.name, str(seed), mode]
    # Through files of the system, unbuffered: each side reads whatever has come.
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    writer = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert writer.stdin is not None and writer.stdout is not None
    began_s = time.monotonic()
    try:
        rounds = _Receiver(segment, writer.stdin.fileno(), writer.stdout.fileno(), seed).run(count)
        rounds.wall_s = time.monotonic() - began_s
        writer.stdin.close()
        assert writer.wait(30) == 0
        assert not segment.is_mapped_as(MAPPING_ID)
        return rounds
    finally:
        writer.kill()
        writer.wait()
        for pipe in (writer.stdin, writer.stdout):
            pipe.close()
        segment.close()


class _Receiver:
    """Owner of the arena's slots."""

    def __init__(self, segment: SharedSegment, out: int, into: int, seed: int) -> None:
        self._buffer = segment.buffer
        self._slots = SlotAllocator(ARENA_BYTES, on_free=self._poison)
        self._out, self._into = out, into
        self._dice = random.Random(seed)
        self._granted: dict[int, Slot] = {}
        self._num_granted = 0

    def run(self, count: int) -> Rounds:
        rounds = Rounds()
        self._grant(count)
        for slot_id, generation, num_bytes, checksum in _records(self._into):
            slot = self._granted.pop(slot_id)
            assert (slot.generation, slot.num_bytes) == (generation, num_bytes)
            view = self._buffer[slot.offset : slot.offset + num_bytes]
            is_right = checksum64(view) == checksum and view == bytes_of(generation, num_bytes)
            rounds.wrong += not is_right
            rounds.done += 1
            rounds.num_bytes += num_bytes
            self._slots.release(slot)
            if rounds.done == count:
                break
            if len(self._granted) <= OUTSTANDING // 2:
                self._grant(count)
        assert rounds.done == count, "the writer is gone"
        assert self._slots.free_bytes == self._slots.capacity_bytes
        return rounds

    def _grant(self, count: int) -> None:
        records = []
        while len(self._granted) < OUTSTANDING and self._num_granted < count:
            slots = self._slots.try_reserve([self._dice.randint(1, MAX_SLOT_BYTES)])
            if slots is None:
                break
            (slot,) = slots
            self._granted[slot.slot_id] = slot
            self._num_granted += 1
            records.append(_RECORD.pack(slot.slot_id, slot.offset, slot.num_bytes, slot.generation))
        _write_all(self._out, b"".join(records))

    def _poison(self, offset: int, num_bytes: int) -> None:
        self._buffer[offset : offset + num_bytes] = b"\xff" * num_bytes


def _records(fd: int) -> Iterator[tuple[int, int, int, int]]:
    rest = b""
    while data := os.read(fd, 1 << 16):
        rest += data
        whole = len(rest) // _RECORD.size * _RECORD.size
        yield from _RECORD.iter_unpack(rest[:whole])
        rest = rest[whole:]


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


async def _write_for(name: str, seed: int, mode: str) -> None:
    """The writer's life: until no more grants come."""
    segment = SharedSegment.open(name, ARENA_BYTES, mapping_id=MAPPING_ID)
    carrier, dice = MemoryCarrier("shm", segment.buffer, segment), random.Random(seed + 1)
    rest = b""
    while data := os.read(0, 1 << 16):
        rest += data
        whole = len(rest) // _RECORD.size * _RECORD.size
        grants = list(_RECORD.iter_unpack(rest[:whole]))
        rest = rest[whole:]
        dice.shuffle(grants)
        commits = []
        for slot_id, _, num_bytes, generation in grants:
            commits.append(_RECORD.pack(slot_id, generation, num_bytes, checksum64(bytes_of(generation, num_bytes))))
        if mode == "early":
            _write_all(1, b"".join(commits))
            time.sleep(0.002)  # noqa: ASYNC251 - there is nothing else on this loop
        for slot_id, offset, num_bytes, generation in grants:
            grant = SlotGrant(slot_id, offset, num_bytes, generation, bytes(16))
            await carrier.write_slot(grant, bytes_of(generation, num_bytes))
        if mode == "sound":
            _write_all(1, b"".join(commits))
    carrier.close()


if __name__ == "__main__":
    asyncio.run(_write_for(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
