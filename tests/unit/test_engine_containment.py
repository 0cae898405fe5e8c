"""What goes wrong with one stays with that one: listeners that raise, actions that fail, answers that can never fit."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

import pytest

from tests.unit.engine_house import PAGE, House, Listener, PoolOfAnother, answer_of, heard, settle
from tests.unit.test_engine_lookahead import Yard
from triptych.core.errors import Aborted, RequestTooLarge, StaleAttempt, TriptychError
from triptych.core.lifecycle import Phase
from triptych.core.plan import Token
from triptych.engine.loop import StepFailed
from triptych.engine.residency import Residency
from triptych.engine.sequence import Sequence


@pytest.fixture
def running() -> Iterator[House]:
    house = House()
    house.engine.start()
    yield house
    house.engine.stop()


class RaisingListener(Listener):
    """A caller whose own code is broken: it raises when it hears a certain word, and from then on at everything."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at, self.is_broken = at, False

    def _tell(self, what: str) -> None:
        self.is_broken = self.is_broken or what == self.at
        self.story.append(what)
        if self.is_broken:
            raise ValueError("a broken listener")


@pytest.mark.parametrize("at", ["admitted", "tokens", "decoding", "finished", "failed"])
@pytest.mark.parametrize("kind", [House, Yard])
def test_a_listener_that_raises_ends_its_own_sequence_and_nobody_elses(kind: type[House], at: str) -> None:
    house = kind()
    broken, sound = house.new([1, 2, 3, 4, 5], max_tokens=6), house.new([6, 7, 8, 9], max_tokens=8)
    broken.sink = RaisingListener(at)
    for sequence in (broken, sound):
        house.engine.submit(sequence)
    if at == "failed":
        house.turn()
        house.engine.abort(broken.ref, Aborted("enough"))
    house.finish(sound)
    assert broken.phase is (Phase.DONE if at == "finished" else Phase.ABORTED)
    assert heard(sound).ids == answer_of(sound)
    house.turn(2)
    assert house.is_clean


def test_listeners_that_raise_end_no_worker(running: House) -> None:
    """Whatever is told to whom, while a turn fails as well: the thread goes on."""
    house = running
    broken = house.new([1, 2, 3, (1, 5)])
    broken.sink = RaisingListener("failed")
    house.engine.call(lambda: house.engine.submit(broken)).result(5)
    settle(house, lambda: broken.num_computed == 3)
    sound = house.engine._turn

    def fails_once() -> None:
        house.engine._turn = sound  # type: ignore[method-assign]
        raise RuntimeError("a bug")

    def plant() -> None:
        house.engine._turn = fails_once  # type: ignore[method-assign]

    house.engine.call(plant).result(5)
    settle(house, lambda: broken.phase is Phase.ABORTED)
    after = house.new([4, 5, 6])
    house.engine.post(lambda: house.engine.submit(after))
    assert heard(after).ended.wait(5)
    assert heard(after).ids == answer_of(after)
    assert house.engine.is_progressing()


def test_an_action_that_fails_takes_no_sequence_along(running: House) -> None:
    house = running
    waiting = house.new([1, (1, 5), 2])
    house.engine.call(lambda: house.engine.submit(waiting)).result(5)

    def broken() -> None:
        raise ValueError("a bug")

    house.engine.post(broken)
    house.engine.call(lambda: house.land(waiting, 0)).result(5)
    assert heard(waiting).ended.wait(5)
    assert heard(waiting).ids == answer_of(waiting)


def test_a_prompt_that_cannot_even_be_looked_at_is_told(running: House) -> None:
    """A bug while it is taken in: its caller must not wait until its time is over."""
    house = running
    odd = house.new([1, 2, 3])
    odd.plan = None  # type: ignore[assignment]
    house.engine.post(lambda: house.engine.submit(odd))
    assert heard(odd).ended.wait(5)
    assert type(heard(odd).error) is TriptychError
    assert house.engine.call(lambda: house.is_clean).result(5)


