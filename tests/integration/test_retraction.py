"""Real stages whose pools are far too small for the answers that they hold at once: some lose their pages, all are
answered rightly and in time, and nothing stays behind."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from services.router.chat_request import SamplingOptions
from services.router.pipeline import Answer
from tests.integration import tiny_cluster
from tests.integration.answers import assert_same_answers
from tests.integration.test_sampling_stages import choose
from tests.parity.prompts import draw_picture
from tests.parity.retracting import WAYS, Forcing
from tests.seed import IS_FULL, SEED
from triptych.core.errors import DeadlineExceeded, TriptychError
from triptych.core.ids import new_request_id
from triptych.core.lifecycle import Phase
from triptych.core.topology import TOPOLOGIES
from triptych.engine.loop import LanguageEngine
from triptych.engine.parking import Parking
from triptych.obs import metrics
from triptych.testing.cluster import ChatRequest, ChatResult, InProcessCluster
from triptych.testing.holdings import until_idle

model_dir = tiny_cluster.model_dir

PAGE_BYTES = 3 * 2 * 2 * 16 * 16 * 4
"""Three layers, keys and values of two heads of sixteen, sixteen tokens, float32."""

HOST_POOLS = {"none": 0, "some": 14, "ample": 1000}
"""Pages: all are replayed, some of them, none."""


def asked(rng: random.Random, max_tokens: int) -> ChatRequest:
    media = tuple(draw_picture(rng.randrange(6), (84, 56)) for _ in range(rng.choice((0, 0, 1))))
    content = [*({"type": "image"} for _ in media), {"type": "text", "text": f"question {rng.random()}"}]
    return ChatRequest([{"role": "user", "content": content}], media, max_tokens)


def retractions() -> dict[str, float]:
    return {way: metrics.RETRACTIONS.labels(way)._value.get() for way in ("host_pool", "replay")}


def engines_of(cluster: InProcessCluster) -> list[LanguageEngine]:
    return [worker.language_engine for worker in cluster.workers if worker.language_engine is not None]


# --- pressure ---------------------------------------------------------------------------------------------------------


def wirings() -> list[tuple[str, str]]:
    """Every topology with every host pool; of these an everyday run takes one each, the first of them by the seed."""
    turn, names = random.Random(SEED).randrange(len(HOST_POOLS)), list(HOST_POOLS)
    if IS_FULL:
        return list(itertools.product(TOPOLOGIES, HOST_POOLS))
    return [(topology, names[(turn + number) % len(names)]) for number, topology in enumerate(TOPOLOGIES)]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("topology", "host_pool"), wirings())
async def test_a_pool_far_too_small_answers_everybody_rightly(
    model_dir: Path, topology: str, host_pool: str, seed: int
) -> None:
    rng = random.Random(f"{seed}/{topology}/{host_pool}")
    requests = [asked(rng, rng.randint(130, 200)) for _ in range(7)]
    async with InProcessCluster(
        model_dir,
        topology,
        chunk_tokens=48,
        kv_pool_bytes=33 * PAGE_BYTES,
        host_pool_bytes=HOST_POOLS[host_pool] * PAGE_BYTES,
        capture_logits=True,
    ) as cluster:
        before = retractions()
        together = await cluster.generate_many(requests, concurrency=8)
        counts = {way: count - before[way] for way, count in retractions().items()}
        cluster.clear_caches()
        alone = await cluster.generate_many(requests)
        await until_idle(cluster.workers)
    assert_same_answers(alone, [result.token_ids for result in together])
    assert sum(counts.values()) > 0, "there was no pressure"
    assert (counts["replay"] > 0) or host_pool != "none"
    assert (counts["replay"] == 0) or host_pool != "ample"


# --- what a replay must carry -----------------------------------------------------------------------------------------

SAMPLINGS: list[dict[str, object]] = [
    {"temperature": 1.2},
    {"temperature": 0.9, "options": SamplingOptions(presence_penalty=1.0, frequency_penalty=0.6, num_logprobs=3)},
    {"options": SamplingOptions(repetition_penalty=1.4, min_tokens=20, num_logprobs=0)},
    {"temperature": 1.0, "options": SamplingOptions(top_k=20, min_p=0.05, logit_bias=((5, 4.0), (9, -4.0)))},
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("topology", ["mono", "e-p-d"])
async def test_seeds_penalties_and_logprobs_go_on(model_dir: Path, topology: str, way: str) -> None:
    """Always the same requests: a draw that rounding decides on comes once in some 100,000 tokens, and none of these
    is one."""
    rng = random.Random(5)
    requests = [dataclasses.replace(asked(rng, 24), seed=11, **how) for how in SAMPLINGS]  # type: ignore[arg-type]
    async with InProcessCluster(model_dir, topology, chunk_tokens=48, kv_pool_bytes=4 << 20) as cluster:
        expected = await cluster.generate_many(requests)
        for step in (1, 9, 23):
            with pytest.MonkeyPatch.context() as patch:
                forcing = Forcing(way, [step] * len(requests))
                forcing.force(patch, cluster)
                found = await cluster.generate_many(requests)
            assert forcing.num_forced == len(requests)
            for one, other in zip(expected, found, strict=True):
                assert_same(one, other)
        await until_idle(cluster.workers)


def assert_same(one: ChatResult, other: ChatResult) -> None:
    assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
    for first, second in zip(one.tokens, other.tokens, strict=True):
        assert (first.logprobs is None) == (second.logprobs is None)
        if first.logprobs is not None and second.logprobs is not None:
            assert first.logprobs.logprob == pytest.approx(second.logprobs.logprob, abs=1e-4)


@pytest.mark.parametrize("way", WAYS)
async def test_each_choice_of_a_request_goes_on_by_itself(model_dir: Path, way: str) -> None:
    request = dataclasses.replace(asked(random.Random(3), 16), temperature=1.1, seed=11)
    async with InProcessCluster(model_dir, "e-p-d", chunk_tokens=48, kv_pool_bytes=4 << 20) as cluster:
        expected, _ = await choose(cluster, request, 3)
        with pytest.MonkeyPatch.context() as patch:
            forcing = Forcing(way, [2, 6, 10])
            forcing.force(patch, cluster)
            found, choices = await choose(cluster, request, 3)
        assert forcing.num_forced == 3
        assert [(one.text, one.ids, one.reason) for one in found] == [
            (one.text, one.ids, one.reason) for one in expected
        ]
        assert len({tuple(one.ids) for one in found}) == 3
        usage = choices.usage()
        assert (usage.prompt_tokens, usage.completion_tokens) == (cluster.plan(request).num_prompt_tokens, 48)


# --- who waits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", ["mono", "e-p-d"])
async def test_nobody_new_gets_room_while_a_retracted_answer_waits(model_dir: Path, topology: str) -> None:
    async with InProcessCluster(model_dir, topology, chunk_tokens=48, kv_pool_bytes=4 << 20) as cluster:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Parking, "unpark", lambda self, spare_pages: None)
            Forcing("retract", [9, 0]).force(patch, cluster)
            old = asyncio.create_task(cluster.generate(asked(random.Random(1), 40)))
            await until_retracted(cluster)
            new = asyncio.create_task(cluster.generate(asked(random.Random(2), 4)))
            await asyncio.sleep(0.4)
            living = [sequence.phase for engine in engines_of(cluster) for sequence in engine._living.values()]
            assert set(living) <= {Phase.RETRACTED, Phase.QUEUED} and not new.done(), "the room is not for anybody new"
        assert len((await old).token_ids) == 40
        assert len((await new).token_ids) == 4
        await until_idle(cluster.workers)


# --- ends while retracted ---------------------------------------------------------------------------------------------


@pytest.fixture
def nobody_returns() -> Iterator[None]:
    """Whoever is retracted to the host stays there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parking, "unpark", lambda self, spare_pages: None)
        yield


