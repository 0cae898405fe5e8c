"""What real workers tell of their caches reaches the router, and is true; a router that was told lies still gets right
answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.router.placement import ClusterView
from tests.integration import tiny_cluster
from tests.integration.stage_asking import answer, asked, eventually, picture
from tests.integration.tiny_cluster import SMALL_POOL
from triptych.core.cache_feed import Change, FeedKind, FeedMessage, Holding, number_of
from triptych.core.ids import WorkerRef
from triptych.core.plan import EmbeddingSource
from triptych.kv.page_chain import page_numbers
from triptych.testing.cluster import InProcessCluster

model_dir = tiny_cluster.model_dir

REMOTE = EmbeddingSource.REMOTE
QUESTION = "what is it, and what is beside it, and why are there two of them in one picture?"


@pytest.fixture
async def cluster(model_dir: Path) -> AsyncIterator[InProcessCluster]:
    async with InProcessCluster(model_dir, chunk_tokens=24, kv_pool_bytes=SMALL_POOL) as found:
        index = found.pipeline.routing.index
        await eventually(lambda: all(index.is_synced(worker.ref) for worker in found.workers))
        yield found


def ref_of(cluster: InProcessCluster, name: str) -> WorkerRef:
    return next(worker.ref for worker in cluster.workers if worker.ref.worker_id == name)


async def test_the_index_comes_to_hold_what_the_workers_hold(cluster: InProcessCluster) -> None:
    media = (picture(1),)
    plan = cluster.plan(asked(QUESTION, *media, max_tokens=24))
    await answer(cluster, plan, media)
    index, number = cluster.pipeline.routing.index, number_of(plan.items[0].identity)
    prefill, decode, encoder = (ref_of(cluster, name) for name in ("prefill-0", "decode-0", "encoder-0"))
    await eventually(lambda: index.holds(prefill, Holding.LANDED, number))
    await eventually(lambda: index.holds(encoder, Holding.ENCODED, number))
    prompt = cluster.pipeline.new_prompt(plan)
    await eventually(lambda: index.num_pages(prefill, prompt.numbers(16)) == plan.num_prompt_tokens // 16)
    for ref in (prefill, decode):
        engine = next(worker.language_engine for worker in cluster.workers if worker.ref == ref)
        assert engine is not None
        truth = engine.call(lambda e=engine: {node.number for node in e.manager.tree.nodes()}).result(5)
        await eventually(lambda: index._accounts[ref].held[Holding.PAGE] == truth)  # noqa: B023
    assert index.load(prefill) is not None and index.load(prefill).free_pages is not None  # type: ignore[union-attr]
    await eventually(lambda: (index.load(prefill).tokens_per_s or 0) > 0)  # type: ignore[union-attr]
    await eventually(lambda: (index.load(encoder).patches_per_s or 0) > 0)  # type: ignore[union-attr]
    cluster.clear_caches()
    await eventually(lambda: [index.num_entries(ref) for ref in (prefill, decode, encoder)] == [0, 0, 0])


async def test_a_picture_that_prefill_holds_is_sent_to_no_encoder(cluster: InProcessCluster) -> None:
    media = (picture(1),)
    first = cluster.plan(asked(QUESTION, *media, max_tokens=8))
    expected = await answer(cluster, first, media)
    index, prefill = cluster.pipeline.routing.index, ref_of(cluster, "prefill-0")
    await eventually(lambda: index.holds(prefill, Holding.LANDED, number_of(first.items[0].identity)))
    async with cluster.pipeline.answer(first, media, "req-again") as again:
        ids = [token.id async for event in again.events() if hasattr(event, "tokens") for token in event.tokens]
    assert ids == expected
    assert not [event for event in again.all_events() if event.stage == "encoder"]


@pytest.mark.parametrize("lie", list(Holding))
async def test_a_router_that_was_told_lies_gets_the_right_answer(cluster: InProcessCluster, lie: Holding) -> None:
    """Everything that could be believed of this prompt is told of every worker, and none of it is true."""
    media = (picture(1), picture(2))
    plan = cluster.plan(asked(QUESTION, *media, max_tokens=8))
    expected = await answer(cluster, plan, media)
    cluster.clear_caches()
    routing = cluster.pipeline.routing
    numbers = [
        *page_numbers(b"", cluster.adapter.expand(plan.compact_ids, plan.items), 16),
        *[number_of(item.identity) for item in plan.items],
    ]
    await asyncio.sleep(0.2)  # what was evicted has been told
    for worker in cluster.workers:
        known = routing.index.sequence(worker.ref)
        assert known is not None
        lies = {lie: Change(stored=tuple(numbers))}
        routing.apply(worker.ref, FeedMessage(worker.ref.epoch, known, FeedKind.PART, lies))
    infos = tuple(worker.info for worker in cluster.workers if worker.info is not None)
    choice = routing.choose(ClusterView(infos), cluster.pipeline.new_prompt(plan), 0)
    sources = {share.source for share in choice.ordered[0].forecast.shares}
    assert sources == {{Holding.PAGE: "kv", Holding.LANDED: "landed", Holding.ENCODED: "cached"}[lie]}
    async with cluster.pipeline.answer(plan, media, "req-lied-to") as again:
        ids = [token.id async for event in again.events() if hasattr(event, "tokens") for token in event.tokens]
    assert ids == expected
    waits = [event for event in again.all_events() if event.event == "embedding_wait"]
    assert [event.source for event in waits] == [EmbeddingSource.REMOTE] * 2
