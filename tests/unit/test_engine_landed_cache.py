"""Embeddings that have landed serve all who need them, and give way to what lands."""

from __future__ import annotations

import pytest
import torch

from tests.unit.engine_house import ENCODER, PAGE, ROW_BYTES, House, answer_of, heard
from triptych.core.errors import Aborted, StaleAttempt, TransferRefused
from triptych.core.ids import AttemptRef
from triptych.core.plan import EmbeddingSource, Grid
from triptych.engine.landed_cache import Content
from triptych.engine.landing import LandingTable, Wanted
from triptych.obs import metrics
from triptych.testing.async_runner import AsyncFakeRunner
from triptych.transport.slots import SlotAllocator

ONE, TWO, THREE = AttemptRef("req-1"), AttemptRef("req-2"), AttemptRef("req-3")
SLOT = 64


def content(number: int, num_tokens: int = 1) -> Content:
    return Content(bytes([number]) * 32, num_tokens, Grid(1, 1, num_tokens))


def rows_of(number: int) -> torch.Tensor:
    return torch.full((1, 16), float(number))


class Table:
    """`num_slots` of 64 bytes, and a cache of `num_cached`."""

    def __init__(self, num_slots: int = 4, num_cached: int = 4) -> None:
        self.book = SlotAllocator(num_slots * SLOT)
        self.landing = LandingTable(self.book, num_cached * SLOT)

    def reserve(self, ref: AttemptRef, *numbers: int) -> bool:
        wanted = {index: Wanted(content(number), SLOT) for index, number in enumerate(numbers)}
        fits = self.landing.try_reserve(ref, wanted)
        self.landing.check_integrity()
        return fits

    def land(self, ref: AttemptRef, index: int, number: int) -> list[tuple[AttemptRef, int]]:
        self.landing.hand(ref, index, ENCODER)
        keys = self.landing.landed(ref, index, rows_of(number))
        self.landing.check_integrity()
        return keys

    def cache(self, *numbers: int) -> None:
        for number in numbers:
            ref = AttemptRef(f"cached-{number}")
            assert self.reserve(ref, number)
            self.land(ref, 0, number)
            self.landing.consumed(ref, 0)

    def cached(self) -> list[int]:
        return [number for number in range(20) if self.landing._cache.find(content(number)) is not None]


def test_what_has_landed_is_there_for_the_next_without_a_slot() -> None:
    table = Table()
    table.cache(7)
    assert table.landing.counts_bytes() == {"free": 3 * SLOT, "owned": 0, "cached": SLOT, "quarantined": 0}
    assert table.reserve(ONE, 7, 8)
    assert torch.equal(table.landing.rows(ONE, 0), rows_of(7))
    assert table.landing.rows(ONE, 1) is None
    assert table.landing.counts_bytes() == {"free": 2 * SLOT, "owned": 2 * SLOT, "cached": 0, "quarantined": 0}
    with pytest.raises(TransferRefused):
        table.landing.hand(ONE, 0, ENCODER)
    table.landing.abandon(ONE)
    assert table.cached() == [7]
    assert len(table.landing) == 0


def test_what_is_cached_in_the_middle_does_not_keep_out_for_ever_what_fits_an_empty_arena() -> None:
    """A lease of it would leave two runs of free bytes, and neither holds the other picture."""
    table = Table()
    assert table.reserve(ONE, 6)
    table.cache(7)
    table.landing.abandon(ONE)
    wanted = {0: Wanted(content(7), SLOT), 1: Wanted(content(8, 3), 3 * SLOT)}
    assert table.landing.can_ever_hold([want.num_bytes for want in wanted.values()])
    assert table.landing.try_reserve(ONE, wanted)
    table.landing.check_integrity()
    assert table.landing.rows(ONE, 0) is None, "it has to land again"
    table.landing.abandon(ONE)
    assert len(table.landing) == 0


def test_what_landed_for_one_that_ended_before_it_was_used_is_kept() -> None:
    table = Table()
    assert table.reserve(ONE, 7)
    table.land(ONE, 0, 7)
    table.landing.abandon(ONE)
    assert table.cached() == [7]


