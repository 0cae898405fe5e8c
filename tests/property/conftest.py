"""What all property tests share: time to make a failure small."""

from __future__ import annotations

import pytest

SHRINKING_S = 300  # at most: a constant of hypothesis


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that is cut off while it shrinks a failure says that it timed out, and nothing of the failure. A limit of
    the command line stays."""
    for item in items if config.getoption("timeout", None) is None else ():
        if item.path.parent.name == "property" and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SHRINKING_S + 100))
