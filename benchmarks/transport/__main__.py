"""Our transports against memcpy, raw pyzmq, gRPC, NIXL and Mooncake, taking turns between two processes of one machine;
and what a request feels of its transfers in a cluster. docs/benchmarks.md explains it.

python -m benchmarks.transport [--quick] [--only KEY] [--json [FILE]]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine.budget import CLOSING_SECONDS, Budget
from benchmarks.transport.keys import KEYS, all_keys
from benchmarks.transport.plan import FULL_SECONDS, QUICK_SECONDS, Options, run_all
from benchmarks.transport.plot import draw
from benchmarks.transport.report import as_json, write

ROOT = Path(__file__).resolve().parents[2]
STDOUT = "-"


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    if options.json != STDOUT:
        _run(options)
        return 0
    with contextlib.redirect_stdout(sys.stderr):  # nothing but the JSON where it goes
        written = _run(options)
    print(json.dumps(written, indent=1))
    return 0


def _run(options: Options) -> Mapping[str, Any]:
    seconds = QUICK_SECONDS if options.quick else FULL_SECONDS
    results = run_all(options, Budget.of((options.seconds or seconds) - CLOSING_SECONDS))
    keys = all_keys(results)
    if options.only:
        keys = {options.only: keys[options.only]}
    settings = {"threads": options.threads, "quick": options.quick, "only": options.only}
    written = as_json(results, keys, settings)
    write(options.out, written, keys)
    draw(written["cells"], options.out / "transport.png")
    if options.json not in (None, STDOUT):
        Path(options.json).write_text(json.dumps(written, indent=1) + "\n")
    for name, key in keys.items():
        print(f"{name}: {key.value}" + (f"   ({key.note})" if key.note else ""))
    print(f"written: {options.out}/transport.json, transport.md, transport.png")
    return written


def _parse(argv: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(prog="benchmarks.transport", description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"at most {QUICK_SECONDS} s instead of {FULL_SECONDS}")
    parser.add_argument("--seconds", type=float, help="another limit of time")
    parser.add_argument("--only", choices=KEYS, help="only what this key needs")
    parser.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="the results there too; without FILE, on standard output",
    )
    parser.add_argument("--demo", type=Path, default=ROOT / "assets" / "demo-vl", help="checkpoint of the clusters")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each cluster's workers")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    return Options(**vars(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
