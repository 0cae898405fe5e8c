"""Bookkeeping of an embedding arena: which bytes are whose. Pure: no memory, no clock, no lock.

0                                                                capacity
|  free  | owned  |      free      | quarantined | owned |  free  |
         ^ offset, a multiple of `alignment`; so is the length taken

free --try_reserve--> owned --release--> free
                        |---quarantine--> quarantined --confirm_revoked--> free
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from triptych.core.ids import new_capability


@dataclass(frozen=True, slots=True)
class Slot:
    """A reserved run of bytes. `num_bytes` is what was asked for, not the aligned length.

    `generation` is unique over the allocator's life: a commit that names an earlier user of these bytes never matches.
    """

    slot_id: int
    offset: int
    num_bytes: int
    generation: int
    capability: bytes = field(repr=False)


class SlotAllocator:
    """Owner of an arena's bytes. free + owned + quarantined = capacity, always.

    Args:
        capacity_bytes: size of the arena; what is above the last whole `alignment` is never handed out.
        alignment: of every slot's offset, in bytes; a power of two.
        on_free: hears of bytes (offset, length) that were given back, before anybody else can have them.
    """

    def __init__(
        self, capacity_bytes: int, alignment: int = 64, on_free: Callable[[int, int], None] | None = None
    ) -> None:
        if capacity_bytes < alignment or alignment < 1 or alignment & (alignment - 1):
            raise ValueError("the arena must hold at least one alignment, and that be a power of two")
        self._alignment = alignment
        self._on_free = on_free
        self._capacity_bytes = capacity_bytes // alignment * alignment
        # Free runs by offset, never adjacent: _starts[i] has _lengths[i] bytes.
        self._starts: list[int] = [0]
        self._lengths: list[int] = [self._capacity_bytes]
        self._owned: dict[int, Slot] = {}
        self._quarantined: dict[int, Slot] = {}
        self._free_bytes = self._capacity_bytes
        self._quarantined_bytes = 0
        self._ids = itertools.count(1)

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    @property
    def free_bytes(self) -> int:
        return self._free_bytes

    @property
    def owned_bytes(self) -> int:
        return self._capacity_bytes - self._free_bytes - self._quarantined_bytes

    @property
    def quarantined_bytes(self) -> int:
        return self._quarantined_bytes

    def can_ever_hold(self, sizes: Sequence[int]) -> bool:
        """Whether the sizes fit an empty arena together."""
        return sum(map(self.aligned, sizes)) <= self._capacity_bytes

    def aligned(self, num_bytes: int) -> int:
        """What a slot of that size takes of the arena."""
        return -(-num_bytes // self._alignment) * self._alignment

    def room_bytes(self, slot: Slot) -> int:
        """What this one takes."""
        return self.aligned(slot.num_bytes)

    def find(self, slot_id: int) -> Slot | None:
        """The owned slot of that id: what a commit is checked against."""
        return self._owned.get(slot_id)

    def try_reserve(self, sizes: Sequence[int]) -> list[Slot] | None:
        """One slot per size, or None and nothing is changed. First fit, so the low end stays dense.

        Raises:
            ValueError: a size is below 1.
        """
        if any(size < 1 for size in sizes):
            raise ValueError("a slot has at least one byte")
        slots: list[Slot] = []
        for size in sizes:
            offset = self._take(self.aligned(size))
            if offset is None:
                for slot in slots:
                    self.release(slot)
                return None
            slots.append(self._own(offset, size))
        return slots

    def release(self, slot: Slot) -> None:
        """To free: nobody can write there any more. Releasing twice, or what is not owned, is a bug (KeyError)."""
        self._give_back(self._owned.pop(self._known(self._owned, slot)))

    def quarantine(self, slot: Slot) -> None:
        """The request is over, but its writer may still write: out of use until `confirm_revoked`."""
        slot_id = self._known(self._owned, slot)
        self._quarantined[slot_id] = self._owned.pop(slot_id)
        self._quarantined_bytes += self.room_bytes(slot)

    def confirm_revoked(self, slot: Slot) -> None:
        """The writer is dead, has said that it stopped, or its mapping is gone."""
        self._give_back(self._quarantined.pop(self._known(self._quarantined, slot)))
        self._quarantined_bytes -= self.room_bytes(slot)

    def _own(self, offset: int, size: int) -> Slot:
        serial = next(self._ids)
        slot = Slot(serial, offset, size, serial, new_capability())
        self._owned[serial] = slot
        return slot

    @staticmethod
    def _known(table: dict[int, Slot], slot: Slot) -> int:
        if table.get(slot.slot_id) != slot:
            raise KeyError(slot.slot_id)
        return slot.slot_id

    def _take(self, length: int) -> int | None:
        for index, free in enumerate(self._lengths):
            if free >= length:
                offset = self._starts[index]
                self._shrink(index, length)
                self._free_bytes -= length
                return offset
        return None

    def _shrink(self, index: int, length: int) -> None:
        if self._lengths[index] == length:
            del self._starts[index], self._lengths[index]
        else:
            self._starts[index] += length
            self._lengths[index] -= length

    def _give_back(self, slot: Slot) -> None:
        start, length = slot.offset, self.room_bytes(slot)
        self._free_bytes += length
        if self._on_free is not None:
            self._on_free(start, length)
        index = bisect.bisect_left(self._starts, start)
        if index < len(self._starts) and start + length == self._starts[index]:  # joins the run above
            length += self._lengths[index]
            del self._starts[index], self._lengths[index]
        if index > 0 and self._starts[index - 1] + self._lengths[index - 1] == start:  # joins the run below
            self._lengths[index - 1] += length
            return
        self._starts.insert(index, start)
        self._lengths.insert(index, length)
