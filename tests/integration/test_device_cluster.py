"""Embeddings and KV between stages by `cuda_ipc`, a fake device in the driver's place: the tokens of shared memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration import tiny_cluster
from tests.integration.stage_asking import answer
from tests.integration.test_turns import MEDIA, PAGE, num_held, two_turns
from tests.integration.tiny_cluster import SMALL_POOL
from tests.parity.prompts import draw_picture
from triptych.core.errors import StaleAttempt, StartupError, TransferRefused
from triptych.obs import metrics
from triptych.stages.device_memory import open_driver
from triptych.stages.language import ComputeChoice
from triptych.stages.settings import WorkerSettings
from triptych.testing.cluster import ChatRequest, InProcessCluster
from triptych.testing.fake_device import FakeDevice
from triptych.testing.holdings import until_idle
from triptych.transport.cuda_driver import CudaDriver
from triptych.transport.device import DeviceError
from triptych.transport.receiver_link import ReceiverLink
from triptych.transport.types import EmbeddingCommitted, KvCommitted

model_dir = tiny_cluster.model_dir
MAX_TOKENS = 6


def requests() -> list[ChatRequest]:
    pictures = [draw_picture(n, (84, 56)) for n in range(5)]
    return [
        ChatRequest(
            messages=[
                {
                    "role": "user",
                    "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": f"q{n}"}],
                }
            ],
            media=(pictures[n], pictures[n + 1]),
            max_tokens=MAX_TOKENS,
        )
        for n in range(4)
    ]


def moved() -> dict[tuple[str, str], float]:
    kinds = {"embedding": metrics.EMBEDDING_TRANSFER_BYTES, "kv": metrics.KV_TRANSFER_BYTES}
    ways = ("cuda_ipc", "shm", "zmq")
    return {(kind, way): counter.labels(transport=way)._value.get() for kind, counter in kinds.items() for way in ways}


@contextmanager
def card(folder: Path, **options: dict[str, bool]) -> Iterator[Callable[[str], FakeDevice]]:
    """A device for each worker of a cluster, `options` by the beginning of the worker's id."""
    devices: list[FakeDevice] = []

    def device_of(worker_id: str) -> FakeDevice:
        devices.append(FakeDevice(folder, delay_s=0.002, **options.get(worker_id.split("-")[0], {})))  # type: ignore[arg-type]
        return devices[-1]

    yield device_of
    assert [violation for device in devices for violation in device.violations] == []
    assert [device.num_allocations for device in devices] == [0] * len(devices)
    for device in devices:
        device.close()


@pytest.mark.parametrize("transport", ["cuda_ipc", "auto"])
async def test_device_memory_gives_the_tokens_of_shared_memory(model_dir: Path, tmp_path: Path, transport: str) -> None:
    async with InProcessCluster(model_dir, chunk_tokens=16, kv_pool_bytes=SMALL_POOL, transport="shm") as cluster:
        control = [result.token_ids for result in await cluster.generate_many(requests(), concurrency=4)]
    before = moved()
    with card(tmp_path) as device_of:
        async with InProcessCluster(
            model_dir, chunk_tokens=16, kv_pool_bytes=SMALL_POOL, transport=transport, driver_of=device_of
        ) as cluster:
            answers = [result.token_ids for result in await cluster.generate_many(requests(), concurrency=4)]
            await until_idle(cluster.workers)
    assert answers == control
    after = moved()
    assert {key for key in after if after[key] > before[key]} == {("embedding", "cuda_ipc"), ("kv", "cuda_ipc")}


async def test_a_turn_on_a_device_sends_what_decode_has_not(model_dir: Path, tmp_path: Path) -> None:
    """What it holds lies in the pool itself, beside pages that a peer is writing to."""
    with card(tmp_path) as device_of:
        async with InProcessCluster(
            model_dir, chunk_tokens=24, kv_pool_bytes=SMALL_POOL, transport="cuda_ipc", driver_of=device_of
        ) as cluster:
            held = num_held()
            plan, ids = await two_turns(cluster)
            assert num_held() - held == (plan.num_prompt_tokens - 20 - 1) // PAGE
            cluster.clear_caches()
            assert await answer(cluster, plan, MEDIA) == ids
            await until_idle(cluster.workers)


