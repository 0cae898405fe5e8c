"""What has been computed once is not computed, sent or asked for again: follow-up turns, the same picture elsewhere."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration import tiny_cluster
from tests.integration.answers import assert_same_answers
from tests.integration.tiny_cluster import MAX_TOKENS, SMALL_POOL
from tests.parity.prompts import draw_picture
from triptych.core.ids import new_request_id
from triptych.core.plan import EmbeddingSource, Plan
from triptych.obs import metrics
from triptych.testing.cluster import ChatRequest, ChatResult, InProcessCluster
from triptych.testing.holdings import until_idle

pytestmark = pytest.mark.asyncio(loop_scope="module")
model_dir, shared, epd = tiny_cluster.model_dir, tiny_cluster.shared, tiny_cluster.epd

PAGE = 16
TOPOLOGIES = ("e-p-d", "e-pd", "p-d", "mono")


def picture(seed: int, size: tuple[int, int] = (84, 56)) -> bytes:
    return draw_picture(seed, size)


def turns(*texts: str, media: tuple[bytes, ...]) -> ChatRequest:
    """A conversation that begins with pictures; its texts are the user's and the assistant's in turn."""
    messages: list[dict[str, object]] = [
        {"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(texts)
    ]
    messages[0]["content"] = [*({"type": "image"} for _ in media), {"type": "text", "text": texts[0]}]
    return ChatRequest(messages, media, MAX_TOKENS)


@dataclass
class Spent:
    """What workers did meanwhile."""

    encoded_tokens: float = 0
    moved_bytes: float = 0
    sources: dict[str, float] | None = None


def _sources() -> dict[str, float]:
    return {source.value: metrics.EMBEDDING_SOURCE.labels(source.value)._value.get() for source in EmbeddingSource}


def _counts() -> tuple[float, float]:
    moved = sum(metrics.EMBEDDING_TRANSFER_BYTES.labels(name)._value.get() for name in ("shm", "zmq", "inproc"))
    return metrics.ENCODER_EMBEDDING_TOKENS._value.get(), moved


@contextmanager
def spending() -> Iterator[Spent]:
    spent, before, sources = Spent(), _counts(), _sources()
    yield spent
    after = _counts()
    spent.encoded_tokens, spent.moved_bytes = after[0] - before[0], after[1] - before[1]
    spent.sources = {name: count - sources[name] for name, count in _sources().items() if count > sources[name]}


def names(result: ChatResult) -> set[str]:
    """What encoders did, as far as they had told when the answer was whole."""
    return {event.event for event in result.timeline if event.stage == "encoder"}


async def asked(cluster: InProcessCluster, plan: Plan, media: tuple[bytes, ...]) -> tuple[list[int], int, set[str]]:
    """The answer, the cached tokens of its usage, and what encoders did."""
    ids: list[int] = []
    async with cluster.pipeline.answer(plan, media, new_request_id()) as answer:
        async for event in answer.events():
            ids += [token.id for token in getattr(event, "tokens", ())]
        cached = answer.usage(len(ids)).cached_tokens
        return ids, cached, {event.event for event in answer.all_events() if event.stage == "encoder"}


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_a_follow_up_turn_encodes_nothing_ships_nothing_and_asks_for_no_bytes(
    model_dir: Path, topology: str
) -> None:
    """Its usage says how much of the prompt was cached: where answers are decoded in place, of the answer too (whose
    last token was never computed)."""
    media = (picture(1), picture(2))
    async with InProcessCluster(model_dir, topology, kv_pool_bytes=SMALL_POOL) as cluster:
        first = cluster.plan(dataclasses.replace(turns("what is it?", media=media), max_tokens=40))
        with spending() as spent:
            answer, cached, _ = await asked(cluster, first, media)
        assert spent.encoded_tokens > 0 == cached
        follow_up = dataclasses.replace(first, compact_ids=(*first.compact_ids, *answer, *first.compact_ids[-4:]))
        with spending() as spent:
            second, cached, done = await asked(cluster, follow_up, media)
        assert spent.encoded_tokens == spent.moved_bytes == 0
        assert spent.sources in ({"radix": 2}, {"radix": 1, "cache": 1})  # the second may reach into the last page
        assert done <= {"slot_wait", "radix_hit", "landed_hit"}
        computed = first.num_prompt_tokens + (len(answer) - 1 if topology in ("e-pd", "mono") else 0)
        assert cached == computed // PAGE * PAGE
        assert computed // PAGE > first.num_prompt_tokens // PAGE or topology in ("e-p-d", "p-d")
        cluster.clear_caches()
        alone, cached, _ = await asked(cluster, follow_up, media)
        assert (alone, cached) == (second, 0)
        await until_idle(cluster.workers)


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_the_same_picture_in_another_text_encodes_nothing_ships_nothing_and_asks_for_no_bytes(
    model_dir: Path, topology: str
) -> None:
    async with InProcessCluster(model_dir, topology, kv_pool_bytes=SMALL_POOL, capture_logits=True) as cluster:
        await cluster.generate(turns("one", media=(picture(1),)))
        other = ChatRequest(
            [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": [{"type": "image"}, {"type": "image"}]},
            ],
            (picture(1), picture(1)),
            MAX_TOKENS,
        )
        with spending() as spent:
            again = await cluster.generate(other)
        assert spent.encoded_tokens == spent.moved_bytes == 0
        assert spent.sources == {"cache": 2}
        assert names(again) <= {"slot_wait", "landed_hit"}
        cluster.clear_caches()
        alone = await cluster.generate(other)
        assert_same_answers([alone], [again.token_ids])
        await until_idle(cluster.workers)


async def test_pictures_that_many_ask_about_at_once_are_shipped_once(epd: InProcessCluster) -> None:
    pictures = [picture(number) for number in range(3)]
    requests = [turns(f"question {number}", media=(pictures[number % 3],)) for number in range(18)]
    with spending() as spent:
        together = await epd.generate_many(requests, concurrency=18)
    rows = sum(epd.plan(requests[number]).items[0].num_tokens for number in range(3))
    assert spent.encoded_tokens == rows
    assert spent.moved_bytes == rows * engine_row_bytes(epd)
    assert spent.sources is not None and spent.sources.get("remote") == 3
    await until_idle(epd.workers)
    epd.clear_caches()
    assert_same_answers(await epd.generate_many(requests), [result.token_ids for result in together])


async def test_a_cache_that_is_always_too_small_is_only_slower(model_dir: Path) -> None:
    """An arena with room for hardly more than one request: every reservation evicts."""
    requests = [turns(f"q{n}", media=(picture(n % 5, (112, 112)), picture(n % 3, (112, 84)))) for n in range(15)]
    async with InProcessCluster(
        model_dir, chunk_tokens=32, kv_pool_bytes=SMALL_POOL, landing_bytes=16 << 10, capture_logits=True
    ) as cluster:
        together = await cluster.generate_many(requests, concurrency=6)
        await until_idle(cluster.workers)
        cluster.clear_caches()
        alone = [await cluster.generate(request) for request in requests]
        await until_idle(cluster.workers)
    assert_same_answers(alone, [result.token_ids for result in together])


async def test_who_waits_for_anothers_picture_goes_on_when_that_one_leaves(
    epd: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first has a slot and its encoder is slow; the second waits for it; the first hangs up."""
    supply = next(worker.supply for worker in epd.workers if worker.supply is not None)
    sound, started = supply.get, asyncio.Event()

    async def slow(*arguments: object) -> object:
        if not started.is_set():
            started.set()
            await asyncio.sleep(60)
        return await sound(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(supply, "get", slow)
    first = asyncio.create_task(epd.generate(turns("one", media=(picture(4),))))
    await started.wait()
    second = asyncio.create_task(epd.generate(turns("another text", media=(picture(4),))))
    await asyncio.sleep(0.2)
    assert not second.done()
    first.cancel()
    answer = await asyncio.wait_for(second, 4.0)  # less than it would wait for an encoder that is only slow
    assert len(answer.token_ids) == MAX_TOKENS
    await asyncio.wait([first])
    await until_idle(epd.workers)


def engine_row_bytes(cluster: InProcessCluster) -> int:
    engine = next(worker.language_engine for worker in cluster.workers if worker.landing is not None)
    assert engine is not None
    return engine.limits.row_bytes
