"""Clients that leave at every moment of a request's life, in every topology: nothing stays behind, and those who stay
notice nothing."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.router.pipeline import Answer
from tests.integration.answers import assert_same_answers
from tests.parity.checkpoints import DEFAULT_SEED, DEMO_DIR, make_tiny_qwen2_5_vl
from tests.parity.prompts import draw_picture
from tests.seed import IS_FULL
from triptych.core.ids import AttemptRef, new_request_id
from triptych.core.lifecycle import Phase
from triptych.core.topology import TOPOLOGIES
from triptych.engine.landing import LandingTable
from triptych.engine.loop import LanguageEngine, missing_items
from triptych.kv.grants import GrantTable
from triptych.kv.manager import CacheManager
from triptych.stages.landing import EmbeddingLanding
from triptych.testing.cluster import ChatRequest, InProcessCluster
from triptych.testing.holdings import until_idle

NUM_LEAVING = 1_000 if IS_FULL else 120
NUM_STAYING = 12
AT_ONCE = 8

# Where a request is when it is left. Before its reservation it counts as waiting for its embeddings.
STAGES = ("grant", "embeddings", "prefill", "decode")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    base = Path(os.environ.get("DEMO_MODEL_DIR") or DEMO_DIR)
    return make_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny-qwen2-5-vl"), DEFAULT_SEED, base)


def asked(rng: random.Random) -> ChatRequest:
    """Text that is new, so that no cache spares the work, and up to two pictures of twenty."""
    media = tuple(draw_picture(rng.randrange(20), (112, 84)) for _ in range(rng.choice((0, 1, 2))))
    text = " ".join(str(rng.random()) for _ in range(3))
    content = [*({"type": "image"} for _ in media), {"type": "text", "text": text}]
    return ChatRequest([{"role": "user", "content": content}], media, max_tokens=24)


def where(cluster: InProcessCluster, ref: AttemptRef) -> str:
    """The stage of a request, seen from outside: read while the engines' threads go on."""
    engines = [worker.language_engine for worker in cluster.workers if worker.language_engine is not None]
    found = [sequence for engine in reversed(engines) if (sequence := engine.find(ref)) is not None]
    if not found:
        return "grant"
    if found[0].phase is Phase.DECODING:
        return "decode"
    return "embeddings" if missing_items(found[0]) else "prefill"


async def left(cluster: InProcessCluster, request: ChatRequest, stage: str, delay_s: float) -> str:
    """Asks, and hangs up `delay_s` after the request was first seen at `stage`. Returns where it was at the end."""
    ref = AttemptRef(new_request_id())
    async with cluster.pipeline.answer(cluster.plan(request), request.media, ref.request_id) as answer:
        reading = asyncio.create_task(read(answer))
        while not reading.done() and where(cluster, ref) != stage:  # noqa: ASYNC110 - engines tell nobody
            await asyncio.sleep(0.0005)
        await asyncio.sleep(delay_s)
        at_the_end = "ended" if reading.done() else where(cluster, ref)
        reading.cancel()
        await asyncio.wait([reading])
    return at_the_end


async def read(answer: Answer) -> None:
    async for _ in answer.events():
        pass


def slowed(get: Callable[..., Awaitable[Any]], rng: random.Random, most_s: float) -> Callable[..., Awaitable[Any]]:
    """An encoder whose embeddings take their time, so that requests are found waiting for them."""

    async def slow_get(*arguments: Any) -> Any:
        await asyncio.sleep(rng.random() * most_s)
        return await get(*arguments)

    return slow_get


