"""A worker that admits, in virtual time: requests come, reserve pages and landing room, and end; what the queue owes.

The promises are those of `triptych/sched/admission.py`, stated here from outside.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tests.property.promises import Broken, promise
from triptych.sched.admission import AdmissionQueue, Ticket

MAX_BYPASS = 3
MAX_WAIT_S = 10.0
MAX_TURNS = 5000


@dataclass(frozen=True, eq=False)
class Demand:
    """A request. `pages` and `slots` are what it reserves, `runs_s` how long it keeps them."""

    name: int
    arrives_s: int
    num_tokens: int
    pages: int
    slots: int
    runs_s: int
    priority: int = 0

    @property
    def ticket(self) -> Ticket:
        return Ticket(self.num_tokens, self.arrives_s * 10**9, self.priority)


class Queue(Protocol):
    def push(self, request: Demand, ticket: Ticket) -> None: ...
    def admit(self, reserve: Callable[[Demand], bool], max_admissions: int, now_ns: int) -> list[Demand]: ...


class Pool:
    """Pages and landing room. `reserve` takes both or neither."""

    def __init__(self, pages: int, slots: int) -> None:
        self.pages, self.slots = pages, slots

    def reserve(self, demand: Demand) -> bool:
        if demand.pages > self.pages or demand.slots > self.slots:
            return False
        self.pages -= demand.pages
        self.slots -= demand.slots
        return True

    def release(self, demand: Demand) -> None:
        self.pages += demand.pages
        self.slots += demand.slots


class PoolInSteps(Pool):
    """Broken: keeps one of the two while it waits for the other; some requests begin with pages, some with slots."""

    def __init__(self, pages: int, slots: int) -> None:
        super().__init__(pages, slots)
        self.half: set[int] = set()

    def reserve(self, demand: Demand) -> bool:
        first, second = ("slots", "pages") if demand.name % 2 else ("pages", "slots")
        if demand.name not in self.half:
            if getattr(demand, first) > getattr(self, first):
                return False
            setattr(self, first, getattr(self, first) - getattr(demand, first))
            self.half.add(demand.name)
        if getattr(demand, second) > getattr(self, second):
            return False
        setattr(self, second, getattr(self, second) - getattr(demand, second))
        return True


@dataclass
class Simulation:
    """One turn a second: what has run long enough ends, what is due arrives, the queue admits."""

    queue: Queue
    pool: Pool
    demands: Sequence[Demand]
    max_admissions: int = 4
    waiting: list[Demand] = field(default_factory=list)
    running: list[tuple[int, Demand]] = field(default_factory=list)
    passed: dict[int, int] = field(default_factory=dict)

    def run(self) -> None:
        """Until all have ended. Raises Broken."""
        coming = sorted(self.demands, key=lambda demand: demand.arrives_s)
        for now_s in range(MAX_TURNS):
            for _, demand in [entry for entry in self.running if entry[0] <= now_s]:
                self.pool.release(demand)
            self.running = [entry for entry in self.running if entry[0] > now_s]
            while coming and coming[0].arrives_s <= now_s:
                self._push(coming.pop(0))
            self._admit(now_s)
            if not (coming or self.waiting or self.running):
                return
        raise Broken("somebody never got in")

    def _push(self, demand: Demand) -> None:
        self.waiting.append(demand)
        self.passed[demand.name] = 0
        self.queue.push(demand, demand.ticket)

    def _admit(self, now_s: int) -> None:
        admitted = self.queue.admit(self.pool.reserve, self.max_admissions, now_s * 10**9)
        promise(len(admitted) <= self.max_admissions, "no more than may get in")
        for demand in admitted:
            place = self.waiting.index(demand)
            for earlier in self.waiting[:place]:
                self._note_pass(earlier, demand, now_s)
            self._check_urgency(demand, now_s)
            self.waiting.pop(place)
            self.running.append((now_s + demand.runs_s, demand))
        if len(admitted) < self.max_admissions and not self._anybody_bars(now_s):
            fits = [one for one in self.waiting if one.pages <= self.pool.pages and one.slots <= self.pool.slots]
            promise(not fits, "who fits gets in, unless somebody may be passed no more")

    def _note_pass(self, earlier: Demand, winner: Demand, now_s: int) -> None:
        promise(now_s - earlier.arrives_s < MAX_WAIT_S, "nobody passes one who has waited long enough")
        if earlier.priority <= winner.priority:
            self.passed[earlier.name] += 1
            promise(self.passed[earlier.name] <= MAX_BYPASS, "somebody was passed too often")

    def _check_urgency(self, winner: Demand, now_s: int) -> None:
        """A more urgent one that would have fitted beside it is not left behind, but by one who waited long enough."""
        if now_s - winner.arrives_s >= MAX_WAIT_S:
            return
        for other in self.waiting:
            fits = other.pages <= winner.pages and other.slots <= winner.slots
            promise(other.priority >= winner.priority or not fits, "the more urgent goes first")
            is_shorter = other.num_tokens < winner.num_tokens and other.arrives_s <= winner.arrives_s
            is_equal = other.priority == winner.priority and self.passed[winner.name] < MAX_BYPASS
            promise(not (fits and is_shorter and is_equal), "the shorter goes first")

    def _anybody_bars(self, now_s: int) -> bool:
        return any(self.passed[one.name] >= MAX_BYPASS or now_s - one.arrives_s >= MAX_WAIT_S for one in self.waiting)


@dataclass
class World:
    """Where an interleaving has come to: who is still to come, who waits, and who runs."""

    queue: AdmissionQueue[Demand]
    pool: Pool
    coming: tuple[Demand, ...]
    waiting: frozenset[Demand]
    running: frozenset[Demand]
    steps: int = 0

    def moves(self) -> Iterator[World]:
        """Each thing that may happen next: one comes, one that runs ends; the engine admits after either."""
        for demand in self.coming:
            yield self._after(demand, None)
        for demand in self.running:
            yield self._after(None, demand)

    def _after(self, comes: Demand | None, ends: Demand | None) -> World:
        queue, pool = copy.copy(self.queue), copy.copy(self.pool)
        queue._waiting = [copy.copy(entry) for entry in self.queue._waiting]
        if isinstance(pool, PoolInSteps):
            pool.half = set(pool.half)
        waiting, running = set(self.waiting), set(self.running)
        now_ns = self.steps * 3 * 10**9
        if comes is not None:
            queue.push(comes, Ticket(comes.num_tokens, now_ns, comes.priority))
            waiting.add(comes)
        if ends is not None:
            running.remove(ends)
            pool.release(ends)
        for demand in queue.admit(pool.reserve, 4, now_ns):
            waiting.remove(demand)
            running.add(demand)
        coming = tuple(one for one in self.coming if one is not comes)
        return World(queue, pool, coming, frozenset(waiting), frozenset(running), self.steps + 1)


def explore(pool: Pool, demands: Sequence[Demand]) -> int:
    """All interleavings of arrivals and ends. Returns how many; raises Broken where one leaves somebody waiting."""
    ends = 0
    open_worlds = [World(AdmissionQueue(1, MAX_WAIT_S), pool, tuple(demands), frozenset(), frozenset())]
    while open_worlds:
        world = open_worlds.pop()
        following = list(world.moves())
        if not following:
            promise(not world.waiting, "a deadlock: somebody waits and nothing runs")
            whole = (pool.pages, pool.slots)
            promise((world.pool.pages, world.pool.slots) == whole, "what was reserved did not all come back")
            ends += 1
        open_worlds += following
    return ends


def small_worlds(num_requests: int, pages: int, slots: int) -> Iterator[list[Demand]]:
    """All demands of that many requests on that pool: each at least one page, each fits the empty pool."""
    shapes = list(itertools.product(range(1, pages + 1), range(slots + 1), (0, 1)))
    for chosen in itertools.product(shapes, repeat=num_requests):
        yield [
            Demand(name, 0, 10 * page_count, page_count, slot_count, 1, priority)
            for name, (page_count, slot_count, priority) in enumerate(chosen)
        ]
