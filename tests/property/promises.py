"""What tests of policies in virtual time share: promises that can be broken, and the search for what breaks them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis.errors import NoSuchExample
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from hypothesis.strategies import SearchStrategy

from tests.seed import IS_FULL, SEED

Workload = TypeVar("Workload")

SEARCHES = 10
"""For a planted fault. One may go by chance where it does not show; so many in a row do not."""


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
    """Some workload shows that `run` breaks the promise of these words. From `seed`, in up to SEARCHES searches."""
    assert any(_breaks(workloads, run, promised, seed + search) for search in range(SEARCHES)), "the fault was not seen"


def _breaks(workloads: SearchStrategy[Workload], run: Callable[[Workload], None], promised: str, seed: int) -> bool:
    how = settings(max_examples=3000, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck))
    try:
        find(
            workloads,
            lambda workload: promised in broken_promise(run, workload),
            settings=how,
            random=random.Random(seed),
        )
    except NoSuchExample:
        return False
    return True


def broken_promise(run: Callable[[Workload], None], workload: Workload) -> str:
    """In words; empty where all were kept."""
    try:
        run(workload)
    except Broken as broken:
        return str(broken)
    return ""


def tries(max_examples: int) -> settings:
    """So many examples; with TRIPTYCH_VERIFY=full ten times as many."""
    return settings(max_examples=(10 if IS_FULL else 1) * max_examples, deadline=None)


def steps(max_examples: int) -> settings:
    """So many lives of a state machine; with TRIPTYCH_VERIFY=full twenty times as many."""
    factor = 20 if IS_FULL else 1
    return settings(max_examples=factor * max_examples, stateful_step_count=40, deadline=None)


def assert_machine_catches(machine: type[RuleBasedStateMachine]) -> None:
    """Some life of the machine, which runs a broken part, fails. From this run's seed, in up to SEARCHES searches."""
    how = settings(
        max_examples=500,
        stateful_step_count=40,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    assert any(_fails(hypothesis.seed(SEED + search)(machine), how) for search in range(SEARCHES)), (
        "the fault was not seen"
    )


def _fails(machine: type[RuleBasedStateMachine], how: settings) -> bool:
    try:
        run_state_machine_as_test(machine, settings=how)  # type: ignore[no-untyped-call]
    except (Exception, pytest.fail.Exception):
        return True
    return False
