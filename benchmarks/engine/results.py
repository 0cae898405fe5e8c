"""All that a run has measured, and why what is missing is missing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.engine.cells import Cell
from benchmarks.engine.samples import Figures, over_rounds

Place = tuple[str, str, int]
"""(case, workload, concurrency)"""


@dataclass(slots=True)
class Results:
    """Filled while the run goes on.

    Attributes:
        missing: (arm, case) -> why that arm has no figures at all, or misses some.
        commands: (arm, case) -> how it was started.
        peaks: (arm, case) -> bytes.
        answers: texts of the first round, for telling whether arms answer alike.
        weights: case -> bytes of weights that one token reads; `kv` of KV that one token of context adds.
        triad: bytes/s of memory with as many threads; None if it was not measured.
    """

    rounds: dict[tuple[str, Place], list[Figures]] = field(default_factory=lambda: defaultdict(list))
    missing: dict[tuple[str, str], str] = field(default_factory=dict)
    commands: dict[tuple[str, str], str] = field(default_factory=dict)
    peaks: dict[tuple[str, str], int] = field(default_factory=dict)
    answers: dict[tuple[str, Place], list[str]] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    kv: dict[str, int] = field(default_factory=dict)
    triad_bytes_per_s: float | None = None
    experiments: dict[str, object] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def figures(self, arm: str, case: str, workload: str, concurrency: int) -> Figures | None:
        rounds = self.rounds.get((arm, (case, workload, concurrency)))
        return over_rounds(rounds) if rounds else None

    def why_missing(self, arm: str, case: str) -> str:
        return self.missing.get((arm, case)) or self.missing.get((arm, "")) or "it was not measured"


def place(cell: Cell) -> Place:
    return (cell.case, cell.workload, cell.concurrency)


def bandwidth_share(
    figures: Figures, concurrency: int, weights: int, kv_per_token: int, triad: float | None
) -> Mapping[str, float]:
    """The bytes that a decode step has to read, over what memory could give in its time: weights once for all
    sequences, and the KV of each at the middle of its answer."""
    if triad is None or not figures.tpot_p50_ms > 0:
        return {}
    context = figures.prompt_tokens + 16
    step_bytes = weights + concurrency * context * kv_per_token
    return {"bandwidth_share": step_bytes / (figures.tpot_p50_ms / 1e3) / triad}
