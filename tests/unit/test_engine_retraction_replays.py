"""Answers that the router replays: a prompt and what there is of the answer, which go on the same."""

from __future__ import annotations

import random

import pytest

from tests.unit.engine_house import House, answer_of, heard
from tests.unit.test_engine_retraction import HOUSES
from triptych.core.errors import Aborted, RequestTooLarge
from triptych.core.plan import MAX_RETRACTIONS

# --- replays ----------------------------------------------------------------------------------------------------------


class Replaying:
    """What the router does with answers that are given back: it submits them again with what is out already."""

    def __init__(self, house: House, prompt: list[int], max_tokens: int) -> None:
        self.house, self.prompt, self.max_tokens = house, prompt, max_tokens
        self.ids: list[int] = []
        self.num_replays = 0
        self.current = house.submit(prompt, max_tokens)
        self.truth = answer_of(self.current)

    def look(self) -> bool:
        """True when the answer is whole."""
        told = heard(self.current)
        if not told.ended.is_set():
            return False
        assert [token.index for token in told.tokens_seen] == [
            *range(len(self.ids), len(self.ids) + len(told.tokens_seen))
        ]
        self.ids += [token.id for token in told.tokens_seen]
        told.tokens_seen.clear()
        if told.story[-1] == "retracted":
            self.num_replays += 1
            assert self.num_replays <= MAX_RETRACTIONS, "it would be a 503"
            self.current = self.house.submit(
                self.prompt, self.max_tokens, answer=self.ids, num_retractions=self.num_replays
            )
            return False
        assert told.error is None, told.error
        return True


@pytest.mark.parametrize("host_pages", [0, 6])
@pytest.mark.parametrize("kind", HOUSES)
def test_replays_are_bounded_and_go_on_the_same(kind: type[House], host_pages: int, seed: int) -> None:
    num_replays = 0
    for number in range(6):
        house, dice = kind(num_pages=24, host_pages=host_pages), random.Random(f"{seed}/{number}")
        prompts = [[name, *(dice.randrange(90) for _ in range(dice.randint(1, 20)))] for name in range(12)]
        answers = [Replaying(house, prompt, dice.randint(20, 60)) for prompt in prompts]
        for _ in range(3000):
            looks = [answer.look() for answer in answers]
            if all(looks):
                break
            house.turn()
        for answer in answers:
            assert answer.ids == answer.truth
        house.turn()
        assert house.is_clean
        num_replays += sum(answer.num_replays for answer in answers)
    assert num_replays > 5, "there was no pressure"


@pytest.mark.parametrize("kind", HOUSES)
def test_a_replay_is_prefilled_with_its_answer_and_penalties_see_all_of_it(kind: type[House]) -> None:
    house = kind()
    truth = answer_of(house.new([1, 2, 3, 4, 5, 6], max_tokens=12))
    replay = house.submit(
        [1, 2, 3, 4, 5, 6], max_tokens=12, answer=truth[:5], num_retractions=1, repetition_penalty=1.1
    )
    house.finish(replay)
    assert [(token.index, token.id) for token in heard(replay).tokens_seen] == list(enumerate(truth))[5:]
    rows = [piece.sample for step in house.runner.steps for piece in step if piece.sample is not None]
    assert [(row.index, row.position) for row in rows] == [(index, 6 + index) for index in range(5, 12)]
    histories = [row.history.answer_ids.tolist() for row in rows if row.history is not None]
    assert histories == [truth[:count] for count in range(5, 12)]


def test_a_replay_too_long_for_a_prefill_pool_is_refused_for_good_and_says_what_helps() -> None:
    """To try again later would not help: 503 would ask for that."""
    house = House(num_pages=6)
    fits = house.submit([1] * 15, max_tokens=40, needs_handoff=True)
    assert not heard(fits).ended.is_set()
    replay = house.submit([1] * 15, max_tokens=40, needs_handoff=True, answer=[2] * 6, num_retractions=1)
    error = heard(replay).error
    assert type(error) is RequestTooLarge and "max_tokens to 6 " in error.message
    longest = house.submit([2] * 15, max_tokens=6, needs_handoff=True, answer=[2] * 5, num_retractions=1)
    assert not heard(longest).ended.is_set(), "no answer of so many tokens can be retracted with more of them"
    house.engine.abort(longest.ref, Aborted("enough"))
    house.engine.abort(fits.ref, Aborted("enough"))
    assert house.is_clean
