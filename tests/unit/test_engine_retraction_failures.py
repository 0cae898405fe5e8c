"""Retraction when the host has no memory, or a step fails: it concerns the one answer that it happens to."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.unit.engine_house import House, answer_of, heard
from tests.unit.test_engine_lookahead import Yard
from tests.unit.test_engine_retraction import HOUSES, scribble
from triptych.core.lifecycle import Phase
from triptych.engine import loop
from triptych.engine.sequence import Sequence
from triptych.model.runner import Flight, RunOutput

# --- the policy -------------------------------------------------------------------------------------------------------


def _no_memory(*_: object) -> None:
    raise RuntimeError("the host has no memory left")


def two_that_decode(house: House) -> tuple[Sequence, Sequence]:
    pair = house.submit([1, 2, 3, 4, 5], max_tokens=12), house.submit([6, 7, 8, 9], max_tokens=12)
    house.turn_until(lambda: all(each.phase is Phase.DECODING for each in pair))
    return pair


@pytest.mark.parametrize("kind", HOUSES)
def test_a_copy_that_fails_concerns_the_one_it_is_of(kind: type[House], monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a way without the copy: the router replays it. The others hear nothing of it."""
    house = kind(host_pages=20)
    mine, others = two_that_decode(house)
    monkeypatch.setattr(house.runner, "save_pages", _no_memory)
    assert house.engine.retract(mine.ref)
    house.finish(mine, others)
    assert heard(mine).story[-1] == "retracted"
    assert heard(others).ids == answer_of(others)
    house.turn(2)
    assert house.is_clean


@pytest.mark.parametrize("kind", HOUSES)
def test_a_copy_that_cannot_be_brought_back_concerns_the_one_it_is_of(
    kind: type[House], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does anybody find what stands in the pages that it should have come back to."""
    house = kind(host_pages=20)
    mine, others = two_that_decode(house)
    with monkeypatch.context() as patch:
        patch.setattr(house.runner, "load_pages", _no_memory)
        assert house.engine.retract(mine.ref)
        house.turn_until(lambda: mine.phase is Phase.RETRACTED or heard(mine).ended.is_set())
        scribble(house)
        house.turn_until(lambda: heard(mine).ended.is_set())
    assert heard(mine).story[-1] == "retracted"
    again = house.submit(list(mine.plan.compact_ids), max_tokens=12, answer=heard(mine).ids, num_retractions=1)
    house.finish(others, again)
    assert heard(others).ids == answer_of(others)
    assert heard(mine).ids + [token.id for token in heard(again).tokens_seen] == answer_of(mine)
    house.turn(2)
    assert house.is_clean


@dataclass
class BrokenFlight:
    """A step that was computed and then lost."""

    sound: Flight

    def wait(self) -> RunOutput:
        self.sound.wait()
        raise RuntimeError("a bug")


def test_who_was_asked_to_make_room_still_does_after_a_step_that_failed() -> None:
    """The step that has to end first may meet a bug of one that is not asked."""
    house = Yard(host_pages=20)
    mine = house.submit([1, 2, 3, 4, 5], max_tokens=12, repetition_penalty=1.2)  # it is in every other step
    other = house.submit([6, 7, 8, 9], max_tokens=30)

    def only_the_other_runs() -> bool:
        step = house.engine._under_way
        return step is not None and mine.phase is Phase.DECODING and [p.sequence for p in step.pieces] == [other]

    house.turn_until(only_the_other_runs)
    assert house.engine.retract(mine.ref)
    step = house.engine._under_way
    assert step is not None
    step.flight = BrokenFlight(step.flight)
    with pytest.raises(loop.StepFailed):
        house.turn()
    assert heard(other).error is not None
    house.turn()
    assert mine.num_parked == 1, "it was asked for, and nothing of it was in the step that failed"
    house.finish(mine)
    assert heard(mine).ids == answer_of(mine)
