"""`radix_cost_1m_vs_10k`: `benchmarks/radix_cost.py`, in a process of its own; its worst kind of prompt."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.engine.budget import Budget

SCRIPT = Path(__file__).resolve().parents[2] / "radix_cost.py"
# Filling a cache with a million tokens is most of it.
LEAST_SECONDS = 40.0


def measure(budget: Budget, rounds: int) -> float:
    """Raises OSError or subprocess.SubprocessError."""
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as folder:
        out = Path(folder) / "radix.json"
        command = [sys.executable, str(SCRIPT), "--rounds", str(rounds), "--json", str(out)]
        subprocess.run(command, check=True, timeout=budget.left_s(), stdout=subprocess.DEVNULL)
        kinds = json.loads(out.read_text())["radix_cost_1m_vs_10k"]
    return float(max(kind["ratio"] for kind in kinds.values()))
