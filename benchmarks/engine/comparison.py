"""Arms on one model, taking turns: each cell is measured on all arms, one after the other, before the next; each round
begins with another arm."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine.arms import Case, launch
from benchmarks.engine.budget import Budget
from benchmarks.engine.cells import Cell
from benchmarks.engine.client import AskFailed
from benchmarks.engine.load import run
from benchmarks.engine.memory import PeakMemory
from benchmarks.engine.prompts import questions
from benchmarks.engine.results import Results, place
from benchmarks.engine.samples import figures
from benchmarks.engine.servers import Running, StartFailed

# What a cell is taken to need before any arm has shown it, and the most that one arm may take of the time left for one
# cell: a stuck arm must not take the time of all others.
LEAST_SECONDS = 4.0
CELL_SHARE = 0.5
NO_TIME = "it did not fit into the time"


@dataclass(frozen=True, slots=True)
class Machine:
    """What all arms are given."""

    threads: int
    vllm_python: Path | None
    rounds: int
    start_timeout_s: float


def compare(case: Case, cells: Sequence[Cell], machine: Machine, budget: Budget, results: Results) -> None:
    """Fills `results`; an arm that fails is missing from there on, with the reason."""
    names = sorted({arm for cell in cells for arm in cell.arms})
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="triptych-bench-")))
        servers = _start_all(stack, names, case, machine, folder, budget, results)
        memory = PeakMemory()
        stack.callback(memory.close)
        for arm, server in servers.items():
            memory.watch(arm, server.pid)
        _Turns(case, servers, budget, results).take(cells, machine.rounds)
        for arm, peak in memory.peaks().items():
            results.peaks[arm, case.name] = peak


def _start_all(
    stack: ExitStack,
    names: Sequence[str],
    case: Case,
    machine: Machine,
    folder: Path,
    budget: Budget,
    results: Results,
) -> dict[str, Running]:
    """At the same time: nothing is measured meanwhile."""
    started: dict[str, Running] = {}
    for arm in names:
        try:
            spec = launch(arm, case, machine.threads, folder / f"run-{arm}", machine.vllm_python)
        except ValueError as error:
            results.missing[arm, case.name] = str(error)
            continue
        results.commands[arm, case.name] = spec.portable_line()
        print(f"  {arm}: {spec.line()}", flush=True)
        started[arm] = Running(spec, folder / f"{arm}.log")
        stack.callback(started[arm].stop)
    timeout_s = min(machine.start_timeout_s, 0.5 * budget.left_s())
    with ThreadPoolExecutor(max(1, len(started))) as pool:
        waits = {arm: pool.submit(server.wait_until_ready, timeout_s) for arm, server in started.items()}
    for arm, wait in waits.items():
        if isinstance(wait.exception(), StartFailed):
            results.missing[arm, case.name] = f"it did not start: {wait.exception()}"
            started.pop(arm).stop()
    return started


class _Turns:
    def __init__(self, case: Case, servers: dict[str, Running], budget: Budget, results: Results) -> None:
        self._case = case
        self._servers = servers
        self._budget = budget
        self._results = results
        self._took_s: dict[tuple[str, Cell], float] = {}

    def take(self, cells: Sequence[Cell], rounds: int) -> None:
        self._warm_up(cells)
        for number in range(rounds):
            for cell in cells:
                arms = [arm for arm in cell.arms if arm in self._servers]
                turn = number % max(1, len(arms))
                for arm in arms[turn:] + arms[:turn]:
                    self._measure(arm, cell, number)

    def _warm_up(self, cells: Sequence[Cell]) -> None:
        """Each workload once, two at once: first calls compile and allocate."""
        for cell in {cell.workload: cell for cell in cells}.values():
            for arm in cell.arms:
                if arm in self._servers:
                    self._ask(arm, cell, seed=-1, count=2, concurrency=2)

    def _measure(self, arm: str, cell: Cell, number: int) -> None:
        if arm not in self._servers:
            return  # it failed meanwhile
        others = [seconds for (_, known), seconds in self._took_s.items() if known == cell]
        expected_s = self._took_s.get((arm, cell), max(others, default=LEAST_SECONDS))
        if not self._budget.has(expected_s):
            if number == 0:
                self._results.missing.setdefault((arm, self._case.name), NO_TIME)
            return
        began = time.monotonic()
        seed = 1000 * number + cell.concurrency
        if cell.workload.endswith("shared"):
            self._ask(arm, cell, seed=seed, count=1, concurrency=1, skip=cell.requests)
        self._ask(arm, cell, seed=seed, count=cell.requests, concurrency=cell.concurrency, kept=True)
        self._took_s[arm, cell] = time.monotonic() - began

    def _ask(
        self, arm: str, cell: Cell, *, seed: int, count: int, concurrency: int, skip: int = 0, kept: bool = False
    ) -> None:
        """`skip`: other questions than the first ones, with the same prefix."""
        if arm not in self._servers:
            return
        asked = questions(cell.workload, seed, skip + count, self._case.num_words)[skip:]
        try:
            answered = asyncio.run(
                run(self._servers[arm].server, asked, concurrency, max(1.0, CELL_SHARE * self._budget.left_s()))
            )
        except AskFailed as error:
            self._results.missing[arm, self._case.name] = f"{cell.workload}, {concurrency} clients: {error}"
            if "400" not in str(error):
                self._servers.pop(arm).stop()
            return
        if kept:
            known = figures(answered.samples, answered.wall_s)
            self._results.rounds[arm, place(cell)].append(known)
            self._results.answers.setdefault((arm, place(cell)), [sample.text for sample in answered.samples])
            print(
                f"  {cell.workload} c{concurrency} {arm}: {known.tokens_per_s:.1f} tokens/s, "
                f"TTFT {known.ttft_p50_ms:.0f} ms, TPOT {known.tpot_p50_ms:.1f} ms",
                flush=True,
            )
