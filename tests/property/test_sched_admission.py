"""The promises of `triptych/sched/admission.py`: over random arrivals in virtual time, and over all interleavings of
few requests on small pools; and that broken queues break them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.property.admission_model import (
    MAX_BYPASS,
    MAX_WAIT_S,
    Demand,
    Pool,
    PoolInSteps,
    Queue,
    Simulation,
    explore,
    small_worlds,
)
from tests.property.promises import Broken, assert_caught, examples
from triptych.sched.admission import AdmissionQueue, Ticket
from triptych.sched.aging import Aging

PAGES, SLOTS = 12, 8
AGING = Aging(2.0, 16.0)


def queue() -> AdmissionQueue[Demand]:
    return AdmissionQueue(MAX_BYPASS, MAX_WAIT_S, max_refusals=1000, aging=AGING)


@st.composite
def arrivals(draw: st.DrawFn) -> list[Demand]:
    """Some of any size and priority, in a stream of small ones."""
    mixed = [
        Demand(
            name,
            draw(st.integers(0, 30)),
            draw(st.integers(1, 400)),
            draw(st.integers(1, PAGES)),
            draw(st.integers(0, SLOTS)),
            draw(st.integers(1, 12)),
            draw(st.sampled_from([-100, 0, 0, 0, 7, 100])),
        )
        for name in range(draw(st.integers(1, 12)))
    ]
    every, pages, runs_s = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 12))
    priority, num_tokens = draw(st.sampled_from([-1, 0, 3])), draw(st.integers(1, 20))
    stream = [
        Demand(100 + number, number // every, num_tokens, pages, 0, runs_s, priority)
        for number in range(draw(st.integers(0, 80)))
    ]
    return mixed + stream


@examples(300)
@given(arrivals(), st.integers(1, 5))
def test_everybody_gets_in_within_the_bound(demands: list[Demand], max_admissions: int) -> None:
    Simulation(queue(), Pool(PAGES, SLOTS), demands, max_admissions).run()


@examples(50)
@given(arrivals(), st.integers(1, 3))
def test_few_offers_a_call_leave_nobody_out(demands: list[Demand], max_refusals: int) -> None:
    """Who fits may then have to wait, but not for ever."""
    few = AdmissionQueue[Demand](MAX_BYPASS, MAX_WAIT_S, max_refusals, AGING)
    simulation = Simulation(few, Pool(PAGES, SLOTS), demands)
    simulation._anybody_bars = lambda now_s: True  # type: ignore[method-assign]
    simulation.run()


@pytest.mark.parametrize(("num_requests", "pages", "slots"), [(2, 3, 2), (3, 2, 2)])
def test_every_interleaving_of_few_requests_ends(num_requests: int, pages: int, slots: int) -> None:
    total = sum(explore(Pool(pages, slots), demands) for demands in small_worlds(num_requests, pages, slots))
    assert total > 1000


def test_reserving_in_steps_would_deadlock() -> None:
    demands = [Demand(0, 0, 10, 1, 1, 1), Demand(1, 0, 20, 2, 1, 1), Demand(2, 0, 20, 1, 2, 1)]
    assert explore(Pool(2, 2), demands)
    with pytest.raises(Broken, match="deadlock"):
        explore(PoolInSteps(2, 2), demands)


# --- broken queues ----------------------------------------------------------------------------------------------------


class Changed:
    """A queue that is told other things than happen."""

    def __init__(self, inner: AdmissionQueue[Demand]) -> None:
        self._inner = inner

    def push(self, request: Demand, ticket: Ticket) -> None:
        self._inner.push(request, ticket)

    def admit(self, reserve: Callable[[Demand], bool], max_admissions: int, now_ns: int) -> list[Demand]:
        return self._inner.admit(reserve, max_admissions, now_ns)


class WithoutPriority(Changed):
    def push(self, request: Demand, ticket: Ticket) -> None:
        super().push(request, Ticket(ticket.num_tokens, ticket.queued_ns))


class WithoutLength(Changed):
    def push(self, request: Demand, ticket: Ticket) -> None:
        super().push(request, Ticket(1, ticket.queued_ns, ticket.priority))


class OneTooMany(Changed):
    def admit(self, reserve: Callable[[Demand], bool], max_admissions: int, now_ns: int) -> list[Demand]:
        return super().admit(reserve, max_admissions + 1, now_ns)


class StopsAtTheFirst(Changed):
    """Strict order: nobody passes one that does not fit."""

    def admit(self, reserve: Callable[[Demand], bool], max_admissions: int, now_ns: int) -> list[Demand]:
        blocked = False

        def until_refused(demand: Demand) -> bool:
            nonlocal blocked
            blocked = blocked or not reserve(demand)
            return not blocked

        return super().admit(until_refused, max_admissions, now_ns)


def without_bypass_bound() -> Queue:
    return AdmissionQueue(10**6, MAX_WAIT_S, 1000, AGING)


def bypass_once_more() -> Queue:
    return AdmissionQueue(MAX_BYPASS + 1, MAX_WAIT_S, 1000, AGING)


def without_age_bound() -> Queue:
    return AdmissionQueue(MAX_BYPASS, 1e6, 1000, AGING)


@pytest.mark.parametrize(
    ("make", "promise"),
    [
        (lambda: WithoutPriority(queue()), "the more urgent goes first"),
        (lambda: WithoutLength(queue()), "the shorter goes first"),
        (lambda: OneTooMany(queue()), "no more than may get in"),
        (lambda: StopsAtTheFirst(queue()), "who fits gets in"),
        (without_bypass_bound, "passed too often"),
        (bypass_once_more, "passed too often"),
        (without_age_bound, "waited long enough"),
    ],
    ids=["priority", "length", "too_many", "strict", "no_bypass_bound", "one_bypass_more", "no_age_bound"],
)
def test_a_broken_queue_is_caught(make: Callable[[], Queue], promise: str, seed: int) -> None:
    assert_caught(arrivals(), lambda demands: Simulation(make(), Pool(PAGES, SLOTS), demands).run(), promise, seed)
