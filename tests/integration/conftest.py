"""Clusters that the tests of a session share: started once, by the launcher, on the bundled model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration import fake_workers
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


@pytest.fixture(params=["grpc", "line"])
def by_grpc_and_line(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fake workers take calls by gRPC's own, and by lines: nobody can tell by what comes of them."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own paths are too long for a socket
        monkeypatch.setattr(fake_workers, "lines_folder", Path(folder) if request.param == "line" else None)
        yield
