"""Storms over the engine: random chunks, pages and pools, eviction and retraction at every step, against transformers.

    python -m scripts.verify_engine [--seeds 1000] [--jobs 2] [--json FILE]
    python -m scripts.verify_engine --seed 17       # one storm again, with its traceback

Each seed decides on one storm (`tests/storm`). The exit status is 1 when one of them fails; the command that runs it
again is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from tests.storm.storm import Report, run_storm

RESULT = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "engine_storm.json"
AGAIN = "python -m scripts.verify_engine --seed {}"


def main() -> int:
    parser = argparse.ArgumentParser(description="storms over the engine, against transformers")
    parser.add_argument("--seeds", type=int, default=1000, help="how many storms")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0))), help="processes")
    parser.add_argument("--json", type=Path, help="where the report goes; tracked results are made with 1000 seeds")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # job/jobs: one process of a run
    args = parser.parse_args()
    if args.seed is not None:
        print(run_storm(args.seed))
        return 0
    if args.part:
        job, jobs = map(int, args.part.split("/"))
        args.json.write_text(json.dumps(_run(range(args.first + job, args.first + args.seeds, jobs))))
        return 0
    start_s = time.monotonic()
    report = _merged(_run_jobs(args.first, args.seeds, args.jobs))
    report["wall_s"] = round(time.monotonic() - start_s)
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(bool(report["failed_seeds"]) or report["storms"] != args.seeds)


def _run(seeds: range) -> dict[str, Any]:
    total, failed = Report(), list[int]()
    for seed in seeds:
        try:
            total.add(run_storm(seed))
        except Exception:
            traceback.print_exc()
            print(f"seed {seed} failed; again: {AGAIN.format(seed)}", file=sys.stderr, flush=True)
            failed.append(seed)
    return {"total": dataclasses.asdict(total), "failed_seeds": failed}


def _run_jobs(first: int, seeds: int, jobs: int) -> list[dict[str, Any]]:
    """Each job is a process of its own, which loads each model once."""
    with tempfile.TemporaryDirectory(prefix="triptych-storms-") as folder:
        parts = [Path(folder) / f"{job}.json" for job in range(jobs)]
        command = [sys.executable, "-m", "scripts.verify_engine", "--first", str(first), "--seeds", str(seeds)]
        children = [
            subprocess.Popen([*command, "--part", f"{job}/{jobs}", "--json", str(part)])
            for job, part in enumerate(parts)
        ]
        try:
            for child in children:
                child.wait()
        finally:
            for child in children:
                child.kill()
        return [json.loads(part.read_text()) for part in parts if part.exists()]


def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    total = Report()
    for part in parts:
        total.add(Report(**part["total"]))
    found = dataclasses.asdict(total)
    summed_s = found.pop("wall_s")
    return {
        **found,
        "storm_mean_s": round(summed_s / max(1, total.storms), 3),
        "failed_seeds": sorted(seed for part in parts for seed in part["failed_seeds"]),
    }


if __name__ == "__main__":
    sys.exit(main())
