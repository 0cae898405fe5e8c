"""The line for room: fair between tenants, bounded, and nobody starves; beside it lines that are not, each found."""

from __future__ import annotations

import random

import pytest

from services.router.admission.fair_line import FairLine, Ticket
from triptych.core.errors import Saturated

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}
MAX_COST = 100


def unfairness(line: FairLine[object], seed: int) -> float:
    """How far two tenants that wait all the time came apart, over the bound of one request of each; at most 1."""
    rng = random.Random(seed)
    served, worst = dict.fromkeys(WEIGHTS, 0.0), 0.0
    tickets: dict[int, Ticket] = {}
    entries: list[object] = []

    def send(tenant: str) -> None:
        entries.append(object())
        tickets[id(entries[-1])] = Ticket(tenant, WEIGHTS[tenant], cost=rng.randint(1, MAX_COST))
        line.join(entries[-1], tickets[id(entries[-1])], 0.0)

    for tenant in WEIGHTS:
        for _ in range(rng.randint(1, 20)):
            send(tenant)
    for _ in range(200):
        head = line.head()
        ticket = tickets[id(head)]
        send(ticket.tenant)  # none of its tenants ever has nothing to wait for
        line.served(ticket)
        line.remove(head)
        served[ticket.tenant] += ticket.cost / ticket.weight
        for one, weight in WEIGHTS.items():
            for other, others in WEIGHTS.items():
                bound = MAX_COST / weight + MAX_COST / others
                worst = max(worst, (served[one] - served[other]) / bound)
    return worst


def test_tenants_that_wait_differ_by_one_request_of_each() -> None:
    assert all(unfairness(FairLine(10), seed) <= 1 for seed in range(20))


class FirstComeFirstServed(FairLine[object]):
    def head(self) -> object:
        return min(places[0] for places in self._places.values()).entry


class WithoutWeights(FairLine[object]):
    def served(self, ticket: Ticket) -> None:
        super().served(Ticket(ticket.tenant, 1.0, cost=ticket.cost))


class ByRequests(FairLine[object]):
    def served(self, ticket: Ticket) -> None:
        super().served(Ticket(ticket.tenant, 1000.0, cost=0.0))


@pytest.mark.parametrize("broken", [FirstComeFirstServed, WithoutWeights, ByRequests])
def test_an_unfair_line_is_found(broken: type[FairLine[object]]) -> None:
    assert any(unfairness(broken(10), seed) > 1 for seed in range(20))


def hoarded(line: FairLine[object]) -> int:
    """How often a tenant that said nothing for long is served before one that always waited gets its turn."""
    busy, quiet = Ticket("a", cost=10), Ticket("b", cost=10)
    for _ in range(50):
        line.served(busy)
    for _ in range(5):
        line.join("b", quiet, 0.0)
        line.join("a", busy, 0.0)
    for count in range(5):
        if line.head() == "a":
            return count
        line.served(quiet)
        line.remove("b")
    return 5


class Remembers(FairLine[object]):
    def _insert(self, place) -> None:  # type: ignore[no-untyped-def]
        self._served_tag, tag = 0.0, self._served_tag
        super()._insert(place)
        self._served_tag = tag

    def served(self, ticket: Ticket) -> None:
        self._served_tag = 0.0
        super().served(ticket)


def test_silence_earns_nothing() -> None:
    assert hoarded(FairLine(10)) <= 2
    assert hoarded(Remembers(10)) == 5


@pytest.mark.parametrize("seed", range(10))
def test_the_line_is_bounded_and_each_entry_ends_once(seed: int) -> None:
    rng, line = random.Random(seed), FairLine[object](8)
    waiting: dict[int, tuple[object, Ticket]] = {}
    for now_s in range(300):
        entry, tenant = object(), rng.choice("aaaabc")
        ticket = Ticket(tenant, WEIGHTS[tenant], rng.randint(-3, 3), rng.randint(1, MAX_COST))
        try:
            gone = line.offer(entry, ticket, float(now_s))
        except Saturated:
            assert len(waiting) == 8
        else:
            waiting[id(entry)] = (entry, ticket)
            if gone is not None:
                assert len(waiting) == 9
                del waiting[id(gone)]
        assert len(line) == len(waiting) <= 8
        if rng.random() < 0.3:
            head = line.head()
            line.served(waiting.pop(id(head))[1])
            line.remove(head)


def test_a_full_line_has_a_place_for_who_waits_least() -> None:
    line = FairLine[str](3)
    for name in ("a1", "a2", "a3"):
        assert line.offer(name, Ticket("a"), 0.0) is None
    assert line.offer("b1", Ticket("b"), 1.0) == "a3"
    with pytest.raises(Saturated):
        line.offer("a4", Ticket("a"), 1.0)
    assert line.offer("a5", Ticket("a", priority=-5), 1.0) == "a2", "its own tenant's last, for one more urgent"
    with pytest.raises(Saturated):
        FairLine[str](0).offer("x", Ticket(), 0.0)


def test_urgency_is_worth_a_second_a_step_and_never_more() -> None:
    line = FairLine[str](9)
    line.offer("patient", Ticket(priority=5), 0.0)
    line.offer("soon", Ticket(), 4.0)
    assert line.head() == "soon"
    line.remove("soon")
    line.offer("late", Ticket(), 6.0)
    assert line.head() == "patient"
