"""A cluster of ours over the bundled model, and its workers' metrics."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine.arms import Case, free_port, ours
from benchmarks.engine.budget import Budget
from benchmarks.engine.load import Server
from benchmarks.engine.servers import running

START_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class Cluster:
    server: Server
    metrics: dict[str, str]

    def counter(self, worker: str, line_start: str) -> float:
        """The sum of a worker's samples whose lines begin so."""
        with urllib.request.urlopen(f"http://{self.metrics[worker]}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(line_start))


@contextlib.contextmanager
def cluster(
    case: Case, threads: int, budget: Budget, *flags: str, arm: str = "e-p-d", variables: dict[str, str] | None = None
) -> Iterator[Cluster]:
    """Raises StartFailed."""
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as name:
        folder = Path(name)
        ready = folder / "ready.json"
        spec = ours(arm, case, threads, folder / "run", free_port(), ("--ready-file", str(ready), *flags), variables)
        print(f"  {spec.line()}", flush=True)
        with running(spec, folder, min(START_SECONDS, budget.left_s())) as server:
            workers = json.loads(_when_written(ready))["workers"]
            yield Cluster(server.server, {worker: known["metrics_address"] for worker, known in workers.items()})


def _when_written(path: Path) -> str:
    """The launcher writes it a moment after the API is ready."""
    give_up_at = time.monotonic() + 10
    while not path.exists() and time.monotonic() < give_up_at:
        time.sleep(0.05)
    return path.read_text()