Ending = Callable[[InProcessCluster, Answer], Awaitable[None]]


async def the_client_leaves(cluster: InProcessCluster, answer: Answer) -> None:
    """By leaving the block."""


async def its_time_is_over(cluster: InProcessCluster, answer: Answer) -> None:
    with pytest.raises(DeadlineExceeded):
        await read(answer)


async def the_worker_stops(cluster: InProcessCluster, answer: Answer) -> None:
    decode = next(worker for worker in cluster.workers if worker.decode_stage is not None)
    stopping = asyncio.create_task(decode.stop())
    with pytest.raises(TriptychError) as failure:
        await read(answer)
    assert failure.value.http_status in (503, 504)
    await stopping
    cluster.workers.remove(decode)


async def read(answer: Answer) -> None:
    async for _ in answer.events():
        pass


@pytest.mark.parametrize("end", [the_client_leaves, its_time_is_over, the_worker_stops])
@pytest.mark.parametrize("topology", ["mono", "e-p-d"])
async def test_an_end_while_retracted_leaves_nothing_behind(
    model_dir: Path, topology: str, end: Ending, nobody_returns: None
) -> None:
    async with InProcessCluster(model_dir, topology, chunk_tokens=48, kv_pool_bytes=4 << 20) as cluster:
        request = asked(random.Random(1), 40)
        plan = dataclasses.replace(cluster.plan(request), timeout_s=4.0 if end is its_time_is_over else 60.0)
        with pytest.MonkeyPatch.context() as patch:
            forcing = Forcing("retract", [9])
            forcing.force(patch, cluster)
            async with cluster.pipeline.answer(plan, request.media, new_request_id()) as answer:
                await until_retracted(cluster)
                async with asyncio.timeout(3):
                    while answer.order.emitted < 9:  # noqa: ASYNC110 - what was sampled is on its way
                        await asyncio.sleep(0.005)
                await end(cluster, answer)
        assert answer.order.emitted == 9
        await until_idle(cluster.workers)
        if cluster.workers and end is not the_worker_stops:
            assert len((await cluster.generate(asked(random.Random(2), 4))).token_ids) == 4


async def until_retracted(cluster: InProcessCluster) -> None:
    async with asyncio.timeout(5):
        while not any(is_retracting(engine) for engine in engines_of(cluster)):  # noqa: ASYNC110 - engines tell nobody
            await asyncio.sleep(0.005)


def is_retracting(engine: LanguageEngine) -> bool:
    return any(sequence.phase is Phase.RETRACTED for sequence in list(engine._living.values()))
