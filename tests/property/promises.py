"""What tests of policies in virtual time share: promises that can be broken, and the search for what breaks them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

from hypothesis import HealthCheck, Phase, find, settings
from hypothesis.strategies import SearchStrategy

Workload = TypeVar("Workload")


class Broken(AssertionError):
    """A policy broke a promise."""


def promise(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)


def examples(count: int) -> settings:
    """So many workloads, which are large and slow to draw."""
    return settings(max_examples=count, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def assert_caught(
    workloads: SearchStrategy[Workload], run: Callable[[Workload], None], promised: str, seed: int
) -> None:
    """Some workload, of the first few thousand from `seed`, shows that `run` breaks the promise of these words."""
    find(
        workloads,
        lambda workload: promised in broken_promise(run, workload),
        settings=settings(
            max_examples=3000, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck)
        ),
        random=random.Random(seed),
    )


def broken_promise(run: Callable[[Workload], None], workload: Workload) -> str:
    """In words; empty where all were kept."""
    try:
        run(workload)
    except Broken as broken:
        return str(broken)
    return ""
