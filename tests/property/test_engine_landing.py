"""Landing slots and what has landed in them, against a model that knows of each byte range whose it is."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from tests.property.promises import assert_machine_catches, steps
from triptych.core.errors import StaleAttempt, TransferRefused
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.plan import Grid
from triptych.engine.landed_cache import Content, Landed, LandedCache
from triptych.engine.landing import LandingTable, SlotState, Wanted
from triptych.transport.slots import Slot, SlotAllocator

UNIT = 64
CAPACITY, CACHE = 6 * UNIT, 2 * UNIT
WRITERS = (WorkerRef("encoder-0", 1), WorkerRef("encoder-1", 2))

Key = tuple[AttemptRef, int]


@dataclass(eq=False)
class Written:
    """One slot's life. `rows` is set when it has landed; `writer` while somebody may write."""

    content: Content
    slot: Slot
    writer: WorkerRef | None = None
    rows: torch.Tensor | None = None


@dataclass(eq=False)
class Attempt:
    ref: AttemptRef
    items: dict[int, Written] = field(default_factory=dict)
    is_over: bool = False


class LandingMachine(RuleBasedStateMachine):
    part: type[LandingTable] = LandingTable
    cache: type[LandedCache] = LandedCache
    attempts: Bundle[Attempt] = Bundle("attempts")

    def __init__(self) -> None:
        super().__init__()
        self.book = SlotAllocator(CAPACITY, UNIT)
        self.table = self.part(self.book, CACHE)
        self.table._cache = self.cache(CACHE)
        self.living: list[Attempt] = []
        self.quarantined: dict[Key, Written] = {}
        self.idle: list[Written] = []  # the one used longest ago first
        self.named: dict[bytes, Written] = {}  # what an identity finds
        self.serial = 0

    # --- what happens ---

    @rule(
        target=attempts,
        wants=st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.integers(1, 2)), max_size=3),
    )
    def reserve(self, wants: list[tuple[bytes, int]]) -> object:
        self.serial += 1
        attempt = Attempt(AttemptRef(f"req-{self.serial}"))
        contents = {index: Content(name * 32, size, Grid(1, 1, size)) for index, (name, size) in enumerate(wants)}
        found = {i: self.named[c.identity] for i, c in contents.items() if self.is_named(c)}
        needed = sum(c.num_tokens for i, c in contents.items() if i not in found) * UNIT
        room = self.book.free_bytes + sum(self.size(each) for each in self.idle if each not in found.values())
        wanted = {i: Wanted(content, content.num_tokens * UNIT) for i, content in contents.items()}
        is_granted = self.table.try_reserve(attempt.ref, wanted)
        assert needed <= room or not is_granted
        assert is_granted or needed > room or len(self.book._lengths) > 1, "it would have fitted"
        if not is_granted or any((attempt.ref, index) in self.table._living for index in found):
            # What was found was given back; where it lay in the way of the rest, it went as well.
            self.idle = [each for each in self.idle if each not in found.values()] + self.unheld(found)
            found = {}
        self.forget_evicted(set(map(id, found.values())))
        if not is_granted:
            return multiple()
        for index, content in contents.items():
            if index in found:
                attempt.items[index] = found[index]
                self.idle = [each for each in self.idle if each is not found[index]]
                assert self.table.rows(attempt.ref, index) is found[index].rows
            else:
                slot = self.table._living[attempt.ref, index].slot
                attempt.items[index] = Written(content, slot)
                assert self.table.rows(attempt.ref, index) is None
        self.living.append(attempt)
        return attempt

    @rule(attempt=attempts, index=st.integers(0, 2), writer=st.sampled_from(WRITERS))
    def hand(self, attempt: Attempt, index: int, writer: WorkerRef) -> None:
        item = self.item(attempt, index)
        if item is None or item.writer is not None or item.rows is not None:
            with pytest.raises((StaleAttempt, TransferRefused)):
                self.table.hand(attempt.ref, index, writer)
            return
        assert self.table.hand(attempt.ref, index, writer) == item.slot
        item.writer = writer

    @rule(attempt=attempts, index=st.integers(0, 2), writer=st.sampled_from(WRITERS))
    def commit(self, attempt: Attempt, index: int, writer: WorkerRef) -> None:
        item = self.item(attempt, index)
        slot = item.slot if item is not None else Slot(1, 0, UNIT, 1, bytes(16))
        shown = (attempt.ref, index, writer, slot.slot_id, slot.generation, slot.capability)
        if item is None or item.rows is not None or item.writer != writer:
            with pytest.raises((StaleAttempt, TransferRefused)):
                self.table.check(*shown)
            late = self.quarantined.get((attempt.ref, index))
            named = late or item
            self.table.writer_done_with(writer, 0 if named is None else named.slot.slot_id)
            if late is not None and late.writer == writer:
                del self.quarantined[attempt.ref, index]
            return
        assert self.table.check(*shown) == item.slot
        item.rows, item.writer = torch.zeros(1), None
        served = {(attempt.ref, index)}
        for other in self.living:
            for place, waiting in list(other.items.items()):
                if waiting.content == item.content and waiting.rows is None and waiting.writer is None:
                    other.items[place] = item
                    served.add((other.ref, place))
        assert set(self.table.landed(attempt.ref, index, item.rows)) == served
        former = self.named.get(item.content.identity)
        if former is None or former.content != item.content:
            self.named[item.content.identity] = item
            self.idle = [each for each in self.idle if each is not former]

    @rule(attempt=attempts, index=st.integers(0, 2))
    def arrive(self, attempt: Attempt, index: int) -> None:
        """From request to commit, as it mostly goes."""
        self.hand(attempt, index, WRITERS[0])
        self.commit(attempt, index, WRITERS[0])

    @rule(attempt=attempts, index=st.integers(0, 2), is_ended=st.booleans())
    def come_too_late_or_give_up(self, attempt: Attempt, index: int, is_ended: bool) -> None:
        self.hand(attempt, index, WRITERS[0])
        if is_ended:
            self.stop_waiting(attempt)
            self.commit(attempt, index, WRITERS[0])
        else:
            self.writer_finished(WRITERS[0], attempt, False)

    @rule(name=st.sampled_from([b"a", b"b", b"c"]), size=st.integers(1, 2))
    def live(self, name: bytes, size: int) -> None:
        """A whole life: what landed is cached afterwards."""
        attempt = self.reserve([(name, size)])
        if isinstance(attempt, Attempt):
            self.arrive(attempt, 0)
            self.abandon(attempt)

    @rule(attempt=attempts, index=st.integers(0, 2))
    def consume(self, attempt: Attempt, index: int) -> None:
        item = self.item(attempt, index)
        if item is not None and item.rows is not None:
            self.table.consumed(attempt.ref, index)
            del attempt.items[index]
            self.let_go(item)

    @rule(attempt=attempts)
    def stop_waiting(self, attempt: Attempt) -> None:
        if attempt in self.living:
            self.table.stop_waiting(attempt.ref)
            self.give_up(attempt)

    @rule(attempt=attempts)
    def abandon(self, attempt: Attempt) -> None:
        if attempt not in self.living:
            return
        order = [index for ref, index in self.table._leased if ref == attempt.ref]
        self.table.abandon(attempt.ref)
        self.give_up(attempt)
        assert sorted(order) == sorted(attempt.items)
        for index in order:
            self.let_go(attempt.items.pop(index))
        self.living.remove(attempt)

    @rule(writer=st.sampled_from(WRITERS), attempt=attempts, is_lost=st.booleans())
    def writer_finished(self, writer: WorkerRef, attempt: Attempt, is_lost: bool) -> None:
        refs = None if is_lost else attempt.ref
        owed = [
            (each.ref, index)
            for each in self.living
            for index, item in each.items.items()
            if item.writer == writer and refs in (None, each.ref)
        ]
        assert set(self.table.writer_finished(writer, refs)) == set(owed)
        for each in self.living:
            for index, item in each.items.items():
                if (each.ref, index) in owed:
                    item.writer = None
        self.quarantined = {
            key: item for key, item in self.quarantined.items() if item.writer != writer or refs not in (None, key[0])
        }

    @rule()
    def clear_cache(self) -> None:
        self.table.clear_cache()
        for each in self.idle:
            del self.named[each.content.identity]
        self.idle.clear()

    # --- the model ---

    def item(self, attempt: Attempt, index: int) -> Written | None:
        return attempt.items.get(index) if attempt in self.living else None

    def is_named(self, content: Content) -> bool:
        named = self.named.get(content.identity)
        return named is not None and named.content == content

    def size(self, item: Written) -> int:
        return item.content.num_tokens * UNIT

    def is_held(self, item: Written) -> bool:
        return any(item is held for attempt in self.living for held in attempt.items.values())

    def unheld(self, found: dict[int, Written]) -> list[Written]:
        """In the order in which a refused reservation gives them back."""
        once = list({id(each): each for each in reversed(found.values())}.values())[::-1]
        return [each for each in once if not self.is_held(each)]

    def let_go(self, item: Written) -> None:
        if self.is_held(item):
            return
        if self.named.get(item.content.identity) is item:
            while sum(map(self.size, self.idle)) + self.size(item) > CACHE:
                del self.named[self.idle.pop(0).content.identity]
            self.idle.append(item)

    def give_up(self, attempt: Attempt) -> None:
        for index, item in list(attempt.items.items()):
            if item.rows is None:
                del attempt.items[index]
                if item.writer is not None:
                    self.quarantined[attempt.ref, index] = item

    def forget_evicted(self, kept: set[int]) -> None:
        """Those that made room: the ones used longest ago, and none that was wanted."""
        there = {entry.slot.slot_id for entry in self.table._cache._idle.values()}
        candidates = [each for each in self.idle if id(each) not in kept]
        gone = [each for each in candidates if each.slot.slot_id not in there]
        assert gone == candidates[: len(gone)], "one that was used later went first"
        for each in gone:
            self.idle.remove(each)
            del self.named[each.content.identity]

    # --- what always holds ---

    @invariant()
    def every_byte_is_in_one_hand(self) -> None:
        self.table.check_integrity()
        held = {id(item): item for attempt in self.living for item in attempt.items.values()}
        everywhere = [*held.values(), *self.quarantined.values(), *self.idle]
        spans = sorted((each.slot.offset, each.slot.offset + self.size(each)) for each in everywhere)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), "bytes in two hands"
        assert self.table.counts_bytes() == {
            "free": CAPACITY - sum(map(self.size, everywhere)),
            "owned": sum(map(self.size, held.values())),
            "cached": sum(map(self.size, self.idle)),
            "quarantined": sum(map(self.size, self.quarantined.values())),
        }

    @invariant()
    def the_cache_is_bounded_and_in_order(self) -> None:
        assert self.table._cache.idle_bytes <= CACHE
        idle = [entry.slot.slot_id for entry in self.table._cache._idle.values()]
        assert idle == [each.slot.slot_id for each in self.idle]

    @invariant()
    def whoever_waits_has_a_slot_of_its_own(self) -> None:
        for attempt in self.living:
            for index, item in attempt.items.items():
                rows = self.table.rows(attempt.ref, index)
                assert rows is item.rows
                assert (rows is None) == ((attempt.ref, index) in self.table._living)

    def teardown(self) -> None:
        for attempt in list(self.living):
            self.table.abandon(attempt.ref)
        for writer in WRITERS:
            self.table.writer_finished(writer, None)
        self.table.clear_cache()
        assert self.book.free_bytes == CAPACITY
        assert len(self.table) == 0