@pytest.mark.timeout(900 if IS_FULL else 180)
@pytest.mark.parametrize("topology", [*TOPOLOGIES, "e-p-d+mono"])
async def test_clients_that_leave_at_any_moment_leave_nothing_behind(
    model_dir: Path, topology: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(f"{seed}/{topology}")
    gate, seen = asyncio.Semaphore(AT_ONCE), Counter[str]()
    staying = [asked(rng) for _ in range(NUM_STAYING)]
    leaving = [(asked(rng), STAGES[n % len(STAGES)], rng.random() * 0.012) for n in range(NUM_LEAVING)]
    async with InProcessCluster(
        model_dir, topology, chunk_tokens=16, kv_pool_bytes=2 << 20, capture_logits=True
    ) as cluster:
        alone = await cluster.generate_many(staying)
        cluster.clear_caches()
        for worker in cluster.workers:
            if worker.supply is not None:
                monkeypatch.setattr(worker.supply, "get", slowed(worker.supply.get, rng, 0.05))

        async def leave(request: ChatRequest, stage: str, delay_s: float) -> None:
            async with gate:
                seen[await left(cluster, request, stage, delay_s)] += 1

        async def stay(request: ChatRequest) -> list[int]:
            await asyncio.sleep(rng.random() * 3)
            async with gate:
                return (await cluster.generate(request)).token_ids

        together = asyncio.gather(*(stay(request) for request in staying))
        async with asyncio.TaskGroup() as group:
            for each in leaving:
                group.create_task(leave(*each))
        assert_same_answers(alone, await together)
        await until_idle(cluster.workers)
        assert_same_answers(alone[:1], [(await cluster.generate(staying[0])).token_ids])
        await until_idle(cluster.workers)
    print(f"{topology}: {dict(seen)}")
    assert sum(seen.values()) == NUM_LEAVING
    assert all(seen[stage] >= 5 for stage in STAGES), f"not every moment was met: {seen}"


def nothing(*_: object) -> None:
    """Stands in for what a worker must not forget to do."""


def nobody(*_: object) -> list[Any]:
    return []


GRANTS, SLOTS, PAGES = GrantTable, LandingTable, CacheManager

# Who forgets what, in which topology, when the client leaves at which stage, and what is left then.
FORGOTTEN = {
    "decode gives a grant back": (GRANTS, "release", nothing, "e-p-d", "grant", "grants"),
    "decode hears that prefill writes no more": (GRANTS, "writer_finished", nothing, "e-p-d", "embeddings", "pages"),
    "prefill hears that an encoder writes no more": (SLOTS, "writer_finished", nobody, "e-pd", "embeddings", "slots"),
    "an engine drops the landing slots": (SLOTS, "stop_waiting", nothing, "p-d", "embeddings", "slots"),
    "an engine drops the pages": (PAGES, "release", nothing, "mono", "decode", "pages"),
    "an engine drops the sequence": (LanguageEngine, "abort", nothing, "e-pd", "embeddings", "sequences"),
    "landing forgets the call": (EmbeddingLanding, "forget", nothing, "e-p-d", "decode", "expected"),
}


@pytest.mark.parametrize("fault", FORGOTTEN.values(), ids=FORGOTTEN)
async def test_what_is_forgotten_is_found(
    model_dir: Path, fault: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: each of these faults leaves something behind."""
    owner, method, replacement, topology, stage, found = fault
    rng = random.Random(1)
    content = [{"type": "image"}, {"type": "text", "text": "what is it?"}]
    request = ChatRequest([{"role": "user", "content": content}], (draw_picture(1, (112, 84)),), max_tokens=400)
    async with InProcessCluster(model_dir, topology, chunk_tokens=16) as cluster:
        for supply in (worker.supply for worker in cluster.workers if worker.supply is not None):
            monkeypatch.setattr(supply, "get", slowed(supply.get, rng, 5.0))
        if stage == "grant":  # without a reservation it stays there: what is bound is also given back by its writer
            monkeypatch.setattr(LanguageEngine, "submit", nothing)
        delay_s = 0.5 if stage == "grant" else 0.05
        with monkeypatch.context() as planted:
            planted.setattr(owner, method, replacement)
            assert await left(cluster, request, stage, delay_s) == stage
            with pytest.raises(AssertionError, match=f": {found} "):
                await until_idle(cluster.workers, patience_s=1.0)
