"""How often an answer is tried again: budget, blame, pauses, and what has ended already."""

from __future__ import annotations

import pytest

from services.router.breakers import NUM_FAILURES, Breakers
from services.router.tries import MAX_FAILURES, RetryBudget, Tries, end_of
from triptych.core.errors import PeerLost, RequestRefused, Unavailable
from triptych.core.plan import MAX_RETRACTIONS, FinishReason, Plan, Sampling

LOST = PeerLost("gone")


def test_tries_cost_a_share_of_the_answers() -> None:
    budget = RetryBudget(capacity=2.0, share=0.5)
    assert [budget.try_take() for _ in range(3)] == [True, True, False]
    budget.answer_begins()
    assert not budget.try_take()
    budget.answer_begins()
    assert [budget.try_take(), budget.try_take()] == [True, False]
    for _ in range(100):
        budget.answer_begins()
    assert [budget.try_take() for _ in range(3)] == [True, True, False], "what is saved up is bounded"


def test_failures_are_borne_a_few_times() -> None:
    tries = Tries(RetryBudget())
    for _ in range(MAX_FAILURES - 1):
        tries.failed(LOST, {"a"}, set())
    with pytest.raises(PeerLost):
        tries.failed(LOST, {"a"}, set())


def test_a_failure_that_nobody_is_to_blame_for_is_not_repeated() -> None:
    with pytest.raises(PeerLost):
        Tries(RetryBudget()).failed(LOST, set(), set())


def test_two_workers_lost_are_the_requests_fault_and_one_that_is_lost_twice_is_not() -> None:
    tries = Tries(RetryBudget())
    tries.failed(LOST, {"a"}, {"a"})
    tries.failed(LOST, {"a"}, {"a"})
    with pytest.raises(RequestRefused) as refused:
        tries.failed(LOST, {"b"}, {"b"})
    assert refused.value.http_status == 422 and not refused.value.retriable


def test_two_workers_lost_in_one_try_are_not_the_requests_fault() -> None:
    tries = Tries(RetryBudget())
    tries.failed(LOST, {"a", "b"}, {"a", "b"})
    with pytest.raises(RequestRefused):
        tries.failed(LOST, {"c"}, {"c"})


def test_retractions_have_a_budget_of_their_own() -> None:
    tries = Tries(RetryBudget(capacity=0.0))
    for _ in range(MAX_RETRACTIONS):
        tries.retracted()
    with pytest.raises(Unavailable):
        tries.retracted()
    assert tries.num_failures == 0


def test_pauses_grow_and_are_short() -> None:
    tries = Tries(RetryBudget())
    tries.failed(LOST, {"a"}, set())
    first = tries.pause_s(1.0)
    tries.failed(LOST, {"a"}, set())
    assert 0.0 == tries.pause_s(0.0) < first < tries.pause_s(1.0) < 0.5


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([], None),
        ([7], None),
        ([7, 9], FinishReason.STOP),
        ([9, 7], None),
        ([7, 7, 7], FinishReason.LENGTH),
        ([7, 7, 9], FinishReason.STOP),
    ],
)
def test_an_answer_has_ended_by_its_last_token_or_its_length(ids: list[int], reason: FinishReason | None) -> None:
    plan = Plan((1,), (), Sampling(3, stop_token_ids=frozenset({9})), 1.0)
    assert end_of(plan, ids) is reason


def test_a_worker_that_has_left_is_forgotten_and_one_that_serves_is_as_new() -> None:
    breakers = Breakers(lambda: 0.0)
    for _ in range(NUM_FAILURES):
        breakers.failed({"a", "b"})
    assert breakers.avoided() == {"a", "b"}
    breakers.keep({"a"})
    assert breakers.avoided() == {"a"}
    breakers.served({"a"})
    breakers.failed({"a"})
    assert breakers.avoided() == frozenset()
