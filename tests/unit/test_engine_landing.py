"""Landing slots: who may write, and when bytes may be used again."""

from __future__ import annotations

import hashlib
import itertools
import random

import pytest
import torch

from triptych.core.errors import StaleAttempt, TransferRefused
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.plan import Grid
from triptych.engine.landed_cache import Content
from triptych.engine.landing import LandingTable, Wanted
from triptych.transport.slots import Slot, SlotAllocator

REF, OTHER_REF = AttemptRef("req-1"), AttemptRef("req-2")
WRITER, OTHER = WorkerRef("encoder-0", 1), WorkerRef("encoder-1", 2)
REBORN = WorkerRef("encoder-0", 99)


ROWS = torch.zeros(1, 1)


def picture(name: str, num_tokens: int = 1) -> Content:
    return Content(hashlib.sha256(name.encode()).digest(), num_tokens, Grid(1, 1, num_tokens))


class Arena:
    def __init__(self, capacity: int = 1024) -> None:
        self.book = SlotAllocator(capacity)
        self.table = LandingTable(self.book)

    def reserve(self, ref: AttemptRef, sizes: dict[int, int]) -> bool:
        """A picture of its own for each item."""
        return self.table.try_reserve(ref, {i: Wanted(picture(f"{ref}/{i}"), size) for i, size in sizes.items()})

    @property
    def is_empty(self) -> bool:
        return len(self.table) == 0 and self.book.free_bytes == self.book.capacity_bytes

    def handed(self, ref: AttemptRef = REF, index: int = 0, writer: WorkerRef = WRITER) -> Slot:
        if (ref, index) not in self.table._living:
            assert self.reserve(ref, {index: 64})
        return self.table.hand(ref, index, writer)

    def check(self, slot: Slot, ref: AttemptRef = REF, index: int = 0, writer: WorkerRef = WRITER) -> Slot:
        return self.table.check(ref, index, writer, slot.slot_id, slot.generation, slot.capability)


def test_a_reservation_is_for_all_items_or_none() -> None:
    arena = Arena(256)
    assert not arena.reserve(REF, {0: 64, 1: 128, 2: 128})
    assert arena.is_empty
    assert arena.reserve(REF, {0: 64, 2: 128})
    assert len(arena.table) == 2


def test_an_ended_attempt_waits_for_its_writers_at_once_and_keeps_what_has_landed() -> None:
    """A step under way may outlast both the attempt and its writer: the slot must not wait for the writer for ever."""
    arena = Arena()
    arena.check(arena.handed(REF, 0))
    arena.table.landed(REF, 0, ROWS)
    slot = arena.handed(REF, 1)
    arena.table.stop_waiting(REF)
    assert (arena.book.owned_bytes, arena.book.quarantined_bytes) == (64, 64)
    arena.table.writer_done_with(WRITER, slot.slot_id)
    arena.table.abandon(REF)
    assert arena.is_empty


def test_no_items_need_no_room() -> None:
    arena = Arena(64)
    arena.handed()
    assert arena.reserve(OTHER_REF, {})


def test_a_slot_lives_from_reservation_to_consumption() -> None:
    arena = Arena()
    slot = arena.handed()
    assert arena.check(slot) == slot
    arena.table.landed(REF, 0, ROWS)
    assert arena.book.owned_bytes == 64
    arena.table.consumed(REF, 0)
    assert arena.is_empty


def test_an_item_is_handed_to_one_encoder_only() -> None:
    arena = Arena()
    arena.handed()
    for writer in (WRITER, OTHER):
        with pytest.raises(TransferRefused):
            arena.table.hand(REF, 0, writer)
    arena.table.landed(REF, 0, ROWS)
    with pytest.raises(TransferRefused):
        arena.table.hand(REF, 0, OTHER)


@pytest.mark.parametrize(("ref", "index"), [(REF, 1), (OTHER_REF, 0), (AttemptRef("req-1", 0, 1), 0)])
def test_there_is_no_slot_for_another_item_or_attempt(ref: AttemptRef, index: int) -> None:
    arena = Arena()
    slot = arena.handed()
    with pytest.raises(StaleAttempt):
        arena.table.hand(ref, index, WRITER)
    with pytest.raises(StaleAttempt):
        arena.check(slot, ref, index)


def test_a_commit_must_show_everything_and_a_refused_one_changes_nothing() -> None:
    arena = Arena()
    slot = arena.handed()
    wrong = [
        (WRITER, slot.slot_id + 1, slot.generation, slot.capability),
        (WRITER, slot.slot_id, slot.generation + 1, slot.capability),
        (WRITER, slot.slot_id, slot.generation, bytes(16)),
        (WRITER, slot.slot_id, slot.generation, slot.capability[:8]),
        (OTHER, slot.slot_id, slot.generation, slot.capability),
        (REBORN, slot.slot_id, slot.generation, slot.capability),
    ]
    for arguments in wrong:
        with pytest.raises(TransferRefused):
            arena.table.check(REF, 0, *arguments)
    assert arena.check(slot) == slot


def test_a_commit_before_the_slot_was_handed_or_after_it_landed_is_refused() -> None:
    arena = Arena()
    arena.reserve(REF, {0: 64})
    slot = arena.table._living[REF, 0].slot
    with pytest.raises(TransferRefused):
        arena.check(slot)
    arena.handed()
    arena.table.landed(REF, 0, ROWS)
    with pytest.raises(TransferRefused):
        arena.check(slot)


def test_an_abandoned_slot_nobody_writes_to_is_free_at_once() -> None:
    arena = Arena()
    arena.reserve(REF, {0: 64, 1: 64})
    arena.handed(REF, 1)
    arena.table.landed(REF, 1, ROWS)
    arena.table.abandon(REF)
    assert arena.is_empty


