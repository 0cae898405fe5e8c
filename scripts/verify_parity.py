"""Every parity case against transformers, in several processes; the report goes to benchmarks/results/parity.json.

    python -m scripts.verify_parity [--jobs 2] [pytest arguments ...]

Each process takes its share of the matrix; the first one the other parity tests too. The report is made of this one
run, whole: a cell that no process delivered leaves it marked as incomplete, and the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.parity.report import REPORT, merged

PYTEST = (sys.executable, "-m", "pytest", "-m", "parity", "--timeout", "3600", "tests")


def main() -> int:
    parser = argparse.ArgumentParser(description="every parity case against transformers")
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0))), help="processes")
    parser.add_argument("--json", type=Path, default=REPORT, help="where the report goes")
    args, rest = parser.parse_known_args()
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="triptych-parity-") as folder:
        parts = [Path(folder) / f"{job}.json" for job in range(args.jobs)]
        children = [_start(part, job, args.jobs, rest) for job, part in enumerate(parts)]
        try:
            statuses = [child.wait() for child in children]
        finally:
            for child in children:
                child.kill()
        report = merged(parts)
    report["wall_s"] = round(time.monotonic() - start_s)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print({name: value for name, value in report.items() if name != "cells"})
    return int(any(statuses) or not report["complete"] or not report["exact"])


def _start(part: Path, job: int, jobs: int, rest: list[str]) -> subprocess.Popen[bytes]:
    own = {"TRIPTYCH_PARITY": "full", "TRIPTYCH_PARITY_SHARD": f"{job + 1}/{jobs}", "TRIPTYCH_PARITY_OUT": str(part)}
    return subprocess.Popen([*PYTEST, *rest], env={**os.environ, **own})


if __name__ == "__main__":
    sys.exit(main())
