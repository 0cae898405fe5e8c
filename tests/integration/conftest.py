"""Clusters that the tests of a session share: started once, by the launcher, on the bundled model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.launching import launched

READY_SECONDS = 120.0


@pytest.fixture(scope="session")
def cluster_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster of router, encoder, prefill and decode."""
    with launched(tmp_path_factory.mktemp("e-p-d"), "--topology", "e-p-d") as launcher:
        yield str(launcher.wait_ready(READY_SECONDS)["url"])


@pytest.fixture(scope="session")
def mono_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a router with one process that does all three stages."""
    with launched(tmp_path_factory.mktemp("mono"), "--topology", "mono") as launcher:
        yield str(launcher.wait_ready(READY_SECONDS)["url"])
