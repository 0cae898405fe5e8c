"""What was given back is poisoned: whoever still reads it says so in the logits, which are then no numbers, and whoever
still writes to it removes the poison, which `check` and the next owner find."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from triptych.kv.allocator import RESERVED_PAGES, PageAllocator
from triptych.kv.manager import CacheManager
from triptych.transport.slots import Slot, SlotAllocator

POISON = float("nan")


class PoisonedPages(PageAllocator):
    """Fills free pages of `pool`, (layers, 2, pages, ...), with poison."""

    def __init__(self, num_pages: int, pool: torch.Tensor) -> None:
        super().__init__(num_pages)
        self._pool = pool
        pool[:, :, RESERVED_PAGES:] = POISON

    def allocate(self, count: int) -> list[int]:
        pages = super().allocate(count)
        self._expect_poison(pages)
        return pages

    def free(self, pages: Iterable[int]) -> None:
        freed = list(pages)
        super().free(freed)
        self._pool[:, :, freed] = POISON

    def check(self) -> None:
        """Nobody has written to a free page."""
        self._expect_poison(self._free)

    def _expect_poison(self, pages: list[int]) -> None:
        assert bool(self._pool[:, :, pages].isnan().all()), "somebody wrote to a page after it was given back"


def poison_pages(manager: CacheManager, pool: torch.Tensor) -> PoisonedPages:
    """From now on, of a pool that is wholly free."""
    assert manager._allocator.num_free == manager.num_usable
    pages = manager._allocator = PoisonedPages(manager._allocator.num_pages, pool)
    return pages


class PoisonedSlots(SlotAllocator):
    """Fills free bytes of a float32 arena with poison. What was there before counts as poison too."""

    def __init__(self, arena: memoryview) -> None:
        super().__init__(len(arena))
        self.arena = arena
        self._poison(0, len(arena))

    def check(self) -> None:
        """Nobody has written to free bytes."""
        for start, length in zip(self._starts, self._lengths, strict=True):
            assert np.isnan(self._floats(start, length)).all(), "somebody wrote to a slot after it was given back"

    def _give_back(self, slot: Slot) -> None:
        super()._give_back(slot)
        self._poison(slot.offset, slot.num_bytes)

    def _poison(self, offset: int, num_bytes: int) -> None:
        self._floats(offset, num_bytes)[:] = POISON

    def _floats(self, offset: int, num_bytes: int) -> npt.NDArray[np.float32]:
        return np.frombuffer(self.arena, np.float32)[offset // 4 : (offset + num_bytes) // 4]