@pytest.mark.parametrize("field", ["generation", "capability", "num_bytes", "slot_id", "grant_id", "num_tokens"])
async def test_a_forged_commit_is_refused_and_the_next_request_is_right(
    model_dir: Path, tmp_path: Path, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are in the device's memory by then; nobody reads them."""
    sound, forged = ReceiverLink._ask, list[str]()

    async def ask(link: ReceiverLink, asked: Any, timeout_s: float) -> Any:
        is_commit = isinstance(asked, EmbeddingCommitted | KvCommitted)
        if is_commit and hasattr(asked, field) and not forged:
            value = getattr(asked, field)
            forged.append(type(asked).__name__)
            other = bytes(16) if field == "capability" else f"{value}x" if field == "grant_id" else value + 1
            asked = dataclasses.replace(asked, **{field: other})
        return await sound(link, asked, timeout_s)

    monkeypatch.setattr(ReceiverLink, "_ask", ask)
    with card(tmp_path) as device_of:
        async with InProcessCluster(
            model_dir, chunk_tokens=16, kv_pool_bytes=SMALL_POOL, transport="cuda_ipc", driver_of=device_of
        ) as cluster:
            asked = requests()[:2]
            first = None
            with suppress(TransferRefused, StaleAttempt):  # unless it went better at the second try
                first = (await cluster.generate(asked[0])).token_ids
            assert len(forged) == 1
            await until_idle(cluster.workers)
            later = [(await cluster.generate(request)).token_ids for request in asked]
            cluster.clear_caches()
            truth = [(await cluster.generate(request)).token_ids for request in asked]
            assert later == truth and first in (None, truth[0])


async def test_peers_that_reach_the_device_and_those_that_do_not_share_one_pool(
    model_dir: Path, tmp_path: Path
) -> None:
    """What comes by host memory is copied to the device, and never over what was written there directly."""
    async with InProcessCluster(model_dir, chunk_tokens=16, kv_pool_bytes=SMALL_POOL, transport="shm") as cluster:
        control = [result.token_ids for result in await cluster.generate_many(requests(), concurrency=4)]
    for blind, way in (("encoder", "embedding"), ("prefill", "kv")):
        before = moved()
        with card(tmp_path, **{blind: {"opens": False}}) as device_of:
            async with InProcessCluster(
                model_dir, chunk_tokens=16, kv_pool_bytes=SMALL_POOL, transport="auto", driver_of=device_of
            ) as cluster:
                answers = [result.token_ids for result in await cluster.generate_many(requests(), concurrency=4)]
                await until_idle(cluster.workers)
        assert answers == control
        after = moved()
        other = "kv" if way == "embedding" else "embedding"
        assert {key for key in after if after[key] > before[key]} == {(way, "shm"), (other, "cuda_ipc")}


def test_without_a_device_it_is_refused_in_words_when_it_is_asked_for(model_dir: Path) -> None:
    on_cpu, on_gpu = (ComputeChoice(torch.device(kind), torch.float32) for kind in ("cpu", "cuda"))
    settings = {
        name: WorkerSettings(model=model_dir, worker_id="decode-0", transport=name, strict=is_strict)
        for name, is_strict in (("cuda_ipc", False), ("auto", True), ("shm", True))
    }
    with pytest.raises(StartupError, match="computes on the CPU"):
        open_driver(settings["cuda_ipc"], on_cpu)
    assert open_driver(settings["auto"], on_cpu) is None and open_driver(settings["shm"], on_gpu) is None


def test_a_gpu_without_a_driver_is_a_counted_fallback(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(_: torch.device) -> CudaDriver:
        raise DeviceError("no NVIDIA driver")

    monkeypatch.setattr("triptych.stages.device_memory.CudaDriver", no_driver)
    on_gpu, counter = (
        ComputeChoice(torch.device("cuda"), torch.float32),
        metrics.FALLBACKS.labels("cuda_ipc_unavailable"),
    )
    settings, before = WorkerSettings(model=model_dir, worker_id="decode-0"), counter._value.get()
    assert open_driver(settings, on_gpu) is None and counter._value.get() == before + 1
    for stubborn in (dataclasses.replace(settings, strict=True), dataclasses.replace(settings, transport="cuda_ipc")):
        with pytest.raises(StartupError, match="no NVIDIA driver"):
            open_driver(stubborn, on_gpu)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_the_real_driver_says_that_there_is_none() -> None:
    with pytest.raises(DeviceError, match=r"cuInit|no NVIDIA driver"):
        CudaDriver(torch.device("cuda", 0))


async def test_without_a_device_nothing_offers_it(model_dir: Path) -> None:
    async with InProcessCluster(model_dir, "e-p-d", kv_pool_bytes=SMALL_POOL) as cluster:
        assert not any("cuda_ipc" in (worker.info.transports if worker.info else ()) for worker in cluster.workers)
