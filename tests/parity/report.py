"""What a full run of the matrix leaves behind: one JSON file with the counts of every cell."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.parity.compare import Comparison

REPORT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "parity.json"
KEPT_DIFFERENCES = 20
ALL_CELLS = 32


@dataclass(slots=True)
class MatrixReport:
    """Collects cells. A run of some cells only says that it is not complete."""

    prompts_seed: int
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, cell: str, comparison: Comparison, facts: dict[str, Any]) -> None:
        self.cells[cell] = {
            "prompts": comparison.outputs,
            "positions": comparison.positions,
            "differing_tokens": len(comparison.differing),
            "differing_first": comparison.differing[:KEPT_DIFFERENCES],
            "ties": comparison.ties,
            "ties_taken_otherwise": comparison.ties_taken_otherwise,
            "tie_share": round(comparison.tie_share, 6),
            # JSON knows no infinity.
            "max_logit_difference": min(comparison.max_logit_difference, 1e9),
            "exact": comparison.is_exact and comparison.has_few_ties,
            **facts,
        }

    def write(self, path: Path = REPORT) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "prompts_seed": self.prompts_seed,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "complete": len(self.cells) == ALL_CELLS,
            "exact": all(cell["exact"] for cell in self.cells.values()),
            "cells": dict(sorted(self.cells.items())),
        }
        path.write_text(json.dumps(content, indent=2) + "\n")
