"""Who is next for room in the cluster: tenants in turn by their weights, and within each by urgency and arrival. Pure;
times are passed in.

Between tenants it is start-time fair queueing (Goyal, Vin and Cheng, "Start-time Fair Queuing", SIGCOMM 1996): each
tenant has a tag, what it was served so far over its weight. The least tag is next.

    tag                 weight 1         weight 2: half as far for the same cost
    0 ── a ──► 100 ── a ──► 200          0 ── b ──► 50 ── b ──► 100

A tenant that comes back starts at the tag that is being served: its silence earns it nothing, and it waits for nobody's
past. While two tenants wait all the time, what each was served over its weight differs by at most one request of each.

Within a tenant the line goes by arrival, put back or forth by `PRIORITY_S` for each step of priority: who arrived so
much later never passes, so nobody starves.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from triptych.core.errors import Saturated

T = TypeVar("T")

PRIORITY_S = 1.0


@dataclass(frozen=True, slots=True)
class Ticket:
    """Of one request. `cost`: what it takes, in tokens; the lower its `priority`, the more urgent."""

    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    cost: float = 1.0


@dataclass(frozen=True, slots=True, order=True)
class _Place(Generic[T]):
    """Sorted by when it counts as arrived, then by order of arrival."""

    at_s: float
    number: int
    entry: T = field(compare=False)
    ticket: Ticket = field(compare=False)
    is_firm: bool = field(compare=False)


class FairLine(Generic[T]):
    """Owner of the order. Entries are told apart by identity."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._places: dict[str, list[_Place[T]]] = {}  # of tenants that wait
        self._tags: dict[str, float] = {}
        self._served_tag = 0.0
        self._num_joined = 0

    def __len__(self) -> int:
        return sum(len(places) for places in self._places.values())

    def offer(self, entry: T, ticket: Ticket, now_s: float) -> T | None:
        """Puts it into the line, and names who must leave a full one for it, if anybody: the last of the tenant that
        has most waiting for its weight. Raises Saturated when that is the entry itself."""
        place = self._place(entry, ticket, now_s, is_firm=False)
        gone = self._to_displace(place) if len(self) >= self._max_waiting else None
        if gone is place:
            raise Saturated(f"{len(self)} requests wait for room in the cluster already; try again later")
        if gone is not None:
            self.remove(gone.entry)
        self._insert(place)
        return gone.entry if gone else None

    def join(self, entry: T, ticket: Ticket, now_s: float) -> None:
        """Puts it into the line, full or not, for good."""
        self._insert(self._place(entry, ticket, now_s, is_firm=True))

    def head(self) -> T:
        """Of a line that is not empty."""
        tenant = min(self._places, key=lambda name: (self._tags[name], self._places[name][0]))
        return self._places[tenant][0].entry

    def remove(self, entry: T) -> None:
        for tenant, places in self._places.items():
            for index, place in enumerate(places):
                if place.entry is entry:
                    del places[index]
                    if not places:
                        del self._places[tenant]
                        self._forget()
                    return

    def served(self, ticket: Ticket) -> None:
        """Room was found for it, whether or not it stood in the line."""
        tag = max(self._tags.get(ticket.tenant, 0.0), self._served_tag)
        self._served_tag = tag
        self._tags[ticket.tenant] = tag + ticket.cost / ticket.weight
        self._forget()

    def _place(self, entry: T, ticket: Ticket, now_s: float, *, is_firm: bool) -> _Place[T]:
        self._num_joined += 1
        return _Place(now_s + PRIORITY_S * ticket.priority, self._num_joined, entry, ticket, is_firm)

    def _insert(self, place: _Place[T]) -> None:
        tenant = place.ticket.tenant
        if tenant not in self._places:
            self._tags[tenant] = max(self._tags.get(tenant, 0.0), self._served_tag)
        bisect.insort(self._places.setdefault(tenant, []), place)

    def _to_displace(self, newcomer: _Place[T]) -> _Place[T]:
        """The newcomer itself where nobody else should go."""
        mine = newcomer.ticket.tenant
        lines = {name: [place for place in places if not place.is_firm] for name, places in self._places.items()}
        lines[mine] = sorted([*lines.get(mine, []), newcomer])
        loads = {name: len(line) / line[-1].ticket.weight for name, line in lines.items() if line}
        fullest = max(loads, key=lambda name: (loads[name], name == mine))
        return lines[fullest][-1]

    def _forget(self) -> None:
        """Tags that say nothing any more."""
        if not self._places:
            self._tags = {name: tag for name, tag in self._tags.items() if tag > self._served_tag}
