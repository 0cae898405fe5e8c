"""Memory bandwidth as STREAM's triad measures it (McCalpin, https://www.cs.virginia.edu/stream): a = b + s * c.

python benchmarks/triad.py [--threads 2]
"""

from __future__ import annotations

import argparse
import os
import time

import torch

NUM_ELEMENTS = 48 << 20
"""192 MiB an array: beyond any cache."""
REPEATS = 10
ARRAYS = 3


def triad_bytes_per_s(threads: int) -> float:
    """The best of several passes; two arrays are read and one is written, as STREAM counts."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        b, c = torch.ones(NUM_ELEMENTS), torch.ones(NUM_ELEMENTS)
        a = torch.zeros(NUM_ELEMENTS)
        return ARRAYS * a.nbytes / min(_pass_s(a, b, c) for _ in range(REPEATS))
    finally:
        torch.set_num_threads(before)


def _pass_s(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> float:
    start = time.perf_counter()
    torch.add(b, c, alpha=3.0, out=a)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints the memory bandwidth of a triad.")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    threads = parser.parse_args().threads
    print(f"triad, {threads} threads: {triad_bytes_per_s(threads) / 1e9:.1f} GB/s")


if __name__ == "__main__":
    main()
