"""What a full run of the matrix leaves behind: one JSON file with the counts of every cell."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.parity.compare import Comparison
from tests.parity.matrix import ALL_COMBOS, HEATS, PROMPTS_SEED

REPORT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "parity.json"
KEPT_DIFFERENCES = 20

Cell = dict[str, Any]


@dataclass(slots=True)
class MatrixReport:
    """Collects the cells of one process."""

    cells: dict[str, Cell] = field(default_factory=dict)

    def add(self, name: str, comparison: Comparison, facts: dict[str, Any]) -> None:
        self.cells[name] = {
            "prompts": comparison.outputs,
            "positions": comparison.positions,
            "differing_tokens": len(comparison.differing),
            "differing_first": comparison.differing[:KEPT_DIFFERENCES],
            "ties": comparison.ties,
            "ties_taken_otherwise": comparison.ties_taken_otherwise,
            # JSON knows no infinity.
            "max_logit_difference": min(comparison.max_logit_difference, 1e9),
            "exact": comparison.is_exact and comparison.has_few_ties,
            **facts,
        }

    def write_part(self, path: Path) -> None:
        path.write_text(json.dumps(self.cells))


def merged(parts: Iterable[Path]) -> dict[str, Any]:
    """The report over the parts that the processes of ONE run left. `complete` says whether no cell is missing."""
    cells: dict[str, Cell] = {}
    for part in parts:
        cells |= json.loads(part.read_text()) if part.exists() else {}
    wanted = {f"{combo.name}/{heat}" for combo in ALL_COMBOS for heat in HEATS}
    return {
        "prompts_seed": PROMPTS_SEED,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "complete": cells.keys() == wanted,
        "exact": all(cell["exact"] for cell in cells.values()),
        **_totals(cells.values()),
        "cells": dict(sorted(cells.items())),
    }


def _totals(cells: Iterable[Cell]) -> dict[str, Any]:
    every = list(cells)
    summed = ("prompts", "positions", "differing_tokens", "ties", "ties_taken_otherwise")
    totals: dict[str, Any] = {"total_cells": len(every)}
    totals |= {f"total_{name}": sum(cell[name] for cell in every) for name in summed}
    totals["max_logit_difference"] = max((cell["max_logit_difference"] for cell in every), default=None)
    return totals
