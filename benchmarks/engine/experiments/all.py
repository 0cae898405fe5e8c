"""Each experiment by its key, and what becomes of those that fail or do not fit."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence

from benchmarks.engine.arms import Case
from benchmarks.engine.budget import Budget
from benchmarks.engine.client import AskFailed
from benchmarks.engine.experiments import encodes, overlap, radix, text_under_images
from benchmarks.engine.results import Results
from benchmarks.engine.servers import StartFailed

FAILURES = (StartFailed, AskFailed, OSError, subprocess.SubprocessError, ValueError)


def run_experiments(
    names: Sequence[str], case: Case, threads: int, budget: Budget, results: Results, texts: int, rounds: int
) -> None:
    """Fills `results.experiments`, or notes why not. Each gets an equal part of the time that is left."""
    todo: Mapping[str, Callable[[Budget], object]] = {
        "encodes_per_unique_picture": lambda time: encodes.measure(case, threads, time),
        "overlap_ratio": lambda time: overlap.measure(case, threads, time),
        "text_ttft_p99_under_images": lambda time: _twice(case, threads, time, results, texts),
        "radix_cost_1m_vs_10k": lambda time: radix.measure(time, rounds),
    }
    for position, name in enumerate(names):
        print(f"{name}:", flush=True)
        part = budget.part(1 / (len(names) - position))
        try:
            results.experiments[name] = todo[name](part)
            print(f"  {results.experiments[name]}", flush=True)
        except FAILURES as error:
            results.notes[name] = f"{type(error).__name__}: {error}"[:500]
            print(f"  none: {results.notes[name]}", flush=True)


def _twice(case: Case, threads: int, budget: Budget, results: Results, texts: int) -> dict[str, float | None]:
    found: dict[str, float | None] = {"real": None, "timed_fake": None}
    measures = {
        "real": lambda time: text_under_images.measure_real(case, threads, time, texts),
        "timed_fake": lambda time: text_under_images.measure_timed(case, time, texts),
    }
    for name, share in (("real", 0.5), ("timed_fake", 1.0)):
        try:
            found[name] = measures[name](budget.part(share))
        except FAILURES as error:
            results.notes["text_ttft_p99_under_images"] = f"{name}: {type(error).__name__}: {error}"[:500]
    if set(found.values()) == {None}:
        raise AskFailed(results.notes["text_ttft_p99_under_images"])
    return found
