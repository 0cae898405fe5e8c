"""What this router has given to each worker and not heard the end of."""

from __future__ import annotations

from dataclasses import dataclass

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
