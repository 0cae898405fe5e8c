"""Media processes under a whole cluster: nobody else notices what a picture does to them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2

from tests.bombs import png_bomb
from tests.integration import tiny_cluster
from tests.integration.tiny_cluster import MAX_TOKENS, SMALL_POOL
from tests.parity.prompts import draw_picture
from triptych.media.frames import Target
from triptych.media.picture import decode_picture, fit
from triptych.media.pool import MediaPool
from triptych.media.process import Decoded
from triptych.obs import metrics
from triptych.rpc.client import ChannelPool, health_stub
from triptych.testing.cluster import ChatRequest, InProcessCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")
model_dir, shared, epd = tiny_cluster.model_dir, tiny_cluster.shared, tiny_cluster.epd

# Idle, a check takes 1 ms, and under load 15 on two shared cores; a bomb takes 250 ms.
MAX_LAG_S = 0.1
PICTURE = draw_picture(1, (84, 56))


def asked(*media: bytes, text: str = "what is it?") -> ChatRequest:
    parts = [*({"type": "image"} for _ in media), {"type": "text", "text": text}]
    return ChatRequest([{"role": "user", "content": parts}], media, MAX_TOKENS)


def pool_of(cluster: InProcessCluster) -> MediaPool:
    return next(worker.media_pool for worker in cluster.workers if worker.media_pool is not None)


@pytest.mark.parametrize("topology", ["e-p-d", "mono"])
async def test_an_answer_is_right_though_its_media_process_is_killed(topology: str, model_dir: Path) -> None:
    async with InProcessCluster(model_dir, topology, kv_pool_bytes=SMALL_POOL) as cluster:
        truth = (await cluster.generate(asked(PICTURE))).token_ids
        for _ in range(2):
            cluster.clear_caches()
            (pid,) = pool_of(cluster).pids
            os.kill(pid, signal.SIGSTOP)
            answer = asyncio.create_task(cluster.generate(asked(PICTURE)))
            await asyncio.sleep(0.1)
            os.kill(pid, signal.SIGKILL)
            assert (await answer).token_ids == truth
            assert pid not in pool_of(cluster).pids
        cluster.clear_caches()
        assert (await cluster.generate(asked(PICTURE))).token_ids == truth


async def health_lag_s(cluster: InProcessCluster) -> float:
    """How long 90% of the encoder's health checks take at most, while fifty bombs wait and five are decoded.

    All stages and the client share one loop here, so whatever blocks it shows.
    """
    encoder = next(worker for worker in cluster.workers if worker.media_pool is not None)
    assert encoder.info is not None
    channels = ChannelPool(None)
    health = health_stub(channels, encoder.info)
    decoded = metrics.MEDIA_PICTURES.labels("decoded")._value
    before, give_up_at = decoded.get(), time.monotonic() + 20.0
    bombs = [png_bomb(5000, 5000, str(number).encode()) for number in range(50)]
    asking = [asyncio.create_task(cluster.generate(asked(bomb))) for bomb in bombs]
    lags_s: list[float] = []
    try:
        while decoded.get() < before + 5:
            assert time.monotonic() < give_up_at
            start = time.monotonic()
            reply = await health.Check(health_pb2.HealthCheckRequest(), timeout=10.0)
            lags_s.append(time.monotonic() - start)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
            await asyncio.sleep(0.01)
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await channels.close()
    return sorted(lags_s)[len(lags_s) * 9 // 10]


async def test_health_answers_while_fifty_bombs_are_decoded(epd: InProcessCluster) -> None:
    assert await health_lag_s(epd) < MAX_LAG_S
    assert (await epd.generate(asked(PICTURE))).token_ids


async def test_decoding_on_the_loop_would_be_noticed(epd: InProcessCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def here(_: MediaPool, media: bytes, target: Target) -> Future[Decoded]:
        future: Future[Decoded] = Future()
        image = decode_picture(media, 10**8)
        future.set_result(Decoded(fit(image, target), *image.size))
        metrics.MEDIA_PICTURES.labels("decoded").inc()
        return future

    monkeypatch.setattr(MediaPool, "submit", here)
    assert await health_lag_s(epd) > MAX_LAG_S
