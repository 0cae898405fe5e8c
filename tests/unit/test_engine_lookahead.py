"""The step loop over a device of its own: step k+1 is launched while k computes, and nobody can tell by the answers."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.seed import SEED
from tests.unit.engine_house import House, Listener, PoolOfAnother, answer_of, heard, settle
from triptych.core.errors import Aborted, EmbeddingMissing, TriptychError
from triptych.core.ids import AttemptRef
from triptych.core.lifecycle import Phase
from triptych.core.plan import Token
from triptych.engine import loop, step
from triptych.engine.loop import missing_items
from triptych.engine.sequence import Sequence
from triptych.model.runner import RunSlice
from triptych.testing.async_runner import AsyncFakeRunner


class Yard(House):
    """A house whose runner looks ahead. After each turn no page that a launched step names may be another's."""

    def __init__(self, seed: int = 0, **how: int) -> None:
        self.device = AsyncFakeRunner(4, seed)
        super().__init__(runner=self.device, **how)

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            super().turn()
            self.check_device()

    def check_device(self) -> None:
        is_free = self.manager._allocator._is_free
        freed = [page for page in self.device.pages_under_way() if is_free[page]]
        assert not freed, f"pages {freed} were freed under a step that names them"


def followers(yard: Yard) -> list[RunSlice]:
    """Slices that were launched before their id was known."""
    return [piece for step in yard.device.launched for piece in step if piece.follows is not None]


def test_a_step_is_launched_while_the_one_before_computes() -> None:
    yard = Yard()
    sequence = yard.submit([1, 2, 3, 4, 5, 6], max_tokens=6)
    yard.finish(sequence)
    assert heard(sequence).ids == answer_of(sequence)
    assert yard.device.max_under_way == 2
    assert len(followers(yard)) == 5, "all but the prompt itself were launched before their id was known"
    yard.turn()
    assert yard.is_clean


def test_what_ends_for_certain_is_not_run_ahead() -> None:
    yard = Yard()
    sequence = yard.submit([1, 2, 3], max_tokens=3)
    yard.finish(sequence)
    assert [len(step) for step in yard.device.launched] == [1, 1, 1], "the third token is the last: nothing follows it"


def test_what_was_run_beyond_the_end_is_dropped() -> None:
    yard = Yard()
    probe = yard.new([1, 2, 3], max_tokens=9)
    stop = answer_of(probe)[2]
    sequence = yard.submit([1, 2, 3], max_tokens=9, stop=frozenset({stop}))
    yard.finish(sequence)
    assert heard(sequence).ids == answer_of(probe)[:3]
    assert yard.manager.counts()["owned"] > 0, "the step under way still writes to its pages"
    yard.turn()
    assert yard.is_clean


def test_a_sequence_whose_penalties_look_at_every_token_waits_for_it() -> None:
    yard = Yard()
    careful = yard.submit([1, 2, 3], max_tokens=6, repetition_penalty=1.2)
    other = yard.submit([4, 5, 6, 7], max_tokens=6)
    yard.finish(careful, other)
    assert {piece.pages[0] for piece in followers(yard)} == {other.pages.pages[0]}  # type: ignore[union-attr]
    assert heard(careful).ids == answer_of(careful)
    assert heard(other).ids == answer_of(other)


def test_a_prompt_handed_to_decode_is_not_run_ahead() -> None:
    yard = Yard()
    sequence = yard.submit(list(range(1, 10)), needs_handoff=True)
    yard.turn()
    away = PoolOfAnother(yard.runner)
    yard.engine.bound(sequence.ref, away)
    yard.turn_until(lambda: sequence.phase is Phase.HANDING_OFF)
    assert away.values(9) == list(range(1, 10))
    assert followers(yard) == []
    yard.engine.handed_over(sequence.ref)
    assert yard.is_clean


