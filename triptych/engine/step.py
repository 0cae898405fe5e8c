"""One step on its way through the runner: what it runs, what it may not lose meanwhile, and what came of it.

With a runner that looks ahead, step k+1 is built and launched while step k computes:

    turn      plan k+1 · launch k+1 · wait for k · apply k · news        plan k+2 · launch k+2 · wait for k+1 · …
    device    ───── k ─────────────▶│───────────────── k+1 ────────────────────▶│

A decoding sequence in both takes its next id from step k's sample on the device (`RunSlice.follows`). If that sample
ends the answer, what k+1 computed for it is dropped. Whatever a launched step names (pages, slots, a grant) is given
back only after that step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from triptych.engine.sequence import Sequence
from triptych.engine.slices import build_slice
from triptych.model.runner import Flight, RunOutput, RunSlice, check_coverage

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Piece:
    """One sequence's part of a step."""

    sequence: Sequence
    run: RunSlice

    @property
    def count(self) -> int:
        return len(self.run.ids)


@dataclass(slots=True, eq=False)
class Step:
    """A launched step. `afterwards` runs when it has ended, whatever came of it."""

    pieces: list[Piece]
    flight: Flight
    start_ns: int
    afterwards: list[Callable[[], None]] = field(default_factory=list)

    def names(self, sequence: Sequence) -> bool:
        return any(piece.sequence is sequence for piece in self.pieces)

    def end(self) -> None:
        """Gives back what waited for this step; what fails keeps none of the others."""
        actions, self.afterwards = self.afterwards, []
        for action in actions:
            try:
                action()
            except Exception:
                log.exception("something that waited for a step could not be given back")

    def samples(self, output: RunOutput) -> Iterator[tuple[Piece, int, int | None]]:
        """(piece, sampled id, its row in the output's logits) in order; the row is None where nothing was sampled."""
        row = 0
        for piece, token_id in zip(self.pieces, output.token_ids, strict=True):
            if token_id is None:
                yield piece, 0, None
            else:
                yield piece, token_id, row
                row += 1


def build_pieces(
    planned: Iterable[tuple[Sequence, int]], before: Step | None, refuse: Callable[[Sequence, Exception], None]
) -> list[Piece]:
    """What runs next, after the step `before` (None: nothing is under way). A sequence that cannot be put
    together, as when its embeddings do not fit its prompt, goes to `refuse`, alone."""
    places = {} if before is None else _places(before.pieces)
    pieces: list[Piece] = []
    for sequence, count in planned:
        try:
            run = build_slice(sequence, count, places.get(id(sequence)))
            check_coverage(run)
        except Exception as error:
            refuse(sequence, error)
        else:
            pieces.append(Piece(sequence, run))
    return pieces


def _places(pieces: SequenceOf[Piece]) -> dict[int, int]:
    return {id(piece.sequence): index for index, piece in enumerate(pieces)}
