"""Answers that lose their pages to others: they come back and go on as if nothing had been, and nobody is starved."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from tests.unit.engine_house import PAGE, House, answer_of, heard
from tests.unit.test_engine_lookahead import Yard
from triptych.core.errors import Aborted, NoRoom
from triptych.core.lifecycle import Phase
from triptych.core.plan import MAX_RETRACTIONS
from triptych.engine import loop
from triptych.engine.loop import LanguageEngine
from triptych.engine.parking import Parking
from triptych.engine.residency import Residency
from triptych.engine.sequence import Sequence
from triptych.sched.admission import Ticket
from triptych.sched.retraction import HEADROOM_PAGES, Standing, most_junior, tokens_to_hold

PROMPTS: list[list[int | tuple[int, int]]] = [[1, 2, 3, 4, 5, 6, 7], [1, 2, (1, 6), 3, (2, 5), 4, 5]]
HOUSES = [House, Yard]
WAYS = ["retract", "retract_for_replay"]


def retracted_once(house: House, prompt: list[int | tuple[int, int]], after: int, churn: bool) -> Sequence:
    """An answer of 12 tokens that is retracted when `after` of them are there. With `churn` others use the pages that
    it gave up before it comes back."""
    sequence = house.submit(prompt, max_tokens=12)
    for index in range(len(sequence.plan.items)):
        house.turn()
        house.land(sequence, index)
    house.turn_until(lambda: sequence.phase is Phase.DECODING and sequence.num_sampled >= after)
    if sequence.phase is not Phase.DECODING:
        return sequence
    assert house.engine.retract(sequence.ref)
    house.turn()
    if churn:
        scribble(house)
    house.finish(sequence)
    house.turn()
    return sequence


def scribble(house: House) -> None:
    """Whatever nobody holds is overwritten."""
    house.manager.clear_cache()
    free = house.manager._allocator._is_free
    for page, offset in list(house.runner.cells):
        if free[page]:
            house.runner.cells[page, offset] = -1.0


@pytest.mark.parametrize("churn", [False, True])
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("kind", HOUSES)
def test_an_answer_retracted_at_any_step_goes_on_the_same(
    kind: type[House], prompt: list[int | tuple[int, int]], churn: bool
) -> None:
    for after in range(1, 12):
        house = kind(host_pages=20)
        sequence = retracted_once(house, prompt, after, churn)
        assert heard(sequence).ids == answer_of(sequence), after
        assert sequence.num_parked == 1 or after >= 11
        assert house.is_clean


@pytest.mark.parametrize("kind", HOUSES)
def test_an_answer_retracted_after_every_token_goes_on_the_same(kind: type[House]) -> None:
    house = kind(host_pages=20)
    sequence = house.submit([1, 2, 3, 4, 5, 6, 7], max_tokens=20)
    while not heard(sequence).ended.is_set():
        house.engine.retract(sequence.ref)
        house.turn()
    assert heard(sequence).ids == answer_of(sequence)
    assert sequence.num_parked > 8
    house.turn()
    assert house.is_clean


@pytest.mark.parametrize("kind", HOUSES)
def test_generated_tokens_keep_their_positions(kind: type[House]) -> None:
    """Of a prompt with pictures they are not their indices."""
    house = kind(host_pages=20)
    house.position_delta = -7
    sequence = retracted_once(house, PROMPTS[1], 5, churn=True)
    pieces = [piece for step in house.runner.steps for piece in step if piece.start >= sequence.num_prompt]
    assert len({piece.start for piece in pieces}) == 11
    for piece in pieces:
        assert piece.positions.tolist() == [[piece.start - 7]] * 3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", HOUSES)
def test_without_host_memory_the_router_hears_that_it_must_replay(kind: type[House], way: str) -> None:
    house = kind(host_pages=0 if way == "retract" else 20)
    sequence = house.submit([1, 2, 3, 4, 5, 6, 7], max_tokens=12)
    house.turn_until(lambda: sequence.num_sampled >= 4)
    assert getattr(house.engine, way)(sequence.ref)
    house.turn()
    told = heard(sequence)
    assert told.story[-1] == "retracted"
    assert told.ids == answer_of(sequence)[: len(told.ids)] and len(told.ids) >= 4
    house.turn()
    assert house.is_clean
    assert house.manager.counts()["cached"] == sequence.num_computed // PAGE, "the replay finds what is whole"


def test_only_who_decodes_can_be_retracted() -> None:
    house = House(host_pages=20)
    sequence = house.submit([1, 2, (1, 5), 3])
    assert not house.engine.retract(sequence.ref)
    house.turn()
    assert not house.engine.retract(sequence.ref)
    house.land(sequence, 0)
    house.finish(sequence)
    assert not house.engine.retract(sequence.ref)
    assert heard(sequence).ids == answer_of(sequence)


def test_one_that_ends_before_its_turn_is_not_retracted() -> None:
    house = House(host_pages=20)
    sequence = house.submit([1, 2, 3], max_tokens=4)
    house.turn_until(lambda: sequence.num_sampled == 2)
    assert house.engine.retract(sequence.ref)
    house.engine.abort(sequence.ref, Aborted("enough"))
    house.turn()
    assert house.is_clean and sequence.num_parked == 0


@pytest.mark.parametrize("kind", HOUSES)
def test_an_abort_while_retracted_frees_the_host_memory(kind: type[House]) -> None:
    house = kind(host_pages=20, num_pages=16)
    sequence = house.submit([1, 2, 3, 4, 5, 6, 7], max_tokens=12)
    house.turn_until(lambda: sequence.num_sampled >= 4)
    house.engine.retract(sequence.ref)
    house.turn()
    assert sequence.phase is Phase.RETRACTED and house.engine.host_pool_bytes > 0
    house.engine.abort(sequence.ref, Aborted("enough"))
    assert isinstance(heard(sequence).error, Aborted)
    house.turn()
    assert house.is_clean


# --- pressure ---------------------------------------------------------------------------------------------------------


def crowd(house: House, seed: int, count: int = 12) -> list[Sequence]:
    """Prompts and answers of all sizes, whose answers together are far larger than the pool."""
    dice = random.Random(seed)
    return [
        house.submit([number, *(dice.randrange(90) for _ in range(dice.randint(1, 20)))], dice.randint(20, 60))
        for number in range(count)
    ]


def survived(house: House, seed: int) -> list[Sequence]:
    """The crowd when all of it has been answered, and rightly."""
    most = house.engine.limits.host_pool_bytes
    sequences = crowd(house, seed)
    for _ in range(3000):
        if all(heard(each).ended.is_set() for each in sequences):
            break
        house.turn()
        assert house.engine.host_pool_bytes <= most
    for sequence in sequences:
        assert heard(sequence).reason is not None, "somebody was starved"
        assert heard(sequence).ids == answer_of(sequence)
        assert sequence.num_parked <= MAX_RETRACTIONS
    house.turn()
    assert house.is_clean
    return sequences


@pytest.mark.parametrize("kind", HOUSES)
def test_a_pool_far_too_small_answers_everybody_rightly(kind: type[House], seed: int) -> None:
    retractions = Counter[int]()
    for number in range(6):
        house = kind(num_pages=24, host_pages=200)
        retractions.update(sequence.num_parked for sequence in survived(house, seed + number))
    assert sum(count * many for count, many in retractions.items()) > 10, "there was no pressure"


def test_more_answers_run_at_once_than_if_each_had_its_longest_set_aside() -> None:
    house = House(num_pages=31, host_pages=100)
    sequences = [house.submit([number] * 7, max_tokens=50) for number in range(5)]
    house.turn(3)
    assert sum(sequence.phase is Phase.DECODING for sequence in sequences) >= 4, "15 pages each would let in two"
    house.finish(*sequences)
    assert all(heard(each).ids == answer_of(each) for each in sequences)


def test_the_most_junior_gives_way_and_comes_back_before_anybody_new() -> None:
    house = House(num_pages=22, host_pages=100)
    old, young = (house.submit([number] * 8, max_tokens=56) for number in (1, 2))
    house.turn_until(lambda: young.phase is Phase.RETRACTED)
    late = house.submit([3] * 4, max_tokens=4)
    with pytest.raises(NoRoom):
        house.engine.check_open()
    house.turn(5)
    assert late.phase is Phase.QUEUED, "there is room for it, but not before the retracted one"
    house.turn_until(lambda: young.phase is Phase.DECODING)
    assert heard(old).reason is not None
    house.finish(young, late)
    assert all(heard(each).ids == answer_of(each) for each in (old, young, late))
    house.engine.check_open()
    assert house.is_clean


def test_the_only_one_that_decodes_waits_for_those_that_do_not_yet() -> None:
    """Its page may be held by a prompt that still waits for a picture: that one goes on first, or ends."""
    house = House(num_pages=22, host_pages=100)
    talker = house.submit([1] * 8, max_tokens=70)
    house.turn(2)
    waiting = house.submit([2] * 8 + [(1, 20), 3], max_tokens=40)
    house.turn_until(lambda: talker.num_launched == len(talker.pages.pages) * PAGE)  # type: ignore[union-attr]
    house.turn(3)
    assert talker.phase is Phase.DECODING and not heard(talker).ended.is_set()
    house.land(waiting, 0)
    house.finish(talker, waiting)
    assert all(heard(each).ids == answer_of(each) for each in (talker, waiting))
    assert talker.num_parked == 0 and waiting.num_parked > 0
    assert house.is_clean


def test_what_the_host_cannot_hold_is_given_back_for_a_replay() -> None:
    house = House(num_pages=22, host_pages=3)
    sequences = [house.submit([number] * 8, max_tokens=56) for number in (1, 2)]
    house.turn_until(lambda: any(heard(each).ended.is_set() for each in sequences))
    assert heard(sequences[1]).story[-1] == "retracted"
    house.finish(sequences[0])
    assert heard(sequences[0]).ids == answer_of(sequences[0])
    assert house.is_clean


# --- replays ----------------------------------------------------------------------------------------------------------


def test_a_replay_gets_its_reservation_before_all_who_wait() -> None:
    house = House(num_pages=16)
    blocker = house.submit([1] * 8, max_tokens=45)
    house.turn(2)
    waiting = [house.submit([number] * 4, max_tokens=40) for number in (2, 3)]
    replay = house.submit([4] * 24, max_tokens=30, answer=[1] * 8, num_retractions=1)
    house.turn(2)
    late = house.submit([5], max_tokens=2)
    order: list[Sequence] = []
    while not all(heard(each).ended.is_set() for each in (blocker, replay, late, *waiting)):
        house.turn()
        order += [each for each in (replay, late, *waiting) if each not in order and each.phase is not Phase.QUEUED]
    assert order[0] is replay, "nobody passes it, however small"


# --- faults that must show --------------------------------------------------------------------------------------------


def a_page_is_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Parking._load

    def lossy(self: Parking, parked: object) -> None:
        whole = parked.saved  # type: ignore[attr-defined]
        object.__setattr__(parked, "saved", whole[:, :, :-1])
        load(self, parked)  # type: ignore[arg-type]

    monkeypatch.setattr(Parking, "_load", lossy)


def pages_are_kept_while_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(self: Residency, sequence: Sequence) -> None:
        sequence.pages = None

    monkeypatch.setattr(Residency, "vacate", keep)


def bytes_of_the_host_are_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    count = Parking._count
    monkeypatch.setattr(Parking, "_count", lambda self, num_bytes: count(self, max(num_bytes, 0)))


def copied_while_a_step_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def hurry(self: LanguageEngine) -> bool:
        before, self._under_way = self._under_way, None
        return before is not None

    monkeypatch.setattr(LanguageEngine, "_settle", hurry)


def replays_wait_like_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "Ticket", lambda *ticket: Ticket(*ticket[:3]))


def positions_are_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(self: Sequence, count: int) -> object:
        return np.full((3, count), self.num_launched)

    monkeypatch.setattr(Sequence, "slice_positions", plain)


def the_oldest_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    seniority = Standing.seniority.fget  # type: ignore[attr-defined]
    reverse = property(lambda self: tuple(-part for part in seniority(self)))
    monkeypatch.setattr(Standing, "seniority", reverse)


def newcomers_pass_the_retracted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Parking, "__len__", lambda self: 0)


FAULTS = [
    a_page_is_not_restored,
    pages_are_kept_while_on_the_host,
    bytes_of_the_host_are_not_given_back,
    copied_while_a_step_is_under_way,
    the_oldest_gives_way,
    newcomers_pass_the_retracted,
    replays_wait_like_anybody,
    positions_are_indices,
]


@pytest.mark.parametrize("plant", FAULTS)
def test_faults_show(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        everything_that_faults_break()


def everything_that_faults_break() -> None:
    for number in range(6):
        survived(Yard(num_pages=24, host_pages=200), number)
        test_an_answer_retracted_at_any_step_goes_on_the_same(Yard, PROMPTS[0], churn=True)
    test_the_most_junior_gives_way_and_comes_back_before_anybody_new()
    test_generated_tokens_keep_their_positions(Yard)
    test_a_replay_gets_its_reservation_before_all_who_wait()


# --- the policy -------------------------------------------------------------------------------------------------------


def test_who_is_the_most_junior() -> None:
    def standing(priority: int = 0, retractions: int = 0, replays: int = 0, arrival: int = 0) -> Standing:
        return Standing(priority, retractions, replays, arrival)

    assert most_junior([]) is None
    assert most_junior([standing()]) is None
    assert most_junior([standing(arrival=2), standing(arrival=1)]) == 0
    assert most_junior([standing(priority=1, arrival=1), standing(arrival=2)]) == 0
    assert most_junior([standing(retractions=1, replays=1, arrival=9), standing(arrival=1)]) == 1
    assert most_junior([standing(retractions=3, priority=9, arrival=9), standing(priority=-9)]) == 1
    assert most_junior([standing(retractions=3, arrival=9), standing(retractions=3, arrival=8)]) == 0


def test_the_headroom_doubles_and_the_last_time_is_for_the_whole_answer() -> None:
    rooms = [tokens_to_hold(100, 10_000, times, 16) for times in range(MAX_RETRACTIONS + 1)]
    assert rooms == [100 + 64, 100 + 128, 100 + 256, 10_000]
    assert HEADROOM_PAGES == 4
    assert tokens_to_hold(100, 120, 0, 16) == 120
