"""What each worker holds, by its own account. Fed by the workers (`core/cache_feed.py`), read by the picker.

A feed is followed from a snapshot on, delta by delta:

    unknown ── SNAPSHOT ──► synced ── the next DELTA ──► synced
       ▲                      │
       └── a sequence is missing: all is forgotten, and the feed must be asked for a snapshot

The index may be behind or wrong: it says where to ask, and workers compare ids and identities themselves. Nobody waits
for it. It is bounded: of one worker it takes in no more than `max_entries`; what is beyond is not found.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from triptych.core.cache_feed import FeedKind, FeedMessage, Holding, WorkerLoad
from triptych.core.ids import WorkerRef

MAX_ENTRIES = 1_000_000
"""Of one worker: 16 million tokens in pages of 16, some 100 MB here."""


class Applied(enum.Enum):
    """DONE: it is part of the index. OLD: it was before. GAP: something is missing in between; ask for a snapshot.
    FOREIGN: it is another process's."""

    DONE = "done"
    OLD = "old"
    GAP = "gap"
    FOREIGN = "foreign"


@dataclass(slots=True)
class _Account:
    """Of one worker process. `sequence` is None until a snapshot has come."""

    sequence: int | None = None
    load: WorkerLoad | None = None
    held: dict[Holding, set[int]] = field(default_factory=lambda: {holding: set() for holding in Holding})
    num_refused: int = 0

    def forget(self) -> None:
        self.sequence, self.load = None, None
        for numbers in self.held.values():
            numbers.clear()


class CacheIndex:
    """Owner of what is known of all workers. Used from one thread."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._accounts: dict[WorkerRef, _Account] = {}

    def apply(self, worker: WorkerRef, message: FeedMessage) -> Applied:
        """Takes one message of a worker's feed in, in whatever order they come."""
        if message.epoch != worker.epoch:
            return Applied.FOREIGN
        account = self._accounts.setdefault(worker, _Account())
        outcome = _outcome(account, message)
        if outcome is Applied.GAP:
            account.forget()
        if outcome is not Applied.DONE:
            return outcome
        if message.kind is FeedKind.SNAPSHOT:
            account.forget()
        account.sequence = message.sequence
        account.load = message.load or account.load
        self._take(account, message)
        return outcome

    def keep(self, living: Iterable[WorkerRef]) -> None:
        """Forgets all workers but those."""
        for worker in self._accounts.keys() - set(living):
            del self._accounts[worker]

    def lost_feed(self, worker: WorkerRef) -> None:
        """Nothing is heard of the worker any more: what it holds is not known until its next snapshot."""
        self._accounts.pop(worker, None)

    def is_synced(self, worker: WorkerRef) -> bool:
        account = self._accounts.get(worker)
        return account is not None and account.sequence is not None

    def sequence(self, worker: WorkerRef) -> int | None:
        """Of the last message taken in."""
        account = self._accounts.get(worker)
        return None if account is None else account.sequence

    def load(self, worker: WorkerRef) -> WorkerLoad | None:
        account = self._accounts.get(worker)
        return None if account is None else account.load

    def num_entries(self, worker: WorkerRef) -> int:
        account = self._accounts.get(worker)
        return 0 if account is None else sum(map(len, account.held.values()))

    def num_pages(self, worker: WorkerRef, numbers: Sequence[int]) -> int:
        """How many pages of a prompt, from its beginning on, the worker holds; `numbers` are the chain of its pages.

        A worker that holds a page holds those before it, so the last one is found by halving: 13 look-ups for 100,000
        tokens.
        """
        account = self._accounts.get(worker)
        if account is None:
            return 0
        held, low, high = account.held[Holding.PAGE], 0, len(numbers)
        if not high or numbers[0] not in held:
            return 0
        while low < high:
            middle = (low + high) // 2
            if numbers[middle] in held:
                low = middle + 1
            else:
                high = middle
        return low

    def holds(self, worker: WorkerRef, holding: Holding, number: int) -> bool:
        account = self._accounts.get(worker)
        return account is not None and number in account.held[holding]

    def _take(self, account: _Account, message: FeedMessage) -> None:
        room = self._max_entries - sum(map(len, account.held.values()))
        for holding, change in message.changes.items():
            held = account.held[holding]
            before = len(held)
            held.difference_update(change.removed)
            room += before - len(held)
            if len(change.stored) <= room:
                before = len(held)
                held.update(change.stored)
                room -= len(held) - before
            else:
                account.num_refused += len(change.stored)


def _outcome(account: _Account, message: FeedMessage) -> Applied:
    if message.kind is FeedKind.SNAPSHOT:
        return Applied.DONE
    if account.sequence is None:
        return Applied.GAP
    following = account.sequence + (message.kind is FeedKind.DELTA)
    if message.sequence == following:
        return Applied.DONE
    return Applied.OLD if message.sequence < following else Applied.GAP
