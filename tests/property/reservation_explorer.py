"""All orders of all events in `reservation_world.py`, each state once; and which promises some order breaks."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from tests.property.reservation_scenario import DISTURBING, Event, Parts, Scenario
from tests.property.reservation_world import World

MAX_STATES = 1_000_000
SOUND = Parts()


@dataclass(slots=True)
class Report:
    """How much was seen, and how often anybody was passed; of each promise that was broken, what led there first."""

    num_states: int = 0
    num_events: int = 0
    num_rests: int = 0
    most_passed: int = 0
    broken: dict[str, tuple[Event, ...]] = field(default_factory=dict)


def breaks(scenario: Scenario, parts: Parts, promises: Collection[str]) -> bool:
    """Whether some order breaks each of these promises; ends where all are seen to be broken."""
    report = Report()
    return any(set(promises) <= report.broken.keys() for _ in _explore(scenario, parts, report, MAX_STATES))


def explore(scenario: Scenario, parts: Parts = SOUND, max_states: int = MAX_STATES) -> Report:
    """All orders of all events, depth first; each state once, rebuilt by its events.

    No event can come twice, so each order ends, and it ends at rest: where nothing is to come but what disturbs. Where
    all states at rest are as they should be, no continuation of any state can miss that.
    """
    report = Report()
    for _ in _explore(scenario, parts, report, max_states):
        pass
    return report


def _explore(scenario: Scenario, parts: Parts, report: Report, max_states: int) -> Iterator[None]:
    """Fills the report, and yields after each order."""
    seen = set[object]()
    orders: list[tuple[Event, ...]] = [()]
    while orders and len(seen) < max_states:
        world = World(scenario, parts)
        try:
            for event in orders.pop():
                world.apply(event)
            orders += _follow(world, seen, report)
        except (AssertionError, KeyError, ValueError, IndexError):
            report.broken.setdefault("no part objects", world.order)
        report.num_states = len(seen)
        yield
    assert not orders, "there are more states than may be visited"


def _follow(world: World, seen: set[object], report: Report) -> Iterator[tuple[Event, ...]]:
    """Lets always the first event come that is possible, until a state is known; yields the orders that begin with the
    others."""
    while True:
        report.num_events += 1
        key = world.key()
        if key in seen:
            return
        seen.add(key)
        possible = list(world.events())
        is_at_rest = all(event.what in DISTURBING for event in possible)
        report.num_rests += is_at_rest
        report.most_passed = max(report.most_passed, *(request.num_passed for request in world.requests))
        for promise in (*world.broken(), *(world.broken_at_rest() if is_at_rest else ())):
            report.broken.setdefault(promise, world.order)
        if not possible:
            return
        for event in possible[1:]:
            yield (*world.order, event)
        world.apply(possible[0])