@pytest.mark.parametrize("kind", [House, Yard])
def test_what_cannot_be_given_back_keeps_nothing_else(kind: type[House], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two end in one step; giving back what the first held meets a bug."""
    house = kind()
    pair = [house.submit([number] * 6, max_tokens=30) for number in (1, 2)]
    house.turn_until(lambda: all(each.phase is Phase.DECODING for each in pair))
    sound = Residency.release

    def broken(residency: Residency, sequence: Sequence) -> None:
        sound(residency, sequence)
        if sequence is pair[0]:
            raise ValueError("a bug")

    monkeypatch.setattr(Residency, "release", broken)
    house.engine._abort_all(Aborted("enough"))
    assert all(isinstance(heard(each).error, Aborted) for each in pair)
    house.turn(2)
    assert house.is_clean


def adopted(house: House, sequence: Sequence) -> None:
    """As a decode worker does it: the pages of the prompt come from outside."""
    num_pages = house.manager.pages_for(sequence.num_known)
    assert house.manager.credit(num_pages)
    sequence.pages = house.manager.own_leased(house.manager.bind_credit(num_pages))
    try:
        house.engine.adopt(sequence, Token(0, answer_of(sequence)[0]))
    except TriptychError:
        house.manager.release(sequence.pages)
        raise


def test_an_answer_that_no_empty_pool_could_hold_is_not_adopted() -> None:
    """It would grow until it has the whole pool, and then wait for a page for ever, with all who come later."""
    house = House(num_pages=9)
    most = house.manager.num_usable * PAGE
    with pytest.raises(RequestTooLarge, match="lower max_tokens"):
        adopted(house, house.new([1, 2, 3, 4, 5], max_tokens=most))
    assert house.is_clean
    fits = house.new([1, 2, 3, 4, 5], max_tokens=most - 5 + 1)
    adopted(house, fits)
    house.engine.abort(fits.ref, Aborted("enough"))
    assert house.is_clean


def test_an_attempt_is_adopted_once() -> None:
    house = House()
    first = house.new([1, 2, 3], max_tokens=9)
    adopted(house, first)
    again = house.new([1, 2, 3], max_tokens=9)
    again.ref = first.ref
    with pytest.raises(StaleAttempt):
        adopted(house, again)
    house.engine.abort(first.ref, Aborted("enough"))
    assert house.is_clean


class BrokenPool(PoolOfAnother):
    """A decode worker's pool that cannot be written to."""

    def copy(self, pages: SequenceOf[int], first: int) -> int:
        raise RuntimeError("there is no memory to gather the pages")


@pytest.mark.parametrize("kind", [House, Yard])
def test_kv_that_cannot_be_handed_over_ends_its_own_sequence(kind: type[House]) -> None:
    house = kind()
    sound = house.submit([6, 7, 8, 9], max_tokens=8)
    broken = house.submit([1, 2, 3, 4, 5], needs_handoff=True)
    house.turn()
    house.engine.bound(broken.ref, BrokenPool(house.runner))
    house.engine.post(lambda: None)
    with pytest.raises(StepFailed):
        house.turn(20)
    assert type(heard(broken).error) is TriptychError
    house.finish(sound)
    assert heard(sound).ids == answer_of(sound)
    house.turn(2)
    assert house.is_clean


@pytest.mark.parametrize("kind", [House, Yard])
def test_what_cannot_be_put_into_a_step_ends_alone(kind: type[House]) -> None:
    house = kind()
    sound = house.submit([6, 7, 8, 9], max_tokens=8)
    broken = house.submit([1, 2, 3, 4, 5], max_tokens=8)
    house.turn_until(lambda: broken.phase is Phase.DECODING)
    broken.positions = None  # type: ignore[assignment]
    house.finish(sound, broken)
    assert type(heard(broken).error) is TriptychError
    assert heard(sound).ids == answer_of(sound)
    house.turn(2)
    assert house.is_clean


@pytest.mark.parametrize("kind", [House, Yard])
def test_a_reservation_that_meets_a_bug_concerns_the_one_it_is_for(
    kind: type[House], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it may have been taken by then."""
    house = kind()
    talking = house.submit([7] * 5, max_tokens=20)
    house.turn(2)
    odd, sound = house.new([1, 2, (1, 5), 3]), house.new([4, 5, 6], max_tokens=5)
    reserve = house.manager.reserve

    def broken(salt: bytes, ids: list[int], *rest: int) -> object:
        if ids == odd.ids:
            raise ValueError("a bug")
        return reserve(salt, ids, *rest)

    monkeypatch.setattr(house.manager, "reserve", broken)
    for each in (odd, sound):
        house.engine.submit(each)
    house.finish(talking, odd, sound)
    assert type(heard(odd).error) is TriptychError
    assert all(heard(each).ids == answer_of(each) for each in (talking, sound))
    house.turn(2)
    assert house.is_clean


def test_bugs_in_turn_after_turn_show_in_the_health(running: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where each concerns one sequence only."""
    house = running
    seen: list[int] = []
    several = [house.new([number]) for number in range(5)]

    class Chain(Listener):
        """When one has failed, the next turn meets the next."""

        def failed(self, error: TriptychError) -> None:
            super().failed(error)
            submit()

    def submit() -> None:
        if several:
            following = several.pop()
            following.sink = Chain()
            house.engine.post(lambda: house.engine.submit(following))

    def broken(*_: object) -> None:
        seen.append(house.engine._num_failed_turns)
        raise ValueError("a bug")

    monkeypatch.setattr(house.manager, "offer", broken)
    submit()
    settle(house, lambda: len(seen) == 5)
    assert seen == [0, 1, 2, 3, 4]


def test_an_attempt_is_not_used_again_while_a_step_still_reads_what_landed_for_it() -> None:
    """Its leases bear its name: the later one would take them over, and lose its own with the earlier one's step."""
    house = Yard()
    first = house.submit([1, 2, (1, 5), 3, 4, 5, 6, (2, 3)], max_tokens=9)
    house.turn()
    house.land(first, 0)
    house.turn_until(lambda: house.engine._under_way is not None and house.engine._under_way.names(first))
    house.engine.abort(first.ref, Aborted("enough"))
    again = house.new([1, 2, (1, 5), 3], max_tokens=9)
    again.ref = first.ref
    house.engine.submit(again)
    assert isinstance(heard(again).error, StaleAttempt)
    house.turn(3)
    assert house.is_clean
