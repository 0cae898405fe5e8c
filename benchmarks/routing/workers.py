"""Workers in virtual time. Their caches are the product's own (cache manager, radix tree, journal); what
takes time is modelled by rates:

    encoder   one picture after the other; one that is cached takes none, one under way serves all who ask for it
    prefill   one prompt after the other, the first whose pictures are all there; then what is not cached
    decode    each answer by itself, slower the more there are
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from benchmarks.routing.clock import Timeline
from triptych.core.cache_feed import Holding, WorkerLoad, number_of
from triptych.core.expansion import expand
from triptych.core.plan import Item, Plan
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.kv.journal import Journal
from triptych.kv.manager import CacheManager
from triptych.mm.sentinels import item_sentinels

PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Rates:
    """Of the bundled model on one core of the machine of `benchmarks/results` (the workers' own measurements there)."""

    tokens_per_s: float = 16_000.0
    patches_per_s: float = 20_000.0
    prompt_s: float = 0.002
    picture_s: float = 0.002
    step_s: float = 0.002
    step_s_per_sequence: float = 0.0004


@dataclass(frozen=True, slots=True)
class Sizes:
    """`landed_items` and `encoded_items` bound the caches of embeddings, in pictures."""

    num_pages: int = 1500
    landed_items: int = 16
    encoded_items: int = 40


@dataclass(eq=False)
class Task:
    """One request at the workers."""

    plan: Plan
    arrived_s: float
    ids: list[int]
    missing: set[bytes] = field(default_factory=set)
    withheld: set[bytes] = field(default_factory=set)
    first_token_s: float = 0.0

    @classmethod
    def of(cls, plan: Plan, now_s: float) -> Task:
        fills = [item_sentinels(item.identity, item.num_tokens) for item in plan.items]
        return cls(plan, now_s, np.asarray(expand(plan.compact_ids, plan.items, fills)).tolist())


class Recency:
    """The embeddings that a worker keeps: the least recently used goes first."""

    def __init__(self, capacity: int, journal: Journal, holding: Holding) -> None:
        self._capacity = capacity
        self._journal = journal
        self._holding = holding
        self._kept: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._kept

    def use(self, identity: bytes) -> None:
        if identity not in self._kept:
            self._journal.stored(self._holding, number_of(identity))
        self._kept[identity] = None
        self._kept.move_to_end(identity)
        while len(self._kept) > self._capacity:
            gone = self._kept.popitem(last=False)[0]
            self._journal.removed(self._holding, number_of(gone))


class Encoder:
    def __init__(self, name: str, clock: Timeline, rates: Rates, sizes: Sizes) -> None:
        self.info = _info(name, Role.ENCODER, 0)
        self.journal = Journal(1)
        self._clock = clock
        self._rates = rates
        self._cache = Recency(sizes.encoded_items, self.journal, Holding.ENCODED)
        self._flights: dict[bytes, list[Callable[[], None]]] = {}
        self._queue: list[Item] = []
        self._is_busy = False
        self.num_encoded = 0

    def load(self) -> WorkerLoad:
        waiting = sum(_patches(item) for item in self._queue)
        return WorkerLoad(waiting_patches=waiting, patches_per_s=self._rates.patches_per_s)

    def encode(self, item: Item, done: Callable[[], None]) -> None:
        if item.identity in self._cache:
            self._cache.use(item.identity)
            self._clock.after(0.0, done)
        elif item.identity in self._flights:
            self._flights[item.identity].append(done)
        else:
            self._flights[item.identity] = [done]
            self._queue.append(item)
            self._next()

    def _next(self) -> None:
        if self._is_busy or not self._queue:
            return
        self._is_busy = True
        item = self._queue[0]
        self._clock.after(self._rates.picture_s + _patches(item) / self._rates.patches_per_s, self._encoded)

    def _encoded(self) -> None:
        item = self._queue.pop(0)
        self.num_encoded += 1
        self._cache.use(item.identity)
        self._is_busy = False
        for done in self._flights.pop(item.identity):
            done()
        self._next()


class Prefill:
    """`admitted(task, missing)` is told when a prompt's turn has come and pictures of it are on nobody's way."""

    def __init__(self, name: str, clock: Timeline, rates: Rates, sizes: Sizes) -> None:
        self.info = _info(name, Role.PREFILL, sizes.num_pages)
        self.journal = Journal(1)
        self._clock = clock
        self._rates = rates
        self._manager = CacheManager(sizes.num_pages, PAGE_TOKENS, journal=self.journal)
        self._landed = Recency(sizes.landed_items, self.journal, Holding.LANDED)
        self._queue: list[tuple[Task, Callable[[], None], Callable[[set[bytes]], None]]] = []
        self._is_busy = False

    def load(self) -> WorkerLoad:
        waiting = sum(len(task.ids) - self._manager.match_tokens(b"", task.ids) for task, _, _ in self._queue)
        return WorkerLoad(waiting_tokens=waiting, free_pages=None, tokens_per_s=self._rates.tokens_per_s)

    def lacking(self, task: Task) -> set[bytes]:
        """What an encoder that asks would be told to send."""
        cached = self._manager.match_tokens(b"", task.ids)
        return {item.identity for item in task.plan.items if item.end > cached and item.identity not in self._landed}

    def submit(self, task: Task, done: Callable[[], None], admitted: Callable[[set[bytes]], None]) -> None:
        """`task.missing` are the pictures on their way, `task.withheld` those that nobody was asked for."""
        self._queue.append((task, done, admitted))
        self.look()

    def land(self, task: Task, identity: bytes) -> None:
        self._landed.use(identity)
        task.missing.discard(identity)
        self.look()

    def look(self) -> None:
        """Begins the first prompt that has all its pictures."""
        if self._is_busy:
            return
        for entry in list(self._queue):
            task, done, admitted = entry
            if task.withheld:
                lost = task.withheld & self.lacking(task)
                task.withheld = set()
                if lost:
                    task.missing |= lost
                    admitted(lost)
            if not task.missing:
                self._queue.remove(entry)
                self._begin(task, done)
                return

    def _begin(self, task: Task, done: Callable[[], None]) -> None:
        self._is_busy = True
        pages = self._manager.reserve(b"", task.ids, len(task.ids))
        assert pages is not None, "the pool is too small for one prompt"
        new_tokens = len(task.ids) - pages.cached_tokens

        def end() -> None:
            self._manager.share(pages, task.ids, len(task.ids))
            self._manager.release(pages)
            self._is_busy = False
            done()
            self.look()

        self._clock.after(self._rates.prompt_s + new_tokens / self._rates.tokens_per_s, end)


class Decode:
    def __init__(self, name: str, clock: Timeline, rates: Rates, sizes: Sizes) -> None:
        self.info = _info(name, Role.DECODE, sizes.num_pages)
        self.journal = Journal(1)
        self._clock = clock
        self._rates = rates
        self._manager = CacheManager(sizes.num_pages, PAGE_TOKENS, journal=self.journal)
        self._num_running = 0

    def load(self) -> WorkerLoad:
        return WorkerLoad(free_pages=self._manager.num_available, num_decoding=self._num_running)

    def answer(self, task: Task, answer_ids: tuple[int, ...], done: Callable[[], None]) -> None:
        ids = [*task.ids, *answer_ids]
        pages = self._manager.reserve(b"", ids, len(ids))
        self._num_running += 1

        def end() -> None:
            self._num_running -= 1
            if pages is not None:
                self._manager.share(pages, ids, len(ids))
                self._manager.release(pages)
            done()

        step_s = self._rates.step_s + self._rates.step_s_per_sequence * self._num_running
        self._clock.after(len(answer_ids) * step_s, end)


def _info(name: str, role: Role, num_pages: int) -> WorkerInfo:
    page_tokens = PAGE_TOKENS if num_pages else 0
    state = WorkerState.READY
    return WorkerInfo(name, 1, frozenset({role}), state, "127.0.0.1:1", num_pages=num_pages, page_tokens=page_tokens)


def _patches(item: Item) -> int:
    return item.grid.t * item.grid.h * item.grid.w
