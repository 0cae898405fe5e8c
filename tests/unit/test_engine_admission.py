"""Which prompts the step loop lets in, when, and which it refuses at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.engine_house import (
    ROW_BYTES,
    House,
    answer_of,
    heard,
)
from triptych.core.clock import ManualClock
from triptych.core.errors import (
    NoRoom,
    RequestTooLarge,
    StaleAttempt,
)
from triptych.engine.sequence import Sequence


def test_admission_is_pages_and_landing_room_or_nothing() -> None:
    house = House(arena_bytes=8 * ROW_BYTES)
    first = house.submit([1, (1, 6), 2])
    second = house.submit([3, (2, 6), 4])
    house.turn(5)
    assert heard(second).story == []
    assert house.manager.counts()["owned"] + house.manager.counts()["cached"] == len(first.pages.pages)  # type: ignore[union-attr]
    house.land(first, 0)
    house.turn_until(lambda: heard(second).story != [])
    house.land(second, 0)
    house.finish(first, second)
    assert heard(second).ids == answer_of(second)
    assert house.is_clean


def test_a_reservation_that_finds_no_landing_room_evicts_nothing_and_one_without_pages_holds_none() -> None:
    house = House(num_pages=9, arena_bytes=8 * ROW_BYTES)
    house.finish(house.submit(list(range(1, 17)), max_tokens=1))
    cached = house.manager.counts()["cached"]
    first = house.submit([100, (1, 6), 102], max_tokens=2)
    house.turn()
    held = house.manager.counts()
    second = house.submit([103, (2, 6), *range(104, 115)], max_tokens=2)  # its pages are there, if cached ones go
    house.turn(3)
    assert house.manager.counts() == held
    assert held["cached"] >= cached > 0
    house.land(first, 0)
    house.finish(first)
    house.turn_until(lambda: heard(second).story != [])
    house.land(second, 0)
    house.finish(second)
    assert heard(second).ids == answer_of(second)
    blocking = house.submit([1] * 20, max_tokens=9)
    house.turn()
    house.submit([115, (3, 6), *range(116, 126)], max_tokens=2)  # room to land, no pages
    house.turn(2)
    assert len(house.landing) == 0
    house.finish(blocking)


def test_a_prompt_waits_for_pages_and_the_next_may_pass() -> None:
    house = House(num_pages=9)
    first = house.submit(list(range(1, 17)), max_tokens=9)  # 6 of 8 pages
    house.turn()
    large = house.submit(list(range(101, 113)), max_tokens=5)
    small = house.submit([1, 2, 3], max_tokens=2)
    house.finish(small)
    assert heard(large).story == []
    house.finish(first, large)
    assert [heard(each).ids for each in (first, large, small)] == [answer_of(each) for each in (first, large, small)]
    assert house.is_clean


def test_the_more_urgent_prompt_is_admitted_and_run_first() -> None:
    house = House(max_sequences=1)
    prompts = [house.new([number, 2, 3], max_tokens=2) for number in (1, 2, 3)]
    for made, priority in zip(prompts, (0, 5, -5), strict=True):
        made.plan = replace(made.plan, priority=priority)
        house.engine.submit(made)
    order: list[Sequence] = []
    while len(order) < 3:
        house.turn()
        order += [made for made in prompts if heard(made).ended.is_set() and made not in order]
    assert [made.plan.priority for made in order] == [-5, 0, 5]
    together = House(max_tokens=4, max_chunk=4)
    late, urgent = (together.new([number, 2, 3], max_tokens=2) for number in (1, 2))
    urgent.plan = replace(urgent.plan, priority=-1)
    for made in (late, urgent):
        together.engine.submit(made)
    together.turn()
    assert (urgent.num_computed, late.num_computed) == (3, 1)
    together.finish(late, urgent)
    assert [heard(made).ids for made in (late, urgent)] == [answer_of(made) for made in (late, urgent)]


def test_a_waiting_time_is_what_the_clock_says_since_it_was_queued() -> None:
    """A long prompt that waits is overdue at last, and then goes on beside urgent ones."""
    clock = ManualClock()
    house = House(num_pages=200, max_tokens=8, max_chunk=8, clock=clock)
    long = house.submit(list(range(1, 101)), max_tokens=1)

    def urgent_step() -> int:
        before = long.num_computed
        made = house.new([house.serial + 1000] * 8, max_tokens=1)
        made.plan = replace(made.plan, priority=-1)
        house.engine.submit(made)
        house.turn()
        return long.num_computed - before

    assert [urgent_step() for _ in range(3)] == [0, 0, 0]
    clock.advance_s(3.0)
    assert urgent_step() == 2
    house.finish(long)
    assert heard(long).ids == answer_of(long)


def test_no_more_sequences_run_than_allowed() -> None:
    house = House(max_sequences=2)
    sequences = [house.submit([number], max_tokens=5) for number in range(1, 6)]
    while not all(heard(each).ended.is_set() for each in sequences):
        house.turn()
        assert len(house.engine._running) <= 2
    assert all(heard(each).ids == answer_of(each) for each in sequences)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "needs_handoff", "fits"),
    [
        (list(range(30)), 3, False, True),  # 8 pages hold 32 tokens; the last one's KV is never needed
        (list(range(30)), 4, False, False),
        (list(range(32)), 900, True, True),  # the answer's room is elsewhere
        (list(range(33)), 1, True, False),
        ([(1, 5)], 1, False, False),  # five rows, and the arena holds four
        ([(1, 2), (2, 2)], 1, False, True),
        ([(1, 2), (2, 3)], 1, False, False),
    ],
)
def test_what_no_empty_worker_could_hold_fails_at_once(
    prompt: list[int | tuple[int, int]], max_tokens: int, needs_handoff: bool, fits: bool
) -> None:
    house = House(num_pages=9, arena_bytes=4 * ROW_BYTES)
    sequence = house.submit(prompt, max_tokens=max_tokens, needs_handoff=needs_handoff)
    if fits:
        assert heard(sequence).story == []
        house.turn()
        assert heard(sequence).story[0] == "admitted"
    else:
        assert isinstance(heard(sequence).error, RequestTooLarge)
        assert house.is_clean


def test_pictures_that_only_their_alignment_keeps_out_of_an_empty_arena_fail_at_once() -> None:
    """Slots begin at multiples of 64 bytes: three of 96 take 128 each, and 288 bytes are not enough."""
    house = House(arena_bytes=288, row_bytes=96)
    large = house.submit([(1, 1), (2, 1), (3, 1)])
    small = house.submit([(1, 1), (2, 1)])
    house.turn()
    assert isinstance(heard(large).error, RequestTooLarge), "it would wait for ever, and in the end all behind it too"
    assert heard(small).story[0] == "admitted"


def test_a_full_queue_refuses_at_once() -> None:
    house = House(max_waiting=2)
    sequences = [house.submit([1, 2]) for _ in range(3)]
    assert isinstance(heard(sequences[2]).error, NoRoom)
    house.finish(*sequences[:2])
    assert house.is_clean


def test_an_attempt_submitted_twice_leaves_the_first_unharmed() -> None:
    house = House()
    first = house.submit([1, 2, 3])
    twin = house.new([1, 2, 3])
    twin.ref = first.ref
    house.turn()
    house.engine.submit(twin)
    assert isinstance(heard(twin).error, StaleAttempt)
    house.finish(first)
    assert heard(first).ids == answer_of(first)
    assert house.is_clean
