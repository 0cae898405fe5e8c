"""Few requests on little room, in all orders of what may come from outside: nobody waits for ever, nobody is passed too
often, nothing is lost; and broken parts are seen.

`TRIPTYCH_VERIFY=full` explores every pair; else two pairs of each kind, other ones with each seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from tests.property.reservation_explorer import breaks, explore
from tests.property.reservation_scenario import PAGE, Parts, Scenario, Shape
from tests.seed import IS_FULL, rotating
from triptych.core.ids import AttemptRef
from triptych.engine.landing import LandingTable, SlotState, Wanted
from triptych.engine.residency import Residency
from triptych.engine.sequence import Sequence as EngineSequence
from triptych.kv.grants import GrantState, GrantTable
from triptych.kv.manager import CacheManager, SequencePages
from triptych.sched.admission import AdmissionQueue
from triptych.sched.aging import Aging
from triptych.sched.language import PROMPT_AGING


def scenario(prompts: str, *room: int, max_disturbances: int | None = None) -> Scenario:
    return Scenario(tuple(map(Shape, prompts.split())), *room, max_disturbances=max_disturbances)


def pages_of(prompt: str) -> int:
    return -(-sum(1 if letter.isdigit() else PAGE * (1 + letter.isupper()) for letter in prompt) // PAGE)


def units_of(prompt: str) -> int:
    return sum(letter.isalpha() + letter.isupper() for letter in prompt)


def pairs(menu: Sequence[str]) -> Iterator[Scenario]:
    """All pairs, with room for the larger one alone, and for all but one page or unit of both."""
    for one, other in itertools.combinations_with_replacement(menu, 2):
        pages, units = (pages_of(one), pages_of(other)), (units_of(one), units_of(other))
        pools = sorted({max(pages), max(*pages, sum(pages) - 1)})
        arenas = sorted({max(*units, 1), max(*units, sum(units) - 1, 1)})
        for num_pages, num_units, num_kept in itertools.product(pools, arenas, (0, 1)):
            yield scenario(f"{one} {other}", num_pages, max(pages) + 1, num_units, num_kept)


def names(each: object) -> str:
    assert isinstance(each, Scenario)
    room = (each.prefill_pages, each.decode_pages, each.arena_units, each.cache_units)
    return "-".join([*(shape.prompt for shape in each.shapes), *map(str, room)])


PAIRS = [*rotating([*pairs(["1", "123", "a1", "b1", "A"])], 2), *rotating([*pairs(["1a2", "1A2", "12a"])], 1)]

SMALL = scenario("a1 b1", 3, 3, 1)
SHARED = scenario("a1 a1", 3, 4, 1, 1)
NEARLY_ALL = scenario("12345 123", 3, 4, 1)
EQUAL = scenario("1234 123", 2, 9, 1)
ROOM_FOR_ONE_PICTURE = scenario("a1 b1", 4, 4, 1)
TWO_PICTURES = scenario("ab c", 4, 9, 2)
PASSING = scenario("123 1 1 1", 2, 9, 1, max_disturbances=0)

ALWAYS = [SMALL, SHARED, NEARLY_ALL, EQUAL, ROOM_FOR_ONE_PICTURE, TWO_PICTURES]
THREE = [scenario("123 1 1", 2, 5, 1, max_disturbances=1), scenario("a1 a1 b1", 3, 4, 1, 1, max_disturbances=0)]
MORE = [
    scenario("ab1 ba1", 4, 6, 3, 2),
    scenario("123 1 1", 2, 5, 1),
    scenario("a a1 b", 3, 5, 1, max_disturbances=1),
    scenario("A a b", 3, 6, 2, 1, max_disturbances=1),
    scenario("a1 a1 b1", 4, 4, 2, 1, max_disturbances=1),
]


@pytest.mark.parametrize("each", [*ALWAYS, *PAIRS, *THREE, *(MORE if IS_FULL else ())], ids=names)
@pytest.mark.timeout(600)
def test_every_order_ends_and_loses_nothing(each: Scenario) -> None:
    report = explore(each)
    assert report.broken == {}
    assert report.num_states > 100 and report.num_rests > 1


def test_nobody_is_passed_beyond_the_bound() -> None:
    report = explore(PASSING)
    assert report.broken == {}
    assert report.most_passed == PASSING.max_bypass, "it was not tried"


def test_those_who_are_more_urgent_do_not_count() -> None:
    """The large one is passed by both, and none of it counts; in the end it gets in."""
    urgent = Scenario((Shape("123", 1), Shape("1"), Shape("1"), Shape("1")), 2, 9, 1, max_disturbances=0)
    report = explore(urgent)
    assert report.broken == {} and report.most_passed == 0


# --- broken parts -----------------------------------------------------------------------------------------------------


class HoldsAndWaits(Residency):
    """Keeps its pages while it waits for landing room."""

    def reserve(self, sequence: EngineSequence, spare_pages: int = 0) -> bool:
        if sequence.pages is None:
            sequence.pages = self._manager.reserve(b"", sequence.ids, self._tokens_to_hold(sequence), spare_pages)
        if sequence.pages is None:
            return False
        cached = sequence.pages.cached_tokens
        if not self._landing.try_reserve(sequence.ref, self._wanted(sequence, cached)):
            return False
        sequence.items = [self._pending(sequence, index, cached) for index in range(len(sequence.plan.items))]
        sequence.num_computed = sequence.num_launched = cached
        return True


class TakesTwoSteps(Residency):
    """Takes a page each time that it is asked, and keeps what it has until there are all."""

    def reserve(self, sequence: EngineSequence, spare_pages: int = 0) -> bool:
        manager, needed = self._manager, self._manager.pages_for(len(sequence.ids))
        if sequence.pages is None:
            sequence.pages = manager.reserve(b"", sequence.ids, 0)
        held = sequence.pages
        assert held is not None
        manager.extend(held, (len(held.pages) + 1) * manager.page_tokens)
        return len(held.pages) == needed


class ForgetsLandingSlots(Residency):
    def stop_waiting(self, sequence: EngineSequence) -> None:
        return

    def release(self, sequence: EngineSequence) -> None:
        if sequence.pages is not None:
            self._manager.release(sequence.pages)


class KeepsPages(Residency):
    def release(self, sequence: EngineSequence) -> None:
        self._landing.abandon(sequence.ref)


class KeepsTheCredit(GrantTable):
    def release(self, grant_id: str) -> None:
        record = self._records.get(grant_id)
        if record is None or record.state is not GrantState.CREDITED:
            return super().release(grant_id)
        del self._records[grant_id]


class FreesWhatIsWritten(GrantTable):
    def release(self, grant_id: str) -> None:
        record = self._records.get(grant_id)
        if record is not None and record.state is GrantState.BOUND:
            self._manager.free_leased(self._records.pop(grant_id).pages)
            return
        super().release(grant_id)


class NeverFreesQuarantine(GrantTable):
    def _end_writing(self, record: object) -> None:
        return


class FreesSlotsBeingWritten(LandingTable):
    def stop_waiting(self, ref: AttemptRef) -> None:
        for key, landing in self._living.items():
            if key[0] == ref:
                landing.state = SlotState.RESERVED
        super().stop_waiting(ref)


class TakesSlotsOneByOne(LandingTable):
    """Keeps those it has when there is none for the next."""

    def try_reserve(self, ref: AttemptRef, wanted: Mapping[int, Wanted]) -> bool:
        missing = {index: want for index, want in wanted.items() if (ref, index) not in self._living}
        return all(super(TakesSlotsOneByOne, self).try_reserve(ref, {index: want}) for index, want in missing.items())


class PassedWithoutBound(AdmissionQueue[int]):
    def __init__(
        self, max_bypass: int = 16, max_wait_s: float = 10.0, max_refusals: int = 32, aging: Aging = PROMPT_AGING
    ) -> None:
        super().__init__(1000, max_wait_s, max_refusals, aging)


class ForgetsTheRefused(AdmissionQueue[int]):
    def admit(self, reserve: Callable[[int], bool], max_admissions: int, now_ns: int) -> list[int]:
        admitted = super().admit(reserve, max_admissions, now_ns)
        self._waiting = self._waiting[:1]
        return admitted


class TakesAPageTooMany(CacheManager):
    def reserve(self, root: bytes, ids: Sequence[int], num_tokens: int, spare_pages: int = 0) -> SequencePages | None:
        pages = super().reserve(root, ids, num_tokens, spare_pages)
        if pages is not None and self.num_available:
            self._num_owned += 1
            self._allocator.allocate(1)
        return pages


ENDS, HOLDS_NOTHING = "everybody ends", "who waits holds nothing"
LEFT, ALONE = "who has left prefill holds nothing there", "nobody gets what somebody still writes to"
IN_ONE_HAND = "each page is in the hands of one"
PASSED = "nobody is passed more often than the bound"


@pytest.mark.parametrize(
    ("parts", "where", "promises"),
    [
        (Parts(residency=HoldsAndWaits), ROOM_FOR_ONE_PICTURE, {HOLDS_NOTHING}),
        (Parts(residency=TakesTwoSteps), EQUAL, {HOLDS_NOTHING, ENDS}),
        (Parts(residency=ForgetsLandingSlots), SMALL, {LEFT, ENDS}),
        (Parts(residency=KeepsPages), SMALL, {ENDS}),
        (Parts(grants=KeepsTheCredit), SMALL, {ENDS}),
        (Parts(grants=FreesWhatIsWritten), SMALL, {ALONE}),
        (Parts(grants=NeverFreesQuarantine), SMALL, {ENDS}),
        (Parts(landing=FreesSlotsBeingWritten), SMALL, {ALONE}),
        (Parts(landing=TakesSlotsOneByOne), TWO_PICTURES, {HOLDS_NOTHING}),
        (Parts(queue=PassedWithoutBound), PASSING, {PASSED}),
        (Parts(queue=ForgetsTheRefused), PASSING, {ENDS}),
        (Parts(manager=TakesAPageTooMany), SMALL, {IN_ONE_HAND}),
    ],
)
def test_a_broken_part_is_seen(parts: Parts, where: Scenario, promises: set[str]) -> None:
    assert breaks(where, parts, promises)
