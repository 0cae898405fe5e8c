"""Prefill and decode in unlike number formats: what is in the pools afterwards, what is counted, what is refused."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.integration import tiny_cluster
from tests.integration.stage_asking import answer, asked
from tests.integration.test_cancellation import asked as asked_anew
from tests.integration.test_cancellation import left
from tests.integration.tiny_cluster import SMALL_POOL
from tests.unlike import Differences, UnlikeCluster
from triptych.core.errors import Unavailable
from triptych.core.plan import Plan
from triptych.obs import metrics
from triptych.testing.cluster import InProcessCluster
from triptych.testing.holdings import until_idle

model_dir = tiny_cluster.model_dir
QUESTION = "what is it, and what is beside it, and why are there two of them? " * 4
STAGES = ("prefill", "decode")
ROUNDING = {"allow_kv_narrowing": True}


def cached(cluster: InProcessCluster, worker: int, plan: Plan) -> torch.Tensor:
    """What that worker's pool holds of a prompt without pictures: (layers, 2, kv_heads, tokens, head_dim)."""
    engine = cluster.workers[worker].language_engine
    assert engine is not None

    def read() -> torch.Tensor:
        ids = list(plan.compact_ids)
        pages = [node.page for node in engine.manager.tree.match(plan.cache_salt, ids, len(ids))]
        return engine._runner.pool[:, :, torch.tensor(pages)].clone()

    rows = engine.call(read).result(10)
    layers, kinds, num_pages, heads, page_tokens, head_dim = rows.shape
    return rows.transpose(2, 3).reshape(layers, kinds, heads, num_pages * page_tokens, head_dim)


def counted() -> dict[str, float]:
    pages = {how: metrics.KV_CONVERTED_PAGES.labels(how)._value.get() for how in ("retiled", "widened", "narrowed")}
    return {**pages, "links": metrics.FALLBACKS.labels("kv_narrowed")._value.get()}


UNLIKE: dict[str, tuple[Differences, set[str]]] = {
    "widened": ({"ep": {"dtype": "bfloat16"}}, {"widened"}),
    "widened into other pages": ({"ep": {"dtype": "float16", "page_tokens": 24}}, {"widened", "retiled"}),
    "narrowed": (
        {"ep": ROUNDING, "decode": {"dtype": "bfloat16", "page_tokens": 12, **ROUNDING}},
        {"narrowed", "retiled", "links"},
    ),
}


@pytest.mark.parametrize("case", UNLIKE)
@pytest.mark.parametrize("transport", ["shm", "zmq-tcp"])
async def test_the_decode_pool_holds_what_prefill_computed(model_dir: Path, case: str, transport: str) -> None:
    differences, expected = UNLIKE[case]
    before = counted()
    async with UnlikeCluster(
        model_dir, "p-d", differences, kv_pool_bytes=SMALL_POOL, chunk_tokens=40, transport=transport
    ) as cluster:
        plan = cluster.plan(asked(QUESTION))
        assert await answer(cluster, plan, ())
        await until_idle(cluster.workers)
        sent, kept = cached(cluster, 0, plan), cached(cluster, 1, plan)
        num_tokens = min(sent.shape[3], kept.shape[3])
        assert num_tokens > 40 and sent.dtype is not kept.dtype
        assert torch.equal(sent[:, :, :, :num_tokens].to(kept.dtype), kept[:, :, :, :num_tokens])
    assert {name for name, count in counted().items() if count > before[name]} == expected


@pytest.mark.timeout(120)
@pytest.mark.parametrize("sizes", [(5, 32), (32, 5)], ids=str)
@pytest.mark.parametrize("transport", ["shm", "zmq-tcp"])
async def test_who_leaves_amid_unlike_pages_leaves_nothing_behind(
    model_dir: Path, sizes: tuple[int, int], transport: str, seed: int
) -> None:
    """While pages of prefill's wait to become one of decode's, too."""
    rng = random.Random(f"{seed}/{sizes}/{transport}")
    differences: Differences = {"ep": {"page_tokens": sizes[0]}, "decode": {"page_tokens": sizes[1]}}
    async with UnlikeCluster(
        model_dir, "p-d", differences, kv_pool_bytes=SMALL_POOL, chunk_tokens=8, transport=transport
    ) as cluster:
        staying = asked_anew(rng)
        alone = (await cluster.generate(staying)).token_ids
        stages = [await left(cluster, asked_anew(rng), rng.choice(STAGES), rng.random() * 0.02) for _ in range(12)]
        await until_idle(cluster.workers)
        assert (await cluster.generate(staying)).token_ids == alone
        cluster.check_integrity()
    print(stages)


@pytest.mark.parametrize(
    "differences",
    [
        {"decode": {"dtype": "bfloat16", **ROUNDING}},
        {"ep": ROUNDING, "decode": {"dtype": "bfloat16"}},
        {"ep": {**ROUNDING, "strict": True}, "decode": {"dtype": "bfloat16", **ROUNDING}},
        {"ep": ROUNDING, "decode": {"dtype": "bfloat16", "strict": True, **ROUNDING}},
        {"ep": {"dtype": "bfloat16", **ROUNDING}, "decode": {"dtype": "float16", **ROUNDING}},
    ],
    ids=["decode alone", "prefill alone", "strict prefill", "strict decode", "out of range"],
)
async def test_rounding_needs_both_sides_and_neither_strict(model_dir: Path, differences: Differences) -> None:
    before = counted()
    async with UnlikeCluster(model_dir, "p-d", differences, kv_pool_bytes=SMALL_POOL) as cluster:
        with pytest.raises(Unavailable, match=r"cannot send to each other.*--allow-kv-narrowing"):
            await answer(cluster, cluster.plan(asked(QUESTION)), ())
    assert counted() == before
