"""Room for answers that grow: who gives pages up when there are none left, and when it comes back.

Owned by the step loop, whose sequences it moves, and used on its thread only. `triptych.sched.retraction` decides who.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from triptych.core.clock import Clock
from triptych.core.ids import AttemptRef
from triptych.core.lifecycle import Phase, advance
from triptych.engine.listeners import was_told
from triptych.engine.parking import CopyLost, Parking
from triptych.engine.residency import Residency
from triptych.engine.sequence import Sequence
from triptych.obs import metrics
from triptych.sched.retraction import most_junior


@dataclass(frozen=True, slots=True)
class Seats:
    """What the step loop lends.

    Attributes:
        running: the sequences that hold a reservation; changed here too.
        living: all, by attempt.
        settle: waits for the step under way and applies it, so that no step names anything; False when none was.
        drop: ends a sequence in a terminal phase and gives back what it holds.
    """

    running: list[Sequence]
    living: Mapping[AttemptRef, Sequence]
    settle: Callable[[], bool]
    drop: Callable[[Sequence, Phase], None]

    @property
    def decoding(self) -> list[Sequence]:
        return [sequence for sequence in self.running if sequence.phase is Phase.DECODING]

    def leave(self, sequence: Sequence) -> None:
        self.running[:] = [other for other in self.running if other is not sequence]


class Retraction:
    """Moves sequences out of the pool and back."""

    def __init__(self, seats: Seats, residency: Residency, parking: Parking, page_tokens: int, clock: Clock) -> None:
        self._seats = seats
        self._residency = residency
        self._parking = parking
        self._page_tokens = page_tokens
        self._clock = clock
        self._asked: dict[AttemptRef, Callable[[Sequence], None]] = {}

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for the pages that were taken from them."""
        return len(self._parking)

    @property
    def host_pool_bytes(self) -> int:
        return self._parking.num_bytes

    def ask(self, ref: AttemptRef) -> bool:
        """At the next `do_asked` the sequence loses its pages; False when no such sequence decodes."""
        return self._ask(ref, self._retract)

    def ask_for_replay(self, ref: AttemptRef) -> bool:
        return self._ask(ref, self._give_back)

    def make_room(self) -> bool:
        """Everyone that decodes gets the page for its next token, if need be from the most junior among them. True when
        somebody has to wait for what those hold that do not decode yet."""
        while self._grow():
            decoding = self._seats.decoding
            junior = most_junior([sequence.standing for sequence in decoding])
            if junior is None:
                return True
            # What a step under way names cannot be moved; and it may end somebody, or add one that decodes.
            if not self._seats.settle():
                self._retract(decoding[junior])
        return False

    def bring_back(self, max_sequences: int) -> None:
        """Those that gave up their pages come back, in order of seniority, when there is room."""
        now_ns = self._clock.monotonic_ns()
        while self.num_waiting and len(self._seats.running) < max_sequences:
            try:
                sequence = self._parking.unpark(spare_pages=len(self._seats.decoding))
            except CopyLost as lost:
                self._replay(lost.sequence)
                continue
            if sequence is None:
                return
            sequence.phase, sequence.ran_ns = advance(sequence.phase, Phase.DECODING), now_ns
            self._seats.running.append(sequence)

    def do_asked(self) -> bool:
        """True when somebody was retracted because it was asked for."""
        if self._asked:
            self._seats.settle()  # which may meet a bug, or end those who asked: then the others are asked again
        asked, self._asked = self._asked, {}
        found = [(self._seats.living.get(ref), retract) for ref, retract in asked.items()]
        living = [(each, retract) for each, retract in found if each is not None and each.phase is Phase.DECODING]
        for sequence, retract in living:
            retract(sequence)
        return bool(living)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended, wherever it was."""
        self._parking.forget(sequence)

    def _ask(self, ref: AttemptRef, retract: Callable[[Sequence], None]) -> bool:
        sequence = self._seats.living.get(ref)
        if sequence is None or sequence.phase is not Phase.DECODING:
            return False
        self._asked[ref] = retract
        return True

    def _grow(self) -> list[Sequence]:
        """Those whose next token has no page; the most senior get what there is."""
        needy = [each for each in self._seats.running if not each.has_room(self._page_tokens) and each.may_decode]
        needy.sort(key=lambda sequence: sequence.standing.seniority)
        return [sequence for sequence in needy if not self._residency.grow(sequence)]

    def _retract(self, sequence: Sequence) -> None:
        """Its KV waits on the host, or if that is full, it must be replayed. No step is under way that names it."""
        if not self._parking.park(sequence, self._clock.monotonic_ns()):
            self._give_back(sequence)
            return
        metrics.RETRACTIONS.labels("host_pool").inc()
        sequence.num_parked += 1
        sequence.phase = advance(sequence.phase, Phase.RETRACTED)
        self._seats.leave(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        """The router replays it. What others may use of its KV stays in the cache: the replay too may find it there."""
        self._residency.answered(sequence)
        self._replay(sequence)

    def _replay(self, sequence: Sequence) -> None:
        """Ends it here. Nothing of what its pages hold now is kept for others."""
        metrics.RETRACTIONS.labels("replay").inc()
        self._seats.drop(sequence, Phase.ABORTED)
        was_told(sequence.sink.retracted)