def test_a_claim_of_another_length_or_grid_finds_nothing_and_what_lands_then_takes_the_name() -> None:
    table = Table()
    table.cache(7)
    for claim in (content(7, 2), Content(content(7).identity, 1, Grid(1, 2, 2))):
        assert table.landing.try_reserve(ONE, {0: Wanted(claim, 2 * SLOT)})
        assert table.landing.rows(ONE, 0) is None
        table.landing.hand(ONE, 0, ENCODER)
        table.landing.landed(ONE, 0, torch.zeros(2, 16))
        table.landing.check_integrity()
        table.landing.abandon(ONE)
        assert table.cached() == []
        assert table.landing._cache.find(claim) is not None
    table.landing.clear_cache()
    assert table.book.free_bytes == table.book.capacity_bytes


def test_a_name_taken_over_while_somebody_still_reads_leaves_him_what_he_reads() -> None:
    table = Table()
    table.cache(7)
    assert table.reserve(ONE, 7)
    assert table.landing.try_reserve(TWO, {0: Wanted(content(7, 2), 2 * SLOT)})
    table.landing.hand(TWO, 0, ENCODER)
    table.landing.landed(TWO, 0, torch.zeros(2, 16))
    assert torch.equal(table.landing.rows(ONE, 0), rows_of(7))
    table.landing.abandon(ONE)
    table.landing.check_integrity()
    assert table.landing.counts_bytes()["free"] == 2 * SLOT


def test_the_one_used_longest_ago_gives_way_and_only_as_many_as_needed() -> None:
    table = Table()
    table.cache(1, 2, 3, 4)
    assert table.reserve(ONE, 1)  # used again
    table.landing.abandon(ONE)
    assert table.reserve(TWO, 9)
    assert table.cached() == [1, 3, 4]


def test_cached_ones_never_stand_in_the_way_of_a_reservation() -> None:
    table = Table()
    table.cache(1, 2, 3, 4)
    assert table.landing.try_reserve(ONE, {0: Wanted(content(9, 4), 4 * SLOT)}), "in one piece, too"
    assert table.cached() == []


def test_what_is_leased_does_not_give_way_and_a_refused_reservation_costs_nothing_that_it_wants() -> None:
    table = Table()
    table.cache(1, 2)
    assert table.reserve(ONE, 1)
    assert not table.reserve(TWO, 2, 3, 4, 5)
    assert table.cached() == [1, 2]
    assert len(table.landing) == 1
    assert torch.equal(table.landing.rows(ONE, 0), rows_of(1))


def test_the_cache_is_bounded() -> None:
    table = Table(num_cached=2)
    table.cache(1, 2, 3)
    assert table.cached() == [2, 3]
    none = Table(num_cached=0)
    none.cache(1)
    assert none.book.free_bytes == none.book.capacity_bytes
    assert none.cached() == []


def test_it_comes_once_for_all_who_wait_and_have_no_encoder_at_work() -> None:
    table = Table()
    woken: list[str] = []
    assert table.reserve(ONE, 7)
    assert table.reserve(TWO, 8, 7)
    assert table.reserve(THREE, 7)
    assert not table.landing.is_coming(TWO, 1)
    table.landing.hand(ONE, 0, ENCODER)
    assert table.landing.is_coming(TWO, 1)
    assert not table.landing.is_coming(TWO, 0)
    assert not table.landing.is_coming(ONE, 0)
    table.landing.wake_on_change(content(7), lambda: woken.append("seven"))
    table.landing.wake_on_change(content(8), lambda: woken.append("eight"))
    table.landing.hand(THREE, 0, ENCODER)  # lost patience: this one is written twice
    assert table.landing.landed(ONE, 0, rows_of(7)) == [(ONE, 0), (TWO, 1)]
    assert woken == ["seven"]
    table.landing.check_integrity()
    assert table.landing.landed(THREE, 0, rows_of(7)) == [(THREE, 0)]
    for ref in (ONE, TWO, THREE):
        table.landing.abandon(ref)
    assert table.landing.counts_bytes() == {"free": 3 * SLOT, "owned": 0, "cached": SLOT, "quarantined": 0}


