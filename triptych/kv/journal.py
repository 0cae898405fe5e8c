"""What changed in a worker's caches, kept until whoever listens has heard of it.

    engine's thread ── stored, removed ──► pending ── cut() ──► batch n ──► the last MAX_BATCHES of them ──► listeners
                                    └────► present: for those who begin anew

The caches' owners write, whatever thread they are on; one publisher cuts. Nobody ever waits for a listener: one that is
too slow finds its place in the journal gone, and begins anew from what is present.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping

from triptych.core.cache_feed import Change, FeedKind, FeedMessage, Holding, WorkerLoad

MAX_BATCHES = 256
MAX_NUMBERS = 10_000
"""In one message: a millisecond of the listener's event loop."""

Changes = Mapping[Holding, Change]


class Journal:
    """Of one worker process. `stored` and `removed` are for the owners of caches, the rest for the publisher."""

    def __init__(self, epoch: int, max_batches: int = MAX_BATCHES) -> None:
        self._epoch = epoch
        self._lock = threading.Lock()
        self._present: dict[Holding, set[int]] = {holding: set() for holding in Holding}
        self._pending: dict[tuple[Holding, int], bool] = {}
        self._batches: deque[FeedMessage] = deque(maxlen=max_batches)
        self._sequence = 0
        self._load: WorkerLoad | None = None

    def stored(self, holding: Holding, number: int) -> None:
        with self._lock:
            self._present[holding].add(number)
            self._pending[holding, number] = True

    def removed(self, holding: Holding, number: int) -> None:
        with self._lock:
            self._present[holding].discard(number)
            self._pending[holding, number] = False

    @property
    def sequence(self) -> int:
        """Of the last batch that was cut."""
        return self._sequence

    def cut(self, load: WorkerLoad) -> bool:
        """Makes a batch of what has happened since the last one. False when nothing has."""
        with self._lock:
            pending, self._pending = self._pending, {}
        parts = list(_parts(pending))
        news = None if load == self._load else load
        if news is not None and not parts:
            parts.append({})
        for changes in parts:
            self._sequence += 1
            self._batches.append(FeedMessage(self._epoch, self._sequence, FeedKind.DELTA, changes, news))
        self._load = load
        return bool(parts)

    def since(self, sequence: int) -> list[FeedMessage] | None:
        """The batches after that one; None when some of them are gone, or it is none of this journal's."""
        if not self._sequence - len(self._batches) <= sequence <= self._sequence:
            return None
        return [batch for batch in self._batches if batch.sequence > sequence]

    def snapshot(self) -> list[FeedMessage]:
        """All that is present, as the messages of one sequence. The next batch that is cut comes after it, and may say
        some of it again."""
        with self._lock:
            present = {(holding, number): True for holding, numbers in self._present.items() for number in numbers}
        parts = list(_parts(present)) or [{}]
        kinds = [FeedKind.SNAPSHOT, *[FeedKind.PART] * (len(parts) - 1)]
        return [
            FeedMessage(self._epoch, self._sequence, kind, changes, self._load)
            for kind, changes in zip(kinds, parts, strict=True)
        ]


def _parts(states: Mapping[tuple[Holding, int], bool]) -> Iterator[dict[Holding, Change]]:
    """In messages of at most MAX_NUMBERS, in order."""
    entries = list(states.items())
    for start in range(0, len(entries), MAX_NUMBERS):
        yield _changes(entries[start : start + MAX_NUMBERS])


def _changes(entries: list[tuple[tuple[Holding, int], bool]]) -> dict[Holding, Change]:
    made: dict[Holding, tuple[list[int], list[int]]] = {}
    for (holding, number), is_present in entries:
        stored, removed = made.setdefault(holding, ([], []))
        (stored if is_present else removed).append(number)
    return {holding: Change(tuple(stored), tuple(removed)) for holding, (stored, removed) in made.items()}
