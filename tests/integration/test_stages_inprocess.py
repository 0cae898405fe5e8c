"""The real stages in one process, over real gRPC and shared memory: load, caches, cancellations and faults."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from services.router.pipeline import Pipeline
from services.router.queue import AdmissionQueue
from tests.integration import tiny_cluster
from tests.integration.answers import assert_same_answers
from tests.integration.stage_asking import WIRINGS, all_is_given_back, asked, events, mixed_load, picture
from tests.integration.tiny_cluster import MAX_TOKENS, SMALL_POOL
from triptych.core.clock import SystemClock
from triptych.core.ids import new_request_id
from triptych.core.plan import EmbeddingSource
from triptych.core.worker import Role, WorkerInfo
from triptych.obs import metrics
from triptych.testing.cluster import ChatRequest, InProcessCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")
model_dir, shared, epd = tiny_cluster.model_dir, tiny_cluster.shared, tiny_cluster.epd


# --- load -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("topology", "transport"), WIRINGS)
async def test_a_mixed_load_gets_the_tokens_that_each_request_gets_alone(
    model_dir: Path, topology: str, transport: str | None, seed: int
) -> None:
    requests = mixed_load(seed, 24)
    async with InProcessCluster(
        model_dir,
        topology,
        chunk_tokens=48,
        kv_pool_bytes=SMALL_POOL,
        transport=transport,
        capture_logits=True,
    ) as cluster:
        together = await cluster.generate_many(requests, concurrency=8)
        cluster.clear_caches()
        alone = await cluster.generate_many(requests)
        await all_is_given_back(cluster)
    assert_same_answers(alone, [result.token_ids for result in together])
    assert len({tuple(result.token_ids) for result in alone}) > len(alone) // 3, "the answers tell requests apart"


async def test_fifty_at_once_over_five_pictures_encode_five_times(epd: InProcessCluster) -> None:
    pictures = [picture(number) for number in range(5)]
    results = await epd.generate_many([asked(f"q{n}", pictures[n % 5]) for n in range(50)], concurrency=50)
    assert sum(len(events(result, "encode")) for result in results) == 5
    assert sum(len(events(result, "fetch")) for result in results) == 5
    assert sum(len(events(result, "preprocess")) for result in results) == 5
    by_picture = [{tuple(results[n].token_ids) for n in range(k, 50, 5)} for k in range(5)]
    assert len(set.union(*by_picture)) > 5
    await all_is_given_back(epd)


async def test_a_repeated_request_moves_no_media_and_encodes_nothing(epd: InProcessCluster) -> None:
    request = asked("what is this, and what is beside it?", picture(1), picture(2))
    first, again = await epd.generate(request), await epd.generate(request)
    assert len(events(first, "fetch")) == len(events(first, "encode")) == 2
    assert {event.source for event in events(again, "radix_hit")} <= {EmbeddingSource.RADIX}, "if it is asked at all"
    assert not [event for event in again.timeline if event.event in ("fetch", "preprocess", "encode", "write")]
    assert again.token_ids == first.token_ids
    assert again.cached_tokens > 0 == first.cached_tokens


@pytest.mark.parametrize(("topology", "source"), [("mono", "local"), ("p-d", "local"), ("e-pd", "remote")])
async def test_what_was_encoded_in_the_process_that_prefills_is_local(
    topology: str, source: str, model_dir: Path
) -> None:
    counted = metrics.EMBEDDING_SOURCE.labels(source)._value
    before = counted.get()
    async with InProcessCluster(model_dir, topology, kv_pool_bytes=SMALL_POOL) as cluster:
        first = await cluster.generate(asked("what is this?", picture(1)))
    assert [event.source for event in events(first, "write")] == [EmbeddingSource(source)]
    assert counted.get() == before + 1


async def test_a_picture_in_another_prompt_comes_from_the_encoders_cache(epd: InProcessCluster) -> None:
    await epd.generate(asked("one", picture(1)))
    epd.clear_language_caches()
    other = ChatRequest(
        [{"role": "system", "content": "Be short."}, {"role": "user", "content": [{"type": "image"}]}],
        (picture(1),),
        MAX_TOKENS,
    )
    again = await epd.generate(other)
    assert len(events(again, "cache_hit")) == 1
    assert not [event for event in again.timeline if event.event in ("fetch", "preprocess", "encode")]
    assert [event.source for event in events(again, "write")] == [EmbeddingSource.CACHE]
    epd.clear_caches()
    assert (await epd.generate(other)).token_ids == again.token_ids


async def test_a_pool_too_small_for_all_serves_them_one_after_another(model_dir: Path) -> None:
    requests = [asked(f"q{number}", picture(number, (112, 112)), max_tokens=40) for number in range(6)]
    async with InProcessCluster(model_dir, chunk_tokens=32, kv_pool_bytes=10 * 24576, capture_logits=True) as cluster:
        together = await cluster.generate_many(requests, concurrency=6)
        cluster.clear_caches()
        alone = await cluster.generate_many(requests)
        await all_is_given_back(cluster)
    assert_same_answers(alone, [result.token_ids for result in together])


# --- several workers of a kind ----------------------------------------------------------------------------------------


async def test_several_workers_of_every_kind_are_all_used(model_dir: Path, seed: int) -> None:
    requests = [asked(f"q{number}", picture(number)) for number in range(16)]
    async with InProcessCluster(
        model_dir, chunk_tokens=48, kv_pool_bytes=SMALL_POOL, num_encoders=2, num_prefills=2, num_decodes=2
    ) as cluster:
        together = await cluster.generate_many(requests, concurrency=8)
        await all_is_given_back(cluster)
    used = Counter((event.stage, event.worker_id) for result in together for event in result.timeline)
    for stage, number in itertools.product(("encoder", "prefill", "decode"), (0, 1)):
        assert used[stage, f"{stage}-{number}"] > 0
    async with InProcessCluster(model_dir, "mono", kv_pool_bytes=SMALL_POOL, capture_logits=True) as mono:
        alone = await mono.generate_many(requests)
    assert_same_answers(alone, [result.token_ids for result in together])


class Masked:
    """A registry that shows fewer roles of some workers than they have."""

    def __init__(self, cluster: InProcessCluster, roles: Mapping[str, frozenset[Role]]) -> None:
        infos = [worker.info for worker in cluster.workers if worker.info is not None]
        shown = [dataclasses.replace(info, roles=roles.get(info.worker_id, info.roles)) for info in infos]
        self._shown = tuple(info for info in shown if info.roles)

    def workers(self) -> tuple[WorkerInfo, ...]:
        return self._shown

    def refresh(self) -> tuple[WorkerInfo, ...]:
        return self._shown


@pytest.mark.parametrize(
    ("topology", "roles", "served_by"),
    [
        ("e-p-d+mono", {"mono-0": {Role.ENCODER, Role.PREFILL}, "prefill-0": set()}, "mono-0 mono-0 decode-0"),
        ("e-p-d+mono", {"mono-0": {Role.ENCODER}, "encoder-0": set()}, "mono-0 prefill-0 decode-0"),
        ("e-p-d+e-pd", {"pd-0": {Role.PREFILL}, "prefill-0": set()}, "encoder-0 pd-0 decode-0"),
        ("e-pd+p-d", {"ep-0": {Role.ENCODER}, "encoder-0": set(), "decode-0": set()}, "ep-0 pd-0 pd-0"),
        ("e-p-d+p-d", {"ep-0": {Role.ENCODER}, "encoder-0": set()}, "ep-0 prefill-0 decode-0"),
    ],
)
async def test_a_worker_that_does_more_can_do_one_stage_for_others(
    model_dir: Path, topology: str, roles: dict[str, frozenset[Role]], served_by: str
) -> None:
    """A pool that nobody else writes to is read from by a hand-over; a tower beside an engine sends what it made."""
    request = asked("what is it?", picture(1), picture(2), max_tokens=12)
    async with InProcessCluster(model_dir, topology, chunk_tokens=24, kv_pool_bytes=SMALL_POOL) as cluster:
        control = await cluster.generate(request)
        cluster.clear_caches()
        masked = Masked(cluster, {name: frozenset(shown) for name, shown in roles.items()})
        pipeline = Pipeline(masked, cluster.pipeline._channels, AdmissionQueue(8), SystemClock())
        async with pipeline.answer(cluster.plan(request), request.media, new_request_id()) as running:
            ids = [token.id async for event in running.events() for token in getattr(event, "tokens", ())]
            served = running.progress.workers
        assert ids == control.token_ids
        assert [served[role] for role in (Role.ENCODER, Role.PREFILL, Role.DECODE)] == [[n] for n in served_by.split()]
        await all_is_given_back(cluster)
