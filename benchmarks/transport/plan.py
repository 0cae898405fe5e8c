"""The order of a run, and the time of its parts: between two processes first, then the clusters."""

from __future__ import annotations

import subprocess
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.engine.arms import Case
from benchmarks.engine.budget import Budget
from benchmarks.engine.client import AskFailed
from benchmarks.engine.servers import StartFailed
from benchmarks.transport.cells import Wanted, wanted
from benchmarks.transport.handoff import KvTime
from benchmarks.transport.in_cluster import measure_plain, measure_throttled
from benchmarks.transport.keys import EXPOSED, HIDDEN, OF_CLUSTERS, SHARE
from benchmarks.transport.opening import open_arms
from benchmarks.transport.results import Results
from benchmarks.transport.turns import Pace, take_turns

FULL_SECONDS, QUICK_SECONDS = 8 * 60, 120
# Of the time, when all is measured; the rest is for the clusters.
BETWEEN_TWO_SHARE = 0.4
FULL_PACE, QUICK_PACE = Pace(5, 3, 0.25), Pace(3, 1, 0.05)
FULL_TRIES, QUICK_TRIES = 15, 5
FAILURES = (StartFailed, AskFailed, OSError, subprocess.SubprocessError, ValueError)


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says. `json`: a file, `-` for standard output, or None."""

    quick: bool
    seconds: float | None
    only: str | None
    demo: Path
    threads: int
    out: Path
    json: str | None

    @property
    def pace(self) -> Pace:
        return QUICK_PACE if self.quick else FULL_PACE

    @property
    def tries(self) -> int:
        return QUICK_TRIES if self.quick else FULL_TRIES


def run_all(options: Options, budget: Budget) -> Results:
    results = Results()
    todo = wanted(options.only)
    if todo.arms:
        part = budget if options.only else budget.part(BETWEEN_TWO_SHARE)
        print(f"between two processes, {part.left_s():.0f} s:", flush=True)
        uvloop.run(_between_two(todo, options.pace, part, results))
    if options.only in (None, *OF_CLUSTERS):
        _in_clusters(options, budget, results)
    return results


async def _between_two(todo: Wanted, pace: Pace, budget: Budget, results: Results) -> None:
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as folder:
        async with AsyncExitStack() as stack:
            arms = await open_arms(todo, Path(folder), stack, budget.left_s(), results)
            await take_turns(arms, todo.sizes, pace, budget, results)


def _in_clusters(options: Options, budget: Budget, results: Results) -> None:
    """What fails is noted for its keys."""
    case = Case("demo-vl", options.demo, "float32", 80, True)
    names = OF_CLUSTERS if options.only is None else (options.only,)
    try:
        print("in a cluster:", flush=True)
        plain = measure_plain(case, options.threads, budget.part(0.55 if HIDDEN in names else 1.0), options.tries)
        results.handoff = plain.handoff
        print(f"  {plain.handoff}", flush=True)
    except FAILURES as error:
        _note((EXPOSED, SHARE), error, results)
        results.notes[HIDDEN] = f"the link could not be chosen: {results.notes[EXPOSED]}"
        return
    if HIDDEN in names:
        _throttled(case, options, budget, results, plain.long)


def _throttled(case: Case, options: Options, budget: Budget, results: Results, plain: KvTime) -> None:
    try:
        print("in a cluster with a throttled link:", flush=True)
        results.hidden = measure_throttled(case, options.threads, budget, options.tries, plain)
        print(f"  {results.hidden}", flush=True)
    except FAILURES as error:
        _note((HIDDEN,), error, results)


def _note(names: tuple[str, ...], error: Exception, results: Results) -> None:
    for name in names:
        results.notes[name] = f"{type(error).__name__}: {error}"[:500]
    print(f"  none: {results.notes[names[0]]}", flush=True)