@pytest.mark.parametrize("how", ["finished", "lost", "ended"])
def test_who_waits_for_anothers_encoder_is_woken_when_that_gives_up_and_has_a_slot_of_its_own(how: str) -> None:
    table = Table()
    woken: list[None] = []
    assert table.reserve(ONE, 7)
    assert table.reserve(TWO, 7)
    table.landing.hand(ONE, 0, ENCODER)
    table.landing.wake_on_change(content(7), lambda: woken.append(None))
    if how == "ended":
        table.landing.stop_waiting(ONE)
    else:
        table.landing.writer_finished(ENCODER, ONE if how == "finished" else None)
    assert woken == [None]
    assert not table.landing.is_coming(TWO, 0)
    assert table.land(TWO, 0, 7)[0] == (TWO, 0)


def test_a_writer_that_is_done_before_the_last_step_of_an_ended_sequence_frees_its_slot() -> None:
    """The step names the sequence, so what landed stays; what is still being written is quarantined at once, or the
    writer's last word would come too early and the slot stay out of use for ever."""
    house = House(runner=AsyncFakeRunner(PAGE), arena_bytes=64 * ROW_BYTES)
    sequence = house.submit([1, 2, 3, 4, 5, (1, 5), 2])
    house.turn_until(lambda: house.engine._under_way is not None and house.engine._under_way.names(sequence))
    slot = house.landing.hand(sequence.ref, 0, ENCODER)
    house.engine.abort(sequence.ref, Aborted("enough"))
    with pytest.raises(StaleAttempt):
        house.landing.check(sequence.ref, 0, ENCODER, slot.slot_id, slot.generation, slot.capability)
    house.landing.writer_done_with(ENCODER, slot.slot_id)
    house.turn(3)
    assert house.is_clean


def test_the_same_picture_in_another_text_needs_no_encoder() -> None:
    house = House(landed_cache_bytes=64 * ROW_BYTES)
    counted = metrics.EMBEDDING_SOURCE.labels("cache")._value
    before = counted.get()
    first = house.submit([1, 2, (1, 5), 3])
    house.turn()
    house.land(first, 0)
    again = house.submit([9, 9, 9, (1, 5), (1, 5), 4])
    house.finish(first, again)
    assert counted.get() == before + 2
    assert heard(again).ids == answer_of(again)
    assert again.items[0].source is again.items[1].source is EmbeddingSource.CACHE
    assert house.landing.counts_bytes()["cached"] == 5 * ROW_BYTES
    house.landing.clear_cache()
    assert house.is_clean


def test_two_that_wait_for_one_picture_both_go_on_when_it_lands() -> None:
    house = House()
    first, second = house.submit([1, (1, 5), 3]), house.submit([9, 9, (1, 5), 4])
    house.turn(2)
    house.land(first, 0)
    house.finish(first, second)
    assert [heard(each).ids for each in (first, second)] == [answer_of(first), answer_of(second)]
    assert [each.items[0].source for each in (first, second)] == [EmbeddingSource.REMOTE, EmbeddingSource.CACHE]
    assert house.is_clean


def test_a_blocked_prompt_that_is_offered_every_turn_evicts_nothing() -> None:
    """There is landing room for it, if cached ones went; but no pages."""
    house = House(num_pages=10, arena_bytes=5 * ROW_BYTES, landed_cache_bytes=64 * ROW_BYTES)
    first = house.submit([1, (1, 5), 2])
    house.turn()
    house.land(first, 0)
    house.finish(first)
    holder = house.submit([3] * 20, max_tokens=10)
    house.turn()
    blocked = house.submit([(2, 4), *[4] * 16], max_tokens=10)
    house.turn(2)
    assert blocked.pages is None
    assert house.landing.counts_bytes()["cached"] == 5 * ROW_BYTES
    house.engine.abort(holder.ref, Aborted("enough"))
    house.turn()
    assert blocked.pages is not None
    assert house.landing.counts_bytes()["cached"] == 0
