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
from triptych.core.errors import MediaInvalid
from triptych.core.plan import EmbeddingSource, Item
from triptych.media.frames import Target
from triptych.media.picture import decode_picture, fit
from triptych.media.pool import MediaPool
from triptych.media.process import Decoded
from triptych.mm.item import MultimodalDataItem
from triptych.obs import metrics
from triptych.rpc.client import ChannelPool, health_stub
from triptych.stages.encoder import EncoderStage
from triptych.testing.cluster import ChatRequest, InProcessCluster
from triptych.testing.failpoints import armed
from triptych.testing.holdings import until_idle

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
        await until_idle(cluster.workers)
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


# --- once -------------------------------------------------------------------------------------------------------------


class Counts:
    """What an encoder has done since, by its counters."""

    def __init__(self) -> None:
        self._before = self._now()

    @property
    def since(self) -> dict[str, float]:
        return {name: value - self._before[name] for name, value in self._now().items()}

    @staticmethod
    def _now() -> dict[str, float]:
        requests = metrics.EMBEDDING_CACHE_REQUESTS
        return {
            "decoded": metrics.MEDIA_PICTURES.labels("decoded")._value.get(),
            "missed": requests.labels("miss")._value.get(),
            "shared": requests.labels("hit")._value.get() + requests.labels("joined")._value.get(),
            "encoded": metrics.ENCODER_BATCH_ITEMS._sum.get(),
            "passes": sum(bucket.get() for bucket in metrics.ENCODER_BATCH_ITEMS._buckets),
            "patches": metrics.ENCODER_PATCHES._value.get(),
            "radix": metrics.ENCODER_ITEMS.labels("radix")._value.get(),
            "finished": sum(metrics.ENCODER_ITEMS.labels(each.value)._value.get() for each in EmbeddingSource),
            "shipped_bytes": sum(
                metrics.EMBEDDING_TRANSFER_BYTES.labels(transport=way)._value.get() for way in ("inproc", "shm", "zmq")
            ),
        }


async def test_fifty_requests_over_five_pictures_of_mixed_sizes_decode_and_encode_each_once(
    epd: InProcessCluster,
) -> None:
    sizes = [(84, 56), (200, 180), (28, 28), (140, 112), (300, 60)]
    pictures = [draw_picture(40 + number, size) for number, size in enumerate(sizes)]
    plans = [epd.plan(asked(each)) for each in pictures]
    grids = [plan.items[0].grid for plan in plans]
    requests = [asked(pictures[n % 5], text=f"question {n}?") for n in range(50)]
    counts = Counts()
    with armed("encoder.before_encode=delay(300)*1"):  # whatever comes meanwhile shares the next pass
        together = await epd.generate_many(requests, concurrency=50)
    done = counts.since
    assert (done["decoded"], done["encoded"], done["missed"]) == (5, 5, 5)
    assert done["patches"] == sum(grid.h * grid.w for grid in grids)
    assert done["passes"] < 5
    assert done["finished"] == 50
    for n in (0, 11, 22, 33, 49):
        epd.clear_caches()
        assert (await epd.generate(requests[n])).token_ids == together[n].token_ids


async def test_a_follow_up_turn_encodes_nothing_ships_nothing_and_fetches_nothing(
    epd: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[int] = []
    stock = EncoderStage.hold

    def counting(self: EncoderStage, item: Item, data: bytes, cache_salt: bytes) -> MultimodalDataItem:
        fetched.append(len(data))
        return stock(self, item, data, cache_salt)

    monkeypatch.setattr(EncoderStage, "hold", counting)
    first = asked(PICTURE, text="what is this, and what is beside it?")
    answer = await epd.generate(first)
    assert fetched == [len(PICTURE)]
    follow_up = ChatRequest(
        [*first.messages, {"role": "assistant", "content": "a box"}, {"role": "user", "content": "and its colour?"}],
        (PICTURE,),
        MAX_TOKENS,
    )
    counts = Counts()
    again = await epd.generate(follow_up)
    done = counts.since
    assert done["finished"] == done["radix"] <= 1, "the encoder is asked or not, as the router has heard of the KV"
    assert {name for name, value in done.items() if value} <= {"finished", "radix"}
    assert fetched == [len(PICTURE)]
    assert again.cached_tokens > 0 == answer.cached_tokens
    assert not [event for event in again.timeline if event.event in ("fetch", "preprocess", "encode", "write")]
    epd.clear_caches()
    assert (await epd.generate(follow_up)).token_ids == again.token_ids


async def test_a_picture_that_the_encoder_knows_is_shipped_and_not_fetched(epd: InProcessCluster) -> None:
    await epd.generate(asked(PICTURE))
    epd.clear_language_caches()
    counts = Counts()
    other = ChatRequest(
        [{"role": "system", "content": "Be short."}, {"role": "user", "content": [{"type": "image"}]}],
        (PICTURE,),
        MAX_TOKENS,
    )
    again = await epd.generate(other)
    done = counts.since
    assert (done["decoded"], done["encoded"], done["missed"], done["shared"]) == (0, 0, 0, 1)
    assert done["shipped_bytes"] > 0
    assert not [event for event in again.timeline if event.event in ("fetch", "preprocess", "encode")]


async def test_a_failure_is_not_cached(epd: InProcessCluster) -> None:
    counts = Counts()
    with armed("encoder.encode_item=error(media_invalid)*1"), pytest.raises(MediaInvalid):
        await epd.generate(asked(PICTURE))
    assert (await epd.generate(asked(PICTURE))).token_ids
    assert (counts.since["missed"], counts.since["decoded"], counts.since["encoded"]) == (2, 2, 1)
