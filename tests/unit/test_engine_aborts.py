"""Ends of all kinds: aborts in every phase, steps that fail, and the engine's own end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from tests.unit.engine_house import (
    ENCODER,
    ROW_BYTES,
    House,
    PoolOfAnother,
    answer_of,
    heard,
    settle,
)
from triptych.core.errors import (
    Aborted,
    EmbeddingMissing,
    StaleAttempt,
    TriptychError,
)
from triptych.core.lifecycle import Phase
from triptych.engine.sequence import Sequence


@pytest.fixture
def running() -> Iterator[House]:
    house = House()
    house.engine.start()
    yield house
    house.engine.stop()


def queued(house: House) -> Sequence:
    blocker = house.submit([1] * 200, max_tokens=36)
    sequence = house.submit([2, (1, 5), 3])
    house.turn()
    house.engine.abort(blocker.ref, Aborted("not needed"))
    return sequence


def waiting_for_the_grant(house: House) -> Sequence:
    sequence = house.submit([2, (1, 5), 3], needs_handoff=True)
    house.turn()
    return sequence


def waiting_for_an_embedding(house: House) -> Sequence:
    sequence = house.submit([2, 2, 2, 2, 2, (1, 5), 3, (2, 5)])
    house.turn(2)
    return sequence


def with_an_embedding_landed(house: House) -> Sequence:
    sequence = waiting_for_an_embedding(house)
    house.land(sequence, 1)
    return sequence


def in_the_middle_of_its_prompt(house: House) -> Sequence:
    sequence = house.submit(list(range(1, 130)))
    house.turn()
    assert 0 < sequence.num_computed < 129
    return sequence


def handing_off(house: House) -> Sequence:
    sequence = house.submit(list(range(1, 10)), needs_handoff=True)
    house.turn()
    house.engine.bound(sequence.ref, PoolOfAnother(house.runner))
    house.turn()
    assert sequence.phase is Phase.HANDING_OFF
    return sequence


def decoding(house: House) -> Sequence:
    sequence = house.submit(list(range(1, 10)), max_tokens=20)
    house.turn(5)
    assert sequence.phase is Phase.DECODING
    return sequence


PHASES = [
    queued,
    waiting_for_the_grant,
    waiting_for_an_embedding,
    with_an_embedding_landed,
    in_the_middle_of_its_prompt,
    handing_off,
    decoding,
]


@pytest.mark.parametrize("reach", PHASES)
def test_an_abort_frees_everything_in_every_phase(reach: Callable[[House], Sequence]) -> None:
    house = House()
    sequence = reach(house)
    house.engine.abort(sequence.ref, Aborted("enough"))
    assert isinstance(heard(sequence).error, Aborted)
    assert sequence.phase is Phase.ABORTED
    assert house.is_clean
    house.engine.abort(sequence.ref, Aborted("again"))
    house.engine.handed_over(sequence.ref)
    house.engine.bound(sequence.ref, PoolOfAnother(house.runner))
    after = house.submit([1, 2, 3, 4, 5])
    house.finish(after)
    assert heard(after).ids == answer_of(after)
    assert house.is_clean


def test_a_slot_that_an_encoder_still_writes_to_outlives_the_abort() -> None:
    house = House()
    sequence = waiting_for_an_embedding(house)
    house.landing.hand(sequence.ref, 0, ENCODER)
    house.engine.abort(sequence.ref, Aborted("enough"))
    assert house.book.quarantined_bytes == 5 * ROW_BYTES
    house.landing.writer_finished(ENCODER, sequence.ref)
    assert house.is_clean


def test_a_prompt_whose_embedding_does_not_fit_fails_alone() -> None:
    house = House()
    broken = house.submit([1, (1, 5), 2])
    house.turn(2)
    sound = house.submit([7, 8, 9])
    house.land(broken, 0)
    rows = broken.items[0].rows
    assert rows is not None
    broken.items[0].rows = rows[:3]
    house.finish(sound)
    assert isinstance(heard(broken).error, EmbeddingMissing)
    assert heard(sound).ids == answer_of(sound)
    assert house.is_clean


@pytest.mark.parametrize("error", [RuntimeError("a bug"), EmbeddingMissing("it did not come")])
def test_a_failed_step_fails_those_in_it_and_the_loop_goes_on(running: House, error: Exception) -> None:
    house = running
    waiting = house.new([1, (1, 5), 2])  # in no step for want of its embedding
    house.engine.call(lambda: house.engine.submit(waiting)).result(5)
    settle(house, lambda: waiting.num_computed == 1)
    victims = [house.new([number] * 6, max_tokens=50) for number in (3, 4)]

    def start() -> None:
        for victim in victims:
            house.engine.submit(victim)
        house.runner.fail_next(error)

    house.engine.call(start).result(5)
    for victim in victims:
        assert heard(victim).ended.wait(5)
        assert type(heard(victim).error) is (TriptychError if isinstance(error, RuntimeError) else EmbeddingMissing)
        assert "bug" not in str(heard(victim).error)
    house.engine.call(lambda: house.land(waiting, 0)).result(5)
    assert heard(waiting).ended.wait(5)
    assert heard(waiting).ids == answer_of(waiting)
    assert house.engine.is_progressing()
    assert house.engine.call(lambda: house.is_clean).result(5)


def test_a_worker_whose_every_step_fails_is_not_healthy(running: House) -> None:
    house = running
    for _ in range(3):
        victim = house.new([1, 2, 3])
        house.runner.fail_next(RuntimeError("a bug"))
        house.engine.post(lambda victim=victim: house.engine.submit(victim))  # type: ignore[misc]
        assert heard(victim).ended.wait(5)
    settle(house, lambda: house.engine._num_failed_turns == 0)  # an idle turn is a good turn


def test_a_call_brings_back_its_result_or_its_error(running: House) -> None:
    assert running.engine.call(lambda: threading.current_thread().name).result(5) == "prefill-engine"

    def broken() -> None:
        raise StaleAttempt("gone")

    with pytest.raises(StaleAttempt):
        running.engine.call(broken).result(5)
    assert running.engine.is_progressing()


def test_a_call_cancelled_before_its_turn_does_not_run(running: House) -> None:
    gate, ran = threading.Event(), []
    running.engine.post(lambda: gate.wait(5) and None)
    future: Future[None] = running.engine.call(lambda: ran.append(1))
    assert future.cancel()
    gate.set()
    running.engine.call(lambda: None).result(5)
    assert ran == []


def test_stopping_fails_what_is_left_and_what_comes_too_late() -> None:
    house = House()
    house.engine.start()
    sequences = [house.new([number, (1, 5)]) for number in (1, 2, 3)]
    for sequence in sequences[:2]:
        house.engine.call(lambda each=sequence: house.engine.submit(each)).result(5)  # type: ignore[misc]
    gate = threading.Event()
    house.engine.post(lambda: gate.wait(5) and None)
    house.engine.post(house.engine._stop)
    house.engine.post(lambda: house.engine.submit(sequences[2]))  # already in the inbox, behind the stop
    gate.set()
    house.engine.stop()
    for sequence in sequences:
        assert heard(sequence).ended.wait(5)
        assert isinstance(heard(sequence).error, Aborted)
    assert not house.engine.is_progressing()
    assert house.is_clean


def test_a_call_to_a_stopped_engine_fails_and_does_not_hang() -> None:
    house = House()
    house.engine.start()
    house.engine.stop()
    with pytest.raises(Aborted):
        house.engine.call(lambda: None).result(5)
    assert not house.engine.post(lambda: None)


def test_no_call_is_lost_while_the_engine_stops() -> None:
    for _ in range(20):
        house = House()
        house.engine.start()
        futures: list[Future[int]] = []
        posting = threading.Thread(target=lambda: futures.extend(house.engine.call(lambda: 1) for _ in range(500)))  # noqa: B023
        posting.start()
        house.engine.stop()
        posting.join()
        for future in futures:
            error = future.exception(5)
            assert error is None or isinstance(error, Aborted)
