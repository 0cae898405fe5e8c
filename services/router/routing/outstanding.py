"""What each worker has to do: what this router has given it and not heard the end of, and what others have.

A worker's own account is of a moment ago, and this router's part of it may have ended since. So what is taken from it
is only what goes beyond this router's own count at the time when it came: the work of others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from triptych.core.cache_feed import WorkerLoad
from triptych.core.ids import WorkerRef


@dataclass(slots=True)
class Debts:
    """Of one worker. `tokens` of prompts to be computed, `patches` of pictures, `sequences` under way at decode and the
    `room_tokens` that those may take."""

    tokens: int = 0
    patches: int = 0
    sequences: int = 0
    room_tokens: int = 0


NOTHING = Debts()


class Outstanding:
    """Owner of the counts. Each of the calls that add is undone once by the one beside it, whatever has become of the
    worker meanwhile."""

    def __init__(self) -> None:
        self._debts: dict[WorkerRef, Debts] = {}
        self._others: dict[WorkerRef, Debts] = {}

    def heard(self, worker: WorkerRef, load: WorkerLoad) -> None:
        """The worker has told what it has to do."""
        mine = self.of(worker)
        self._others[worker] = Debts(
            tokens=max(load.waiting_tokens - mine.tokens, 0),
            patches=max(load.waiting_patches - mine.patches, 0),
            sequences=max(load.num_decoding - mine.sequences, 0),
        )

    def forget(self, worker: WorkerRef) -> None:
        """What it has told. What this router has given it is settled by those who gave it."""
        self._others.pop(worker, None)

    def keep(self, living: Iterable[WorkerRef]) -> None:
        """Forgets what all others have told."""
        for worker in self._others.keys() - set(living):
            del self._others[worker]

    def of_others(self, worker: WorkerRef) -> Debts:
        """To be read only."""
        return self._others.get(worker, NOTHING)

    def of(self, worker: WorkerRef) -> Debts:
        """To be read only."""
        return self._debts.get(worker, NOTHING)

    def add(self, worker: WorkerRef, *, tokens: int = 0, patches: int = 0, sequences: int = 0, room: int = 0) -> None:
        debts = self._debts.setdefault(worker, Debts())
        debts.tokens += tokens
        debts.patches += patches
        debts.sequences += sequences
        debts.room_tokens += room

    def settle(
        self, worker: WorkerRef, *, tokens: int = 0, patches: int = 0, sequences: int = 0, room: int = 0
    ) -> None:
        self.add(worker, tokens=-tokens, patches=-patches, sequences=-sequences, room=-room)
        debts = self._debts[worker]
        assert min(debts.tokens, debts.patches, debts.sequences, debts.room_tokens) >= 0, "settled more than was owed"
        if debts == NOTHING:
            del self._debts[worker]
