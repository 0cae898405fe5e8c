"""What all tests share: the seed, printed so that a failure can be had again.

    TRIPTYCH_TEST_SEED=123 make test

`random` and numpy's old generator start from it in every test, hypothesis derives its examples from it, and the
`seed` fixture hands it on.
"""

from __future__ import annotations

import random

import hypothesis
import numpy as np
import pytest

from tests.seed import SEED


def pytest_configure(config: pytest.Config) -> None:
    # An example has no time limit of its own: on a busy machine it would measure the machine.
    hypothesis.settings.register_profile("triptych", deadline=None)
    hypothesis.settings.load_profile("triptych")
    if config.pluginmanager.hasplugin("hypothesispytest"):
        config.option.hypothesis_seed = config.getoption("hypothesis_seed", None) or str(SEED)


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
