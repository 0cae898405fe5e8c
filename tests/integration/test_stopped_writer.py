"""A writer that is stopped between grant and write, and goes on when its lease is over and the memory another's: no
answer changes."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.integration import tiny_cluster
from tests.integration.answers import assert_same_answers
from tests.integration.launching import REPOSITORY
from tests.integration.stopped_writer import WRITTEN
from tests.parity.prompts import draw_picture
from tests.seed import rotating
from triptych.core.errors import TriptychError
from triptych.core.ids import AttemptRef, new_request_id
from triptych.core.plan import Item
from triptych.engine.landing import LandingSlot, LandingTable
from triptych.rpc import server
from triptych.stages.encoder import _EncodeRun
from triptych.stages.worker import Worker
from triptych.testing.cluster import ChatRequest, InProcessCluster
from triptych.testing.holdings import until_idle

model_dir = tiny_cluster.model_dir

LEASE_S = 3.0
NUM_OTHERS = 6
WAYS = {"shm": None, "zmq-tcp": 1_000}
"""With how soon a session counts as lost whose peer says nothing, in ms; None: not while the test lasts. Only then are
slots of a sender of frames free again; what is mapped stays in quarantine in any case."""


def asked(number: int) -> ChatRequest:
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": f"question {number}"}]
    media = (draw_picture(2 * number, (112, 84)), draw_picture(2 * number + 1, (112, 84)))
    return ChatRequest([{"role": "user", "content": content}], media, max_tokens=8)


@asynccontextmanager
async def writer_process(cluster: InProcessCluster, prefill: Worker, way: str) -> AsyncIterator[Any]:
    assert prefill.info is not None
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "tests.integration.stopped_writer",
        prefill.info.grpc_address,
        prefill.ref.worker_id,
        str(prefill.ref.epoch),
        cluster._runtime.token(),
        prefill._links.embedding_layout.hex(),
        way,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):
            child.send_signal(signal.SIGCONT)
            child.kill()
        await child.wait()


async def line_of(child: Any) -> list[str]:
    return (await asyncio.wait_for(child.stdout.readline(), 30)).decode().split()


async def read(cluster: InProcessCluster, request: ChatRequest, request_id: str) -> None:
    plan = dataclasses.replace(cluster.plan(request), timeout_s=LEASE_S)
    async with cluster.pipeline.answer(plan, request.media, request_id) as answer:
        async for _ in answer.events():
            pass


def with_counts(prefill: Worker) -> dict[str, int]:
    assert prefill.language_engine is not None
    return prefill.language_engine.call(prefill.language_engine.landing.counts_bytes).result(10)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", rotating(list(WAYS)))
async def test_what_is_written_after_the_lease_changes_no_answer(
    model_dir: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (silence_ms := WAYS[way]) is not None:
        shorter = {"grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"}
        options = [(name, silence_ms if name in shorter else value) for name, value in server.SERVER_OPTIONS]
        monkeypatch.setattr(server, "SERVER_OPTIONS", options)
    others = [asked(number) for number in range(NUM_OTHERS)]
    victim = dataclasses.replace(asked(99), media=(draw_picture(198, (112, 84)), draw_picture(199, (112, 84))))
    left_behind: list[bytes] = []
    async with InProcessCluster(model_dir, "e-p-d", chunk_tokens=16, capture_logits=True) as cluster:
        (prefill,) = [worker for worker in cluster.workers if worker.landing is not None]
        alone = await cluster.generate_many(others)
        cluster.clear_caches()
        arena = prefill.landing.arena.buffer  # type: ignore[union-attr]
        sound_encode, sound_end = _EncodeRun._encode_item, LandingTable._end_quarantine
        item = cluster.plan(victim).items[0]

        async def encode(run: Any, link: Any, index: int, of: Item) -> Any:
            if of.identity == item.identity:
                await asyncio.sleep(3600)  # that one is the stopped writer's
            return await sound_encode(run, link, index, of)

        def end_quarantine(table: LandingTable, landing: LandingSlot) -> None:
            slot = landing.slot
            left_behind.append(bytes(arena[slot.offset : slot.offset + slot.num_bytes]))
            sound_end(table, landing)

        monkeypatch.setattr(_EncodeRun, "_encode_item", encode)
        monkeypatch.setattr(LandingTable, "_end_quarantine", end_quarantine)
        async with writer_process(cluster, prefill, way) as child:
            assert await line_of(child) == ["connected"]
            ref = AttemptRef(new_request_id())
            reading = asyncio.create_task(read(cluster, victim, ref.request_id))
            num_bytes = item.num_tokens * prefill.language_engine.limits.row_bytes  # type: ignore[union-attr]
            child.stdin.write(f"{ref.request_id} {item.identity.hex()} {item.num_tokens} {num_bytes}\n".encode())
            assert (await line_of(child))[0] == "granted"
            child.send_signal(signal.SIGSTOP)
            with pytest.raises(TriptychError):
                await reading
            if silence_ms is not None:
                async with asyncio.timeout(20):
                    while with_counts(prefill)["quarantined"]:  # noqa: ASYNC110 - the engine tells nobody
                        await asyncio.sleep(0.05)
            while_stopped = await cluster.generate_many(others, concurrency=3)
            assert bool(with_counts(prefill)["quarantined"]) == (silence_ms is None)
            cluster.clear_caches()
            going_on = asyncio.create_task(cluster.generate_many(others * 2, concurrency=3))
            child.send_signal(signal.SIGCONT)
            assert await line_of(child) not in ([], ["committed"])
            afterwards = await going_on
            assert await asyncio.wait_for(child.wait(), 20) == 0
        assert_same_answers(alone, [answer.token_ids for answer in while_stopped])
        assert_same_answers(alone * 2, [answer.token_ids for answer in afterwards])
        await until_idle(cluster.workers)
    if silence_ms is None:
        assert left_behind == [bytes([WRITTEN]) * num_bytes], "it did write, after its lease and where nobody was"
