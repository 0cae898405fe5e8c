"""The free list against a set."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.property.promises import assert_machine_catches, steps
from triptych.kv.allocator import RESERVED_PAGES, PageAllocator

NUM_PAGES = 12


class AllocatorMachine(RuleBasedStateMachine):
    part: type[PageAllocator] = PageAllocator

    def __init__(self) -> None:
        super().__init__()
        self.allocator = self.part(NUM_PAGES)
        self.out: set[int] = set()

    @rule(count=st.integers(0, NUM_PAGES))
    def allocate(self, count: int) -> None:
        if count > NUM_PAGES - RESERVED_PAGES - len(self.out):
            with pytest.raises(AssertionError):
                self.allocator.allocate(count)
            return
        pages = self.allocator.allocate(count)
        assert len(pages) == len(set(pages)) == count
        assert all(RESERVED_PAGES <= page < NUM_PAGES for page in pages)
        assert not self.out & set(pages), "a page in two hands"
        self.out |= set(pages)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.out)), unique=True)) if self.out else []
        self.allocator.free(pages)
        self.out -= set(pages)

    @rule(page=st.integers(-1, NUM_PAGES))
    def free_what_is_not_out(self, page: int) -> None:
        if page not in self.out:
            with pytest.raises(AssertionError):
                self.allocator.free([page])

    @invariant()
    def all_pages_are_free_or_out(self) -> None:
        assert self.allocator.num_free + len(self.out) == self.allocator.num_usable == NUM_PAGES - RESERVED_PAGES


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = steps(60)


class ForgetsOne(PageAllocator):
    def free(self, pages: Iterable[int]) -> None:
        super().free(list(pages)[:-1])


class TakesTwice(PageAllocator):
    def allocate(self, count: int) -> list[int]:
        pages = super().allocate(count)
        self._free[:0] = pages[:1]
        return pages


class HandsOutTheReserved(PageAllocator):
    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self._free[0] = 0


class FreesTwice(PageAllocator):
    def free(self, pages: Iterable[int]) -> None:
        self._is_free = bytearray(self.num_pages)
        super().free(pages)


@pytest.mark.parametrize("broken", [ForgetsOne, TakesTwice, HandsOutTheReserved, FreesTwice])
def test_a_broken_free_list_is_caught(broken: type[PageAllocator]) -> None:
    assert_machine_catches(type("Broken", (AllocatorMachine,), {"part": broken}))
