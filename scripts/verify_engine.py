"""Storms over the engine: random chunks, pages and pools, eviction and retraction at every step, against transformers;
and memory over many unique pictures.

    python -m scripts.verify_engine [--seeds 1000] [--pictures 20000] [--jobs 2] [--json FILE]
    python -m scripts.verify_engine --seed 17       # one storm again, with its traceback

Each seed decides on one storm (`tests/storm`). The exit status is 1 when one of them fails (the command that runs it
again is printed), or when memory grows.
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

import torch

from tests.storm.growth import allowed_slope_bytes, measure, slope_bytes
from tests.storm.storm import Report, run_storm
from tests.storm.world import world_of

RESULT = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "engine_storm.json"
GROWTH_FAMILY = "qwen2.5-vl"
AGAIN = "python -m scripts.verify_engine --seed {}"


def main() -> int:
    parser = argparse.ArgumentParser(description="storms over the engine, against transformers")
    parser.add_argument("--seeds", type=int, default=1000, help="how many storms")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0))), help="processes")
    parser.add_argument("--pictures", type=int, default=20_000, help="how many unique pictures; 0 asks none")
    parser.add_argument("--json", type=Path, help="where the report goes; tracked results are made with the defaults")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # job/jobs, or growth: one process of a run
    args = parser.parse_args()
    if args.seed is not None:
        print(run_storm(args.seed))
        return 0
    if args.part == "growth":
        args.json.write_text(json.dumps(_growth(args.pictures)))
        return 0
    if args.part:
        job, jobs = map(int, args.part.split("/"))
        args.json.write_text(json.dumps(_run(range(args.first + job, args.first + args.seeds, jobs))))
        return 0
    start_s = time.monotonic()
    storms = ["--first", str(args.first), "--seeds", str(args.seeds)]
    report = _merged(_run_parts([[*storms, "--part", f"{job}/{args.jobs}"] for job in range(args.jobs)]))
    report["storms_wall_s"] = round(time.monotonic() - start_s)
    growth = _run_parts([["--pictures", str(args.pictures), "--part", "growth"]]) if args.pictures else []
    report["memory_growth"] = growth[0] if growth else None
    report["wall_s"] = round(time.monotonic() - start_s)
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    has_grown = bool(args.pictures) and not (growth and growth[0]["holds"])
    return int(has_grown or bool(report["failed_seeds"]) or report["storms"] != args.seeds)


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


def _growth(num_pictures: int) -> dict[str, Any]:
    """Resident bytes of one process and its children over unique pictures."""
    torch.set_num_threads(1)
    samples = measure(world_of(GROWTH_FAMILY), num_pictures)
    slope, allowed = slope_bytes(samples), allowed_slope_bytes(num_pictures)
    return {
        "pictures": num_pictures,
        "slope_bytes_a_picture": round(slope),
        "allowed_bytes_a_picture": round(allowed),
        "holds": slope < allowed,
        "resident_mib": {str(pictures): round(resident / 2**20, 1) for pictures, resident in samples},
    }


def _run_parts(parts: list[list[str]]) -> list[dict[str, Any]]:
    """Each part is a process of its own, which loads each model once. What one did not deliver is missing."""
    with tempfile.TemporaryDirectory(prefix="triptych-storms-") as folder:
        paths = [Path(folder) / f"{index}.json" for index in range(len(parts))]
        command = [sys.executable, "-m", "scripts.verify_engine"]
        children = [
            subprocess.Popen([*command, *part, "--json", str(path)]) for part, path in zip(parts, paths, strict=True)
        ]
        try:
            for child in children:
                child.wait()
        finally:
            for child in children:
                child.kill()
        return [json.loads(path.read_text()) for path in paths if path.exists()]


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