def test_an_abandoned_slot_that_an_encoder_may_write_to_is_quarantined() -> None:
    arena = Arena()
    slot = arena.handed()
    arena.table.abandon(REF)
    arena.table.abandon(REF)
    assert arena.book.quarantined_bytes == 64
    with pytest.raises(StaleAttempt):
        arena.check(slot)
    with pytest.raises(StaleAttempt):
        arena.table.hand(REF, 0, OTHER)


@pytest.mark.parametrize("ref", [REF, None])
def test_quarantine_ends_when_the_writer_has_finished_or_is_lost(ref: AttemptRef | None) -> None:
    arena = Arena()
    arena.handed()
    arena.table.abandon(REF)
    assert arena.table.writer_finished(OTHER, ref) == []
    assert arena.table.writer_finished(REBORN, ref) == []
    assert arena.table.writer_finished(WRITER, OTHER_REF) == []
    assert arena.book.quarantined_bytes == 64
    assert arena.table.writer_finished(WRITER, ref) == []
    assert arena.is_empty


def test_a_commit_after_the_end_frees_exactly_its_own_slot() -> None:
    arena = Arena()
    arena.reserve(REF, {0: 64, 1: 64})
    slots = [arena.handed(REF, index) for index in (0, 1)]
    arena.table.abandon(REF)
    arena.table.writer_done_with(OTHER, slots[0].slot_id)
    arena.table.writer_done_with(WRITER, slots[1].slot_id + 1)
    assert arena.book.quarantined_bytes == 128
    arena.table.writer_done_with(WRITER, slots[0].slot_id)
    arena.table.writer_done_with(WRITER, slots[0].slot_id)
    assert arena.book.quarantined_bytes == 64
    assert len(arena.table) == 1


def test_an_attempt_that_is_used_again_leaves_no_slot_behind() -> None:
    """Each slot that an encoder may still write to is waited for, also beside another of its attempt and item."""
    arena = Arena()
    slots = []
    for _ in range(2):
        slots.append(arena.handed(REF, 0))
        arena.table.abandon(REF)
        arena.table.check_integrity()
    assert arena.book.quarantined_bytes == 128
    arena.table.writer_done_with(WRITER, slots[0].slot_id)
    assert arena.book.quarantined_bytes == 64, "the late commit of one says nothing of the other"
    assert arena.table.writer_finished(WRITER, REF) == []
    assert arena.is_empty


def test_a_refused_commit_of_a_living_slot_frees_nothing() -> None:
    arena = Arena()
    slot = arena.handed()
    arena.table.writer_done_with(WRITER, slot.slot_id)
    assert arena.check(slot) == slot


def test_what_a_lost_encoder_owed_is_named_and_may_be_handed_out_again() -> None:
    arena = Arena(4096)
    for index in range(3):
        arena.handed(REF, index)
    arena.table.landed(REF, 1, ROWS)
    arena.handed(OTHER_REF, 0, OTHER)
    arena.handed(AttemptRef("req-3"), 5)
    assert set(arena.table.writer_finished(WRITER, None)) == {(REF, 0), (REF, 2), (AttemptRef("req-3"), 5)}
    slot = arena.table.hand(REF, 0, OTHER)
    assert arena.check(slot, writer=OTHER) == slot
    with pytest.raises(TransferRefused):
        arena.check(slot, writer=WRITER)


def test_a_late_commit_of_the_one_who_gave_up_does_not_pass_for_the_new_writers() -> None:
    arena = Arena()
    slot = arena.handed()
    arena.table.writer_finished(WRITER, REF)
    with pytest.raises(TransferRefused):
        arena.check(slot)
    arena.handed(writer=OTHER)
    with pytest.raises(TransferRefused):
        arena.check(slot, writer=WRITER)


def test_bytes_are_in_one_hand_whatever_happens(seed: int) -> None:
    """A random life of many attempts: nothing leaks, nothing overlaps, all is free in the end."""
    rng = random.Random(seed)
    arena = Arena(2048)
    alive: dict[AttemptRef, int] = {}
    writers = (WRITER, OTHER)
    for turn in range(3_000):
        ref = rng.choice([*alive, AttemptRef(f"req-{turn}")])
        index = rng.randrange(max(alive.get(ref, 1), 1))
        try:
            match rng.randrange(7):
                case 0 if ref not in alive:
                    count = rng.randint(1, 4)
                    if arena.reserve(ref, {i: rng.randint(1, 200) for i in range(count)}):
                        alive[ref] = count
                case 1 | 2:
                    arena.table.hand(ref, index, rng.choice(writers))
                case 3:
                    landing = arena.table._find(ref, index)
                    arena.check(landing.slot, ref, index, rng.choice(writers))
                    arena.table.landed(ref, index, ROWS)
                case 4:
                    arena.table.writer_finished(rng.choice(writers), rng.choice([ref, None]))
                case 5 if rng.random() < 0.3:
                    arena.table.abandon(ref)
                    alive.pop(ref, None)
                case 6:
                    arena.table.writer_done_with(rng.choice(writers), rng.choice([*arena.table._quarantined, 0]))
        except (StaleAttempt, TransferRefused):
            pass
        total = arena.book.free_bytes + arena.book.owned_bytes + arena.book.quarantined_bytes
        assert total == arena.book.capacity_bytes
        arena.table.check_integrity()
        spans = sorted(
            (held.slot.offset, held.slot.offset + held.slot.num_bytes)
            for held in [
                *arena.table._living.values(),
                *arena.table._leased.values(),
                *arena.table._quarantined.values(),
            ]
        )
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for ref in list(alive):
        arena.table.abandon(ref)
    for writer in writers:
        arena.table.writer_finished(writer, None)
    assert arena.is_empty
