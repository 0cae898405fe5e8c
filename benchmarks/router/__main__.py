"""What the router costs: the real process before workers that only keep time, and a bare ASGI application beside it.
docs/benchmarks.md explains it.

python -m benchmarks.router [--quick] [--only KEY] [--json [FILE]]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.router.keys import KEYS, all_keys
from benchmarks.router.plan import Options, run_all
from benchmarks.router.report import as_json, write

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
    results = run_all(options)
    keys = all_keys(results)
    if options.only:
        keys = {options.only: keys[options.only]}
    settings = {"quick": options.quick, "only": options.only, "workers": options.workers, "calls": results.calls}
    written = as_json(results, keys, settings)
    write(options.out, written, keys)
    if options.json not in (None, STDOUT):
        Path(options.json).write_text(json.dumps(written, indent=1) + "\n")
    for name, key in keys.items():
        print(f"{name}: {key.value}" + (f"   ({key.note})" if key.note else ""))
    print(f"written: {options.out}/router.json, router.md")
    return written


def _parse(argv: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(prog="benchmarks.router", description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round with few requests: to see that it works")
    parser.add_argument("--only", choices=KEYS, help="only what this key needs")
    parser.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="the results there too; without FILE, on standard output",
    )
    parser.add_argument("--model", type=Path, default=ROOT / "assets" / "demo-vl", help="whose tokenizer is used")
    parser.add_argument("--workers", type=int, default=1, help="processes of the router")
    parser.add_argument("--elsewhere", action="store_true", help="the fakes say that they are on another host")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    return Options(**vars(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
