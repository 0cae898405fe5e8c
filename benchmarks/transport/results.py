"""All that a run has measured, and why what is missing is missing."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from benchmarks.transport.cells import Comparison
from benchmarks.transport.in_cluster import Handoff, Hidden

NOT_MEASURED = "it was not measured"


@dataclass(frozen=True, slots=True)
class Turn:
    """One arm's turn at one size.

    Attributes:
        round_trip_s: median over transfers, one at a time: from having bytes and where they go to knowing that the
            receiver has them.
        prepare_s: median of what comes before there are bytes; with ours, until a slot is granted.
        bytes_per_s: of a stream, in which several transfers are under way, with all that each needs.
    """

    round_trip_s: float
    prepare_s: float
    bytes_per_s: float


@dataclass(slots=True)
class Results:
    """Filled while the run goes on.

    Attributes:
        turns: (arm, bytes) -> round -> turn.
        missing: arm -> why it has no figures, or misses some.
        notes: key -> why a figure of the cluster is missing.
    """

    turns: dict[tuple[str, int], dict[int, Turn]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    handoff: Handoff | None = None
    hidden: Hidden | None = None

    def keep(self, arm: str, num_bytes: int, number: int, turn: Turn) -> None:
        self.turns.setdefault((arm, num_bytes), {})[number] = turn

    def of(self, arm: str, num_bytes: int) -> Turn | None:
        """The medians over rounds."""
        turns = self.turns.get((arm, num_bytes))
        if not turns:
            return None
        return Turn(
            statistics.median(turn.round_trip_s for turn in turns.values()),
            statistics.median(turn.prepare_s for turn in turns.values()),
            statistics.median(turn.bytes_per_s for turn in turns.values()),
        )

    def speed_over(self, comparison: Comparison) -> float | None:
        """Median over rounds of the two arms' bytes/s in the same round; None where they had no round in common."""
        assert comparison.base is not None
        mine = self.turns.get((comparison.arm, comparison.num_bytes), {})
        theirs = self.turns.get((comparison.base, comparison.num_bytes), {})
        ratios = [mine[number].bytes_per_s / theirs[number].bytes_per_s for number in mine.keys() & theirs.keys()]
        return statistics.median(ratios) if ratios else None

    def why_missing(self, arm: str) -> str:
        return self.missing.get(arm, NOT_MEASURED)
