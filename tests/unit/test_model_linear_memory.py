"""What oneDNN keeps of its products is bounded, however many numbers of rows it meets."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch
torch.set_num_threads(1)
from triptych.model.linear import PackedLinear

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * 4 >> 10

layers = [PackedLinear(torch.randn(outputs, 64)) for outputs in (192, 64, 638)]

def meet(numbers_of_rows):
    with torch.inference_mode():
        for number in numbers_of_rows:
            for layer in layers:
                layer(torch.randn(number, 64))

meet(range(1, 200))
before = resident_mib()
meet(range(200, 500))
print(resident_mib() - before)
"""
MOST_MIB = 60


def grown_mib(capacity: str | None) -> int:
    """Over 300 further numbers of rows, in a process of its own: the bound is read once."""
    names = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    env = {name: value for name, value in os.environ.items() if name not in names}
    if capacity is not None:
        env |= dict.fromkeys(names, capacity)
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.parametrize(("capacity", "is_bounded"), [(None, True), ("100000", False)])
def test_products_that_are_kept_are_bounded_and_would_not_be_without(capacity: str | None, is_bounded: bool) -> None:
    grown = grown_mib(capacity)
    print(f"{grown} MiB")
    assert (grown < MOST_MIB) == is_bounded