def test_pages_of_a_grant_are_given_back_after_the_step_that_writes_them() -> None:
    yard = Yard()
    sequence = yard.new([1, 2, 3, 4, 5], max_tokens=20)
    yard.manager.credit(7)
    pages = yard.manager.bind_credit(7)
    for index, token_id in enumerate([1, 2, 3, 4, 5]):
        yard.runner.cells[pages[index // 4], index % 4] = token_id
    sequence.pages = yard.manager.own_leased(pages)
    yard.engine.adopt(sequence, Token(0, answer_of(sequence)[0]))
    yard.turn(3)
    yard.engine.abort(sequence.ref, Aborted("enough"))
    held = yard.manager.counts()["owned"], sum(node.locks for node in yard.manager.tree.nodes())
    assert held == (6, 1), "the prompt's full page serves others, and is as much in use"
    yard.check_device()
    yard.turn()
    assert yard.is_clean
    freed: list[int] = []
    yard.engine.after_step(lambda: freed.append(1))
    assert freed == [1], "nothing is under way"


@pytest.mark.parametrize("error", [RuntimeError("a bug"), EmbeddingMissing("it did not come")])
def test_a_step_that_fails_ends_those_in_it_and_no_others(turning: Yard, error: Exception) -> None:
    yard = turning
    waiting = yard.new([1, (1, 5), 2])
    yard.engine.call(lambda: yard.engine.submit(waiting)).result(5)
    settle(yard, lambda: waiting.num_computed == 1)
    victims = [yard.new([number] * 6, max_tokens=90) for number in (3, 4)]

    def start() -> None:
        for victim in victims:
            yard.engine.submit(victim)
        yard.runner.fail_next(error)

    yard.engine.call(start).result(5)
    for victim in victims:
        assert heard(victim).ended.wait(5)
        assert type(heard(victim).error) is (TriptychError if isinstance(error, RuntimeError) else EmbeddingMissing)
    yard.engine.call(lambda: yard.land(waiting, 0)).result(5)
    assert heard(waiting).ended.wait(5)
    assert heard(waiting).ids == answer_of(waiting)
    settle(yard, lambda: yard.is_clean)


def test_an_engine_that_stops_waits_for_its_step(turning: Yard) -> None:
    class StopsWhenItDecodes(Listener):
        def decoding(self) -> None:
            super().decoding()
            turning.engine.post(turning.engine._stop)

    sequence = turning.new([1, 2, 3], max_tokens=150)
    sequence.sink = StopsWhenItDecodes()
    turning.engine.call(lambda: turning.engine.submit(sequence)).result(5)
    assert heard(sequence).ended.wait(5)
    assert isinstance(heard(sequence).error, Aborted)
    turning.engine.stop()
    assert turning.device.pages_under_way() == set()
    assert turning.is_clean


@pytest.fixture
def turning() -> Iterator[Yard]:
    yard = Yard()
    yard.engine.start()
    yield yard
    yard.engine.stop()


def _storm(seed: int) -> None:
    """Everything at once: pictures, stop tokens, penalties, handoffs, aborts at any time."""
    dice = random.Random(seed)
    yard = Yard(
        seed,
        num_pages=40,
        max_tokens=dice.randint(4, 60),
        max_chunk=dice.randint(3, 40),
        max_sequences=dice.randint(1, 6),
        max_waiting=24,  # nobody is refused, however slow the rest is
    )
    sequences: list[Sequence] = []
    aborted: set[AttemptRef] = set()
    for _ in range(300):
        if len(sequences) < 24 and dice.random() < 0.3:
            sequences.append(_submit_any(yard, dice))
        for each in sequences:
            _go_on(yard, each, dice, aborted)
        yard.turn()
        if len(sequences) == 24 and all(heard(each).ended.is_set() or each.phase is Phase.DONE for each in sequences):
            break
    yard.turn(2)
    for each in sequences:
        listener, truth = heard(each), answer_of(each)
        if each.ref in aborted:
            assert listener.ids == truth[: len(listener.ids)]
        elif each.needs_handoff:
            assert listener.ids == truth[:1]
        else:
            ends = [index for index, token in enumerate(truth) if token in each.plan.sampling.stop_token_ids]
            assert listener.ids == truth[: ends[0] + 1 if ends else len(truth)]
    assert yard.is_clean


def _submit_any(yard: Yard, dice: random.Random) -> Sequence:
    prompt: list[int | tuple[int, int]] = [dice.randint(1, 3) for _ in range(dice.randint(1, 12))]
    for _ in range(dice.randint(0, 2)):
        prompt.insert(dice.randint(0, len(prompt)), (dice.randint(1, 2), 5))
    how = {"max_tokens": dice.randint(1, 12), "needs_handoff": dice.random() < 0.2}
    if dice.random() < 0.3:
        truth = answer_of(yard.new(prompt, max_tokens=12))
        return yard.submit(prompt, stop=frozenset({dice.choice(truth)}), **how)
    return yard.submit(prompt, repetition_penalty=dice.choice([1.0, 1.0, 1.1]), **how)


def _go_on(yard: Yard, sequence: Sequence, dice: random.Random, aborted: set[AttemptRef]) -> None:
    if sequence.phase in (Phase.DONE, Phase.ABORTED):
        return
    if dice.random() < 0.01:
        aborted.add(sequence.ref)
        yard.engine.abort(sequence.ref, Aborted("enough"))
    elif sequence.phase is Phase.HANDING_OFF:
        yard.engine.handed_over(sequence.ref)
    elif sequence.phase is Phase.RUNNING:
        if sequence.needs_handoff and sequence.handoff is None:
            yard.engine.bound(sequence.ref, PoolOfAnother(yard.runner))
        for index in missing_items(sequence):
            if dice.random() < 0.5:
                yard.land(sequence, index)


def _storms(count: int) -> None:
    for seed in range(count):
        _storm(seed)


@pytest.mark.parametrize("run", range(40))
def test_in_a_storm_every_answer_is_right_and_no_page_is_given_away_too_early(run: int) -> None:
    _storm(SEED * 1000 + run)


FAULTS = ["release_at_once", "sample_of_another", "keep_what_is_beyond_the_end"]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_storm_would_see(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rule of the loop is needed: without it, the storm fails."""
    if fault == "release_at_once":
        monkeypatch.setattr(step.Step, "names", lambda self, sequence: False)
    elif fault == "sample_of_another":
        monkeypatch.setattr(step, "_places", lambda pieces: {id(piece.sequence): 0 for piece in pieces})
    else:
        monkeypatch.setattr(loop, "TERMINAL", frozenset())
    with pytest.raises((AssertionError, KeyError, loop.StepFailed)):
        _storms(40)
