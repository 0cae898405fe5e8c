"""What is given back holds no number any more, whatever the pool computes in."""

from __future__ import annotations

import pytest
import torch

from triptych.kv.manager import CacheManager
from triptych.stages.poison import poisoned_pages, poisoned_slots
from triptych.transport.slots import SlotAllocator

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_are_poisoned_from_the_start_and_whenever_they_are_given_back(dtype: torch.dtype) -> None:
    pool = torch.zeros((2, 2, 5, 1, 4, 3), dtype=dtype)
    manager = CacheManager(5, 4, poisoned_pages(pool))
    assert pool[:, :, 1:].isnan().all() and not pool[:, :, 0].isnan().any()
    held = [manager.reserve(b"", [n], 4) for n in range(4)]
    assert all(held)
    pool[:] = 1.0
    assert held[0] is not None and held[2] is not None
    for sequence in (held[0], held[2]):
        manager.release(sequence)
    given_back = [*held[0].pages, *held[2].pages]
    kept = [page for page in range(5) if page not in given_back]
    assert pool[:, :, given_back].isnan().all() and bool((pool[:, :, kept] == 1.0).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_are_poisoned_from_the_start_and_whenever_they_are_given_back(dtype: torch.dtype) -> None:
    memory = memoryview(bytearray(64 * 4))
    arena = torch.frombuffer(memory, dtype=dtype)
    slots = SlotAllocator(len(memory), on_free=poisoned_slots(memory))
    assert arena.isnan().all()
    taken = slots.try_reserve([64, 30, 64])
    assert taken is not None
    arena[:] = 1.0
    slots.release(taken[1])
    slots.quarantine(taken[2])
    per_slot = 64 // dtype.itemsize
    assert [bool(part.isnan().all()) for part in arena.split(per_slot)] == [False, True, False, False]
    slots.confirm_revoked(taken[2])
    assert arena[2 * per_slot : 3 * per_slot].isnan().all() and not arena[:per_slot].isnan().any()


def test_a_reservation_that_does_not_fit_gives_back_poisoned_bytes() -> None:
    memory = memoryview(bytearray(64 * 2))
    slots = SlotAllocator(len(memory), on_free=poisoned_slots(memory))
    assert slots.try_reserve([64, 128]) is None
    assert set(bytes(memory)) == {0xFF} and slots.free_bytes == 128
