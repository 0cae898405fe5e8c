"""All that a run has measured, and why what is missing is missing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

NOT_MEASURED = "it was not measured"


@dataclass(frozen=True, slots=True)
class Figures:
    """One cell in one round.

    Attributes:
        cpu_ms: CPU time of the server's processes for each request.
        server_cores, client_cores: CPU time over wall time: 1.0 is a core that is busy all the time.
        reads: how often bytes came to the client for each answer.
    """

    cpu_ms: float
    req_per_s: float
    first_p50_ms: float
    first_p99_ms: float
    server_cores: float
    client_cores: float
    reads: float
    requests: int


@dataclass(slots=True)
class Results:
    """Filled while the run goes on. `calls`: the way by which the router calls its workers.

    `rounds`: cell -> its figures, one a round. `first_ms`: arm -> times to the first
    token, of all rounds. `routing`: its keys, from virtual time."""

    rounds: dict[str, list[Figures]] = field(default_factory=dict)
    first_ms: dict[str, list[float]] = field(default_factory=dict)
    routing: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    calls: str | None = None

    def keep(self, cell: str, figures: Figures) -> None:
        self.rounds.setdefault(cell, []).append(figures)

    def median(self, cell: str, name: str) -> float | None:
        values = [float(getattr(figures, name)) for figures in self.rounds.get(cell, ())]
        return statistics.median(values) if values else None

    def paired_ratio(self, cell: str, base: str, name: str) -> float | None:
        """Median of the ratios within each round."""
        pairs = zip(self.rounds.get(cell, ()), self.rounds.get(base, ()), strict=False)
        ratios = [getattr(mine, name) / getattr(theirs, name) for mine, theirs in pairs]
        return statistics.median(ratios) if ratios else None


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
