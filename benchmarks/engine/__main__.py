"""Arms in one run: ours, `transformers` and vLLM, taking turns on the same machine. docs/benchmarks.md explains it.

python -m benchmarks.engine [--quick] [--only KEY] [--smollm2 DIR] [--vllm-python PATH]
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.engine.budget import CLOSING_SECONDS, FULL_SECONDS, QUICK_SECONDS, Budget
from benchmarks.engine.keys import KEYS, all_keys
from benchmarks.engine.plan import Options, run_all
from benchmarks.engine.plot import draw
from benchmarks.engine.report import as_json, write

ROOT = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    seconds = QUICK_SECONDS if options.quick else FULL_SECONDS
    budget = Budget.of((options.seconds or seconds) - CLOSING_SECONDS)
    results = run_all(options, budget)
    keys = all_keys(results)
    if options.only:
        keys = {options.only: keys[options.only]}
    settings = {"threads": options.threads, "quick": options.quick, "only": options.only}
    written = as_json(results, keys, settings)
    write(options.out, written, keys)
    draw(written["cells"], options.out / "engine.png")
    for name, key in keys.items():
        print(f"{name}: {key.value}" + (f"   ({key.note})" if key.note else ""))
    print(f"written: {options.out}/engine.json, engine.md, engine.png")
    return 0


def _parse(argv: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(prog="benchmarks.engine", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"at most {QUICK_SECONDS} s instead of {FULL_SECONDS}")
    parser.add_argument("--seconds", type=float, help="another limit of time")
    parser.add_argument("--only", choices=KEYS, help="only what this key needs")
    parser.add_argument("--demo", type=Path, default=ROOT / "assets" / "demo-vl", help="checkpoint that takes pictures")
    parser.add_argument("--smollm2", type=Path, help="SmolLM2 in float32; scripts/convert_smollm2.py makes it")
    parser.add_argument(
        "--smollm2-bf16", type=Path, help="the same in bfloat16; not given: ../bf16, or --smollm2 itself"
    )
    parser.add_argument("--vllm-python", type=Path, help="interpreter of vLLM's environment (engine/prepare_vllm.py)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of every arm")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    return Options(**vars(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
