"""Clusters that the tests of a session share: started once, by the launcher, on the bundled model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.launching import launched

READY_SECONDS = 120.0


@pytest.fixture(scope="session")
def cluster_ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the ready file says of a cluster of router, encoder, prefill and decode."""
    with launched(tmp_path_factory.mktemp("e-p-d"), "--topology", "e-p-d") as launcher:
        yield launcher.wait_ready(READY_SECONDS)


@pytest.fixture(scope="session")
def cluster_url(cluster_ready: dict[str, Any]) -> str:
    """Its address."""
    return str(cluster_ready["url"])


@pytest.fixture(scope="session")
def mono_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a router with one process that does all three stages."""
    with launched(tmp_path_factory.mktemp("mono"), "--topology", "mono") as launcher:
        yield str(launcher.wait_ready(READY_SECONDS)["url"])
