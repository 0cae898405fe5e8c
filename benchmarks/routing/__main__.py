"""The router's choices against round-robin, random and least-loaded, in virtual time, with the product's own code and
the workers' own caches. docs/routing.md explains it.

python -m benchmarks.routing [--seeds N] [--json] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.routing.compare import BUSY, NUM_SEEDS, SATURATED, run_all
from benchmarks.routing.report import as_json, page, write

RESULTS = Path(__file__).resolve().parents[1] / "results"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.routing", description=__doc__)
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help="runs of each workload under each policy")
    parser.add_argument("--json", action="store_true", help="print the JSON, and nothing else")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of routing.json and routing.md")
    options = parser.parse_args(argv)
    if options.seeds < 2:
        parser.error("--seeds must be at least 2: the test is about differences between them")
    results = {each.name: (each, run_all(each, options.seeds)) for each in (BUSY, *SATURATED)}
    written = as_json(results, options.seeds)
    write(options.out, written)
    print(json.dumps(written, indent=1) if options.json else page(written))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
