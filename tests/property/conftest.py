"""What all property tests share: time to make a failure small."""

from __future__ import annotations

import pytest

SHRINKING_S = 300  # at most: a constant of hypothesis


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that is cut off while it shrinks a failure says that it timed out, and nothing of the failure."""
    for item in items:
        if item.path.parent.name == "property" and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SHRINKING_S + 100))
