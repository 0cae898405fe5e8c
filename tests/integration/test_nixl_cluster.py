"""Embeddings and KV between stages by `nixl`, a fake network in the library's place, and the library itself where it is
installed: the tokens of shared memory."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest

from tests.integration import tiny_cluster
from tests.integration.test_device_cluster import requests
from tests.integration.tiny_cluster import SMALL_POOL
from triptych.core.errors import StartupError
from triptych.obs import metrics
from triptych.stages.nixl_library import open_nixl
from triptych.stages.settings import WorkerSettings
from triptych.testing.cluster import InProcessCluster
from triptych.testing.fake_nixl import FakeNetwork, FakeNixl
from triptych.testing.holdings import until_idle
from triptych.transport.nixl_api import NixlError
from triptych.transport.nixl_driver import UcxDriver

model_dir = tiny_cluster.model_dir
NOT_INSTALLED = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="the extra `nixl` is not installed here"
)
MISSING = "it is not installed here"


def moved() -> dict[tuple[str, str], float]:
    kinds = {"embedding": metrics.EMBEDDING_TRANSFER_BYTES, "kv": metrics.KV_TRANSFER_BYTES}
    ways = ("nixl", "shm", "zmq")
    return {(kind, way): counter.labels(transport=way)._value.get() for kind, counter in kinds.items() for way in ways}


async def answers(model_dir: Path, transport: str, nixl: FakeNixl | None = None) -> list[list[int]]:
    async with InProcessCluster(
        model_dir, chunk_tokens=16, kv_pool_bytes=SMALL_POOL, transport=transport, nixl=nixl
    ) as cluster:
        results = await cluster.generate_many(requests(), concurrency=4)
        await until_idle(cluster.workers)
        return [result.token_ids for result in results]


@pytest.mark.parametrize("network", ["fake", pytest.param("ucx", marks=NOT_INSTALLED)])
async def test_writes_over_the_network_give_the_tokens_of_shared_memory(model_dir: Path, network: str) -> None:
    control, before = await answers(model_dir, "shm"), moved()
    made = FakeNetwork()
    assert await answers(model_dir, "nixl", FakeNixl(made) if network == "fake" else None) == control
    after = moved()
    way = {key for key in after if after[key] > before[key]} - {("embedding", "shm"), ("kv", "shm")}
    assert way == {("embedding", "nixl"), ("kv", "nixl")}
    assert made.violations == [] and made.arenas == {} and (made.num_writes > 0) == (network == "fake")


async def test_on_one_host_shared_memory_comes_first(model_dir: Path) -> None:
    made, before = FakeNetwork(), moved()
    await answers(model_dir, "auto+nixl", FakeNixl(made))
    assert made.num_writes == 0 and moved()["kv", "shm"] > before["kv", "shm"]


async def test_it_is_off_unless_the_setting_lists_it(model_dir: Path) -> None:
    async with InProcessCluster(model_dir, kv_pool_bytes=SMALL_POOL, nixl=FakeNixl(FakeNetwork())) as cluster:
        assert not any("nixl" in (worker.info.transports if worker.info else ()) for worker in cluster.workers)


def test_a_library_that_does_not_work_is_a_counted_fallback_or_an_error(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(host: str) -> UcxDriver:
        raise NixlError(MISSING)

    monkeypatch.setattr("triptych.stages.nixl_library.UcxDriver", missing)
    settings, counter = _settings(model_dir), metrics.FALLBACKS.labels("nixl_unavailable")
    before = counter._value.get()
    assert open_nixl(settings) is None and counter._value.get() == before + 1
    assert [getattr(record, "reason", "") for record in caplog.records] == [MISSING]
    for stubborn in (dataclasses.replace(settings, strict=True), dataclasses.replace(settings, transport="nixl")):
        with pytest.raises(StartupError, match=f"cannot use NIXL: {MISSING}"):
            open_nixl(stubborn)
    assert open_nixl(dataclasses.replace(settings, transport="auto", strict=True)) is None
    assert counter._value.get() == before + 1


def test_beyond_loopback_it_needs_a_network_that_somebody_called_safe(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also under TLS, which it knows nothing of."""
    asked: list[str] = []
    monkeypatch.setattr("triptych.stages.nixl_library.UcxDriver", asked.append)
    beyond = dataclasses.replace(_settings(model_dir), transport="nixl", host="10.0.0.7")
    with pytest.raises(StartupError, match="beyond loopback"):
        open_nixl(beyond)
    assert asked == []
    open_nixl(dataclasses.replace(beyond, insecure_network=True))
    open_nixl(dataclasses.replace(beyond, host="127.0.0.1"))
    assert asked == ["10.0.0.7", "127.0.0.1"]


async def test_a_worker_that_cannot_use_it_does_not_offer_it(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(host: str) -> UcxDriver:
        raise NixlError(MISSING)

    monkeypatch.setattr("triptych.stages.nixl_library.UcxDriver", missing)
    async with InProcessCluster(model_dir, kv_pool_bytes=SMALL_POOL, transport="auto+nixl") as cluster:
        offered = [worker.info.transports for worker in cluster.workers if worker.info]
        assert offered and all("nixl" not in transports and "shm" in transports for transports in offered)


def _settings(model_dir: Path) -> WorkerSettings:
    return WorkerSettings(model=model_dir, worker_id="decode-0", transport="auto+nixl")
