"""Pickles over the device memory and the leases of `cuda_ipc`, on a fake device: never unpickled, and the answers that
follow are right."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.canary import Canary, listening
from tests.integration import tiny_cluster
from tests.integration.test_canaries import ASKED
from triptych.testing.cluster import InProcessCluster
from triptych.testing.fake_device import FakeDevice
from triptych.transport.device_arena import LEASE_BYTES, DeviceArena
from triptych.transport.shm import SharedSegment

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]
model_dir = tiny_cluster.model_dir


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[InProcessCluster]:
    folder, devices = tmp_path_factory.mktemp("card"), list[FakeDevice]()

    def device_of(_: str) -> FakeDevice:
        devices.append(FakeDevice(folder))
        return devices[-1]

    async with InProcessCluster(
        model_dir, kv_pool_bytes=tiny_cluster.SMALL_POOL, chunk_tokens=48, transport="cuda_ipc", driver_of=device_of
    ) as started:
        yield started
    assert [violation for device in devices for violation in device.violations] == []
    for device in devices:
        device.close()


def arenas(cluster: InProcessCluster) -> list[DeviceArena]:
    found = []
    for worker in cluster.workers:
        receivers: Any = worker._transfer._receivers  # type: ignore[union-attr]
        found += [each.arena.device for each in (receivers.embedding, receivers.kv) if each is not None]
    return [arena for arena in found if arena is not None]


def covered(memory: memoryview, canary: Canary) -> None:
    bird = canary.raw * (len(memory) // len(canary.raw))
    memory[: len(bird)] = bird


async def test_a_canary_in_leases_and_free_device_memory_changes_nothing(
    cluster: InProcessCluster, tmp_path: Path
) -> None:
    """Whoever maps a lease may write to it, though there is nothing to be written; and so for all that nobody owns."""
    canary = Canary(tmp_path / "trace")
    truth = (await cluster.generate(ASKED)).token_ids
    cluster.clear_caches()
    assert len(arenas(cluster)) == 2
    with listening() as looked_up:
        for arena in arenas(cluster):
            peer = SharedSegment.open(arena.lease.name, LEASE_BYTES, mapping_id=2**40)
            covered(peer.buffer, canary)
            covered(memoryview(arena.tensor.numpy()).cast("B"), canary)
            peer.close()
        assert (await cluster.generate(ASKED)).token_ids == truth
        cluster.clear_caches()
        assert (await cluster.generate(ASKED)).token_ids == truth
        cluster.check_integrity()
    assert not canary.sung() and looked_up == []
    assert all(canary.raw in bytes(arena.lease.buffer) for arena in arenas(cluster)), "nobody read or changed them"