TestLanding = LandingMachine.TestCase
TestLanding.settings = steps(60)


class FreesWhatIsBeingWritten(LandingTable):
    def stop_waiting(self, ref: AttemptRef) -> None:
        for key, landing in self._living.items():
            if key[0] == ref:
                landing.state = SlotState.RESERVED
        super().stop_waiting(ref)


class ForgetsTheLanded(LandingTable):
    def abandon(self, ref: AttemptRef) -> None:
        self.stop_waiting(ref)


class ServesOneOnly(LandingTable):
    def landed(self, ref: AttemptRef, item_index: int, rows: torch.Tensor) -> list[tuple[AttemptRef, int]]:
        others = {key: landing for key, landing in self._living.items() if key != (ref, item_index)}
        self._living = {(ref, item_index): self._living[ref, item_index]}
        try:
            return super().landed(ref, item_index, rows)
        finally:
            self._living |= others


class NeverEndsQuarantine(LandingTable):
    def writer_done_with(self, writer: WorkerRef, slot_id: int) -> None:
        return


class KeepsWriters(LandingTable):
    def writer_finished(self, writer: WorkerRef, ref: AttemptRef | None) -> list[tuple[AttemptRef, int]]:
        return []


class ByIdentityAlone(LandedCache):
    def find(self, content: Content) -> Landed | None:
        return self._by_identity.get(content.identity)


class EvictsTheLeased(LandedCache):
    def lease(self, entry: Landed) -> None:
        entry.num_leases += 1


class Unbounded(LandedCache):
    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(2 * capacity_bytes)


class FreesAtTheFirstGoing(LandedCache):
    def give_back(self, entry: Landed) -> list[Landed]:
        entry.num_leases = 1
        return super().give_back(entry)


@pytest.mark.parametrize(
    "broken", [FreesWhatIsBeingWritten, ForgetsTheLanded, ServesOneOnly, NeverEndsQuarantine, KeepsWriters]
)
def test_a_broken_table_is_caught(broken: type[LandingTable]) -> None:
    assert_machine_catches(type("Broken", (LandingMachine,), {"part": broken}))


@pytest.mark.parametrize("broken", [ByIdentityAlone, EvictsTheLeased, Unbounded, FreesAtTheFirstGoing])
def test_a_broken_cache_of_the_landed_is_caught(broken: type[LandedCache]) -> None:
    assert_machine_catches(type("Broken", (LandingMachine,), {"cache": broken}))
