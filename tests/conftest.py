"""What all tests share: the seed, printed so that a failure can be had again.

    TRIPTYCH_TEST_SEED=123 make test

`random` and numpy's old generator start from it in every test, hypothesis derives its examples from it, and the
`seed` fixture hands it on.
"""

from __future__ import annotations

import random
from typing import Any

import hypothesis
import numpy as np
import pytest

from tests.seed import SEED
from tests.sharing_out import group_of


def pytest_configure(config: pytest.Config) -> None:
    # An example has no time limit of its own: on a busy machine it would measure the machine. What fails is made small
    # but not explained: that traces every line, and takes longer than a test may.
    phases = [phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain]
    hypothesis.settings.register_profile("triptych", deadline=None, phases=phases)
    hypothesis.settings.load_profile("triptych")
    if config.pluginmanager.hasplugin("hypothesispytest"):
        config.option.hypothesis_seed = config.getoption("hypothesis_seed", None) or str(SEED)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For several processes; the plug-in need not be there for one."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid.partition("::")[0])

    return Scheduler(config, log)


def pytest_report_header() -> str:
    return f"random seed: {SEED} (repeat with TRIPTYCH_TEST_SEED={SEED})"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Quiet runs show no header, so a failure says it again."""
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(pytest_report_header())


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(SEED)
    np.random.seed(SEED)


@pytest.fixture(scope="session")
def seed() -> int:
    """The seed of this run of the tests."""
    return SEED
