"""A prefill worker that acknowledges nothing for a while keeps its own pictures waiting, and no others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from tests.parity.checkpoints import DEMO_DIR
from tests.parity.prompts import draw_picture
from triptych.core.clock import SystemClock
from triptych.obs import metrics
from triptych.stages.worker import Worker
from triptych.testing.cluster import ChatRequest, InProcessCluster
from triptych.testing.holdings import until_idle

NUM_REQUESTS = 6
SIZE = (112, 84)


def asked(seed: int) -> ChatRequest:
    content = [{"type": "image"}, {"type": "text", "text": f"question {seed}"}]
    return ChatRequest([{"role": "user", "content": content}], (draw_picture(seed, SIZE),), max_tokens=3)


def held_back(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Its commits wait from now on."""
    assert worker.landing is not None
    go_on, sound = asyncio.Event(), worker.landing.commit_embedding

    async def commit(*arguments: Any) -> None:
        await go_on.wait()
        await sound(*arguments)

    monkeypatch.setattr(worker.landing, "commit_embedding", commit)
    return go_on


@pytest.mark.parametrize("transport", ["shm", "zmq-ipc"])
async def test_a_slow_receiver_keeps_its_own_pictures_waiting_and_no_others(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    requests = [asked(seed) for seed in range(NUM_REQUESTS)]
    async with InProcessCluster(DEMO_DIR, "e-p-d", num_prefills=2, transport=transport, in_flight_bytes=1) as cluster:
        (supply,) = [worker.supply for worker in cluster.workers if worker.supply is not None]
        slow, _ = [worker for worker in cluster.workers if worker.landing is not None]
        size = cluster.plan(requests[0]).items[0].num_tokens * supply.row_bytes
        go_on = held_back(slow, monkeypatch)
        start_ns = SystemClock().monotonic_ns()
        running = [asyncio.create_task(cluster.generate(request)) for request in requests]
        async with asyncio.timeout(20):
            while not only_the_slow_ones_wait(running, size):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        num_waiting = sum(not task.done() for task in running)
        assert 2 <= num_waiting < NUM_REQUESTS, "both workers have some"
        go_on.set()
        answers = await asyncio.gather(*running)
        waits = [event for answer in answers for event in answer.timeline if event.event == "in_flight_wait"]
        assert len(waits) >= num_waiting - 1 and all(event.start_ns >= start_ns for event in waits)
        await until_idle(cluster.workers)
        cluster.clear_caches()  # the control comes last: what a worker has served before draws requests to it
        control = await cluster.generate_many(requests)
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in control]


def only_the_slow_ones_wait(running: list[asyncio.Task[Any]], size_bytes: int) -> bool:
    """One picture of each pair may be on its way, and the one that is is the slow worker's. All others of its pictures
    have a slot and wait; the other worker's requests have been answered."""
    num_waiting = sum(not task.done() for task in running)
    in_flight, parked = metrics.EMBEDDING_IN_FLIGHT_BYTES._value.get(), metrics.EMBEDDING_PARKED_ITEMS._value.get()
    return num_waiting > 0 and parked == num_waiting - 1 and in_flight == size_bytes
