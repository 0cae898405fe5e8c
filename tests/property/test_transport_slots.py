"""The arena's bookkeeping against the simplest possible model: one owner per byte."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from triptych.transport.slots import Slot, SlotAllocator

ALIGNMENT = 64
UNITS = 32
CAPACITY = ALIGNMENT * UNITS


class Slots(RuleBasedStateMachine):
    owned: Bundle[Slot] = Bundle("owned")
    quarantined: Bundle[Slot] = Bundle("quarantined")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = SlotAllocator(CAPACITY + 17, ALIGNMENT)
        self.units: list[tuple[str, int] | None] = [None] * UNITS
        self.generations: set[int] = set()

    def span(self, slot: Slot) -> range:
        return range(slot.offset // ALIGNMENT, -(-(slot.offset + slot.num_bytes) // ALIGNMENT))

    def mark(self, slot: Slot, state: str | None) -> None:
        for unit in self.span(slot):
            self.units[unit] = None if state is None else (state, slot.slot_id)

    @rule(target=owned, sizes=st.lists(st.integers(1, CAPACITY // 2), max_size=5))
    def reserve(self, sizes: list[int]) -> object:
        slots = self.allocator.try_reserve(sizes)
        if slots is None:
            assert not self.fits_first(sizes)
            return multiple()
        for slot, size in zip(slots, sizes, strict=True):
            assert slot.num_bytes == size and slot.offset % ALIGNMENT == 0 and len(slot.capability) == 16
            assert all(self.units[unit] is None for unit in self.span(slot))
            assert slot.generation not in self.generations
            self.generations.add(slot.generation)
            self.mark(slot, "owned")
        return multiple(*slots)

    def fits_first(self, sizes: list[int]) -> bool:
        units = list(self.units)
        for size in sizes:
            need = -(-size // ALIGNMENT)
            starts = (s for s in range(UNITS - need + 1) if all(u is None for u in units[s : s + need]))
            start = next(starts, None)
            if start is None:
                return False
            units[start : start + need] = [("trial", 0)] * need
        return True

    @rule(slot=consumes(owned))
    def release(self, slot: Slot) -> None:
        self.allocator.release(slot)
        self.mark(slot, None)
        for again in (self.allocator.release, self.allocator.quarantine, self.allocator.confirm_revoked):
            with pytest.raises(KeyError):
                again(slot)

    @rule(target=quarantined, slot=consumes(owned))
    def quarantine(self, slot: Slot) -> Slot:
        self.allocator.quarantine(slot)
        self.mark(slot, "quarantined")
        assert self.allocator.find(slot.slot_id) is None
        return slot

    @rule(slot=consumes(quarantined))
    def confirm_revoked(self, slot: Slot) -> None:
        with pytest.raises(KeyError):
            self.allocator.release(slot)
        self.allocator.confirm_revoked(slot)
        self.mark(slot, None)

    @invariant()
    def adds_up(self) -> None:
        def count(state: str) -> int:
            return ALIGNMENT * sum(unit is not None and unit[0] == state for unit in self.units)

        allocator = self.allocator
        assert allocator.owned_bytes == count("owned")
        assert allocator.quarantined_bytes == count("quarantined")
        assert allocator.free_bytes + allocator.owned_bytes + allocator.quarantined_bytes == allocator.capacity_bytes


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_an_empty_arena_hands_out_everything_again() -> None:
    allocator = SlotAllocator(CAPACITY)
    slots = allocator.try_reserve([ALIGNMENT] * UNITS)
    assert slots is not None and allocator.try_reserve([1]) is None
    for slot in slots[::2] + slots[1::2]:
        allocator.release(slot)
    assert allocator.try_reserve([CAPACITY]) is not None


def test_sizes_below_one_and_odd_alignments_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        SlotAllocator(CAPACITY).try_reserve([1, 0])
    with pytest.raises(ValueError, match="power of two"):
        SlotAllocator(CAPACITY, 48)
    assert not SlotAllocator(CAPACITY).can_ever_hold([CAPACITY, 1])
