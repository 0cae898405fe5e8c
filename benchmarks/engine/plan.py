"""The order of a run, and the time of its parts: experiments first, then each model, what keys need before the rest."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine.arms import Case
from benchmarks.engine.budget import Budget
from benchmarks.engine.cells import CASES, DEMO, SMOL_BF16, SMOL_F32, Cell, cells_of, only
from benchmarks.engine.comparison import Machine, compare
from benchmarks.engine.experiments.all import run_experiments
from benchmarks.engine.keys import EXPERIMENTS
from benchmarks.engine.results import Results
from benchmarks.engine.weights import kv_bytes_per_token, weight_bytes

# Of the time: the experiments' part, then of what is left each model's weight.
EXPERIMENT_SHARE = 0.17
WEIGHTS = {DEMO: 2.0, SMOL_F32: 4.0, SMOL_BF16: 4.0}
FULL_ROUNDS, QUICK_ROUNDS = 3, 1
TRIAD_SECONDS = 60
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    quick: bool
    seconds: float | None
    only: str | None
    demo: Path
    smollm2: Path | None
    smollm2_bf16: Path | None
    vllm_python: Path | None
    threads: int
    out: Path

    @property
    def machine(self) -> Machine:
        rounds = QUICK_ROUNDS if self.quick else FULL_ROUNDS
        return Machine(self.threads, self.vllm_python, rounds, 45.0 if self.quick else 240.0)


def run_all(options: Options, budget: Budget) -> Results:
    results = Results()
    cases = cases_of(options, results)
    names = [name for name in EXPERIMENTS if options.only in (None, name)]
    if names and DEMO in cases:
        part = budget if options.only else budget.part(EXPERIMENT_SHARE if not options.quick else 0.4)
        texts, rounds = (20, 6) if options.quick else (60, 30)
        run_experiments(names, cases[DEMO], options.threads, part, results, texts, rounds)
    todo = {name: wanted_cells(name, options.only) for name in cases}
    todo = {name: cells for name, cells in todo.items() if cells}
    if todo:
        measure_triad(options.threads, results)
    for position, (name, cells) in enumerate(todo.items()):
        later = list(todo)[position:]
        part = budget.part(WEIGHTS[name] / sum(WEIGHTS[other] for other in later))
        print(f"{name}, {part.left_s():.0f} s:", flush=True)
        compare(cases[name], cells, options.machine, part, results)
    return results


def wanted_cells(case: str, key: str | None) -> list[Cell]:
    cells = cells_of(case)
    return cells if key is None else only(key, cells)


def cases_of(options: Options, results: Results) -> dict[str, Case]:
    """The models that are there; what is not is noted for all arms."""
    folders = {DEMO: options.demo, SMOL_F32: options.smollm2, SMOL_BF16: _bf16(options)}
    known = {}
    for name in CASES:
        folder = folders[name]
        if folder is None or not (folder / "config.json").is_file():
            why = "--smollm2 was not given" if folder is None else f"{folder} is no checkpoint"
            for arm in ("mono", "e-p-d", "transformers-generate", "transformers-continuous", "vllm"):
                results.missing[arm, name] = why
            continue
        dtype = "bfloat16" if name == SMOL_BF16 else "float32"
        # Words of one token each there, of four letters and more tokens here: about 320 tokens both.
        case = Case(name, folder, dtype, 80 if name == DEMO else 280, name == DEMO)
        known[name] = case
        results.weights[name] = weight_bytes(folder, dtype)
        results.kv[name] = kv_bytes_per_token(folder, dtype)
    return known


def _bf16(options: Options) -> Path | None:
    """A checkpoint in float32 serves too: every arm is told its dtype."""
    if options.smollm2_bf16 or options.smollm2 is None:
        return options.smollm2_bf16
    beside = options.smollm2.parent / "bf16"
    return beside if (beside / "config.json").is_file() else options.smollm2


def measure_triad(threads: int, results: Results) -> None:
    """With `benchmarks/triad.py`, before any server runs."""
    try:
        # In a process of its own: this one stays without torch, whose threads would spin beside the servers.
        code = f"from benchmarks.triad import triad_bytes_per_s; print(triad_bytes_per_s({threads}))"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, check=True, timeout=TRIAD_SECONDS, stdout=subprocess.PIPE, cwd=ROOT)
        results.triad_bytes_per_s = float(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        results.notes["triad"] = f"benchmarks/triad.py gave no figure: {type(error).__name__}: {error}"[:300]
