"""The real stages in one process, over real gRPC and shared memory: load, caches, cancellations and faults."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from services.router import calls
from services.router.pipeline import Pipeline
from services.router.queue import AdmissionQueue
from tests.integration import tiny_cluster
from tests.integration.answers import assert_same_answers
from tests.integration.tiny_cluster import MAX_TOKENS, SMALL_POOL
from tests.parity.prompts import draw_picture
from tests.unit.test_engine_gauges import raised
from triptych.core.clock import SystemClock
from triptych.core.errors import (
    DeadlineExceeded,
    MediaInvalid,
    MediaMismatch,
    RequestTooLarge,
    StaleAttempt,
    TriptychError,
)
from triptych.core.ids import AttemptRef, new_request_id
from triptych.core.plan import EmbeddingSource, Modality, Plan
from triptych.core.timeline import TimelineEvent
from triptych.core.topology import TOPOLOGIES
from triptych.core.worker import Role, WorkerInfo
from triptych.engine.loop import LanguageEngine
from triptych.obs import metrics
from triptych.stages.embeddings import EmbeddingSupply
from triptych.testing.cluster import ChatRequest, ChatResult, InProcessCluster
from triptych.testing.holdings import until_idle
from triptych.transport import zmq_carrier
from triptych.transport.data_frame import DataHeader
from triptych.transport.pages import MappedPages
from triptych.transport.receiver_link import ReceiverLink
from triptych.transport.types import ArenaKind
from triptych.transport.zmq_carrier import ZmqPageWriter

pytestmark = pytest.mark.asyncio(loop_scope="module")
model_dir, shared, epd = tiny_cluster.model_dir, tiny_cluster.shared, tiny_cluster.epd


def picture(seed: int, size: tuple[int, int] = (84, 56)) -> bytes:
    return draw_picture(seed, size)


def asked(text: str, *media: bytes, max_tokens: int = MAX_TOKENS) -> ChatRequest:
    parts = [*({"type": "image"} for _ in media), {"type": "text", "text": text}]
    return ChatRequest([{"role": "user", "content": parts}], media, max_tokens)


def mixed_load(seed: int, count: int) -> list[ChatRequest]:
    """Text only, one picture, several, repeats of both."""
    rng = random.Random(seed)
    pictures = [picture(number, (28 * rng.randint(2, 5), 28 * rng.randint(2, 5))) for number in range(6)]
    return [
        asked(f"question {rng.randrange(8)}", *rng.choices(pictures, k=rng.choice([0, 1, 1, 2, 3])))
        for _ in range(count)
    ]


def engines(cluster: InProcessCluster) -> list[LanguageEngine]:
    return [worker.language_engine for worker in cluster.workers if worker.language_engine is not None]


def events(result: ChatResult, name: str) -> list[TimelineEvent]:
    return [event for event in result.timeline if event.event == name]


def supply_of(cluster: InProcessCluster) -> EmbeddingSupply:
    return next(worker.supply for worker in cluster.workers if worker.supply is not None)


async def never(*_: object) -> object:
    """Stands in for what does not come."""
    return await asyncio.get_running_loop().create_future()


async def eventually(condition: Callable[[], object], within_s: float = 8.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(0.02)


async def all_is_given_back(cluster: InProcessCluster) -> None:
    """Pages free or cached, no slot, no grant, no call that waits, within a few seconds."""
    await until_idle(cluster.workers)


# --- load -------------------------------------------------------------------------------------------------------------


WIRINGS: list[tuple[str, str | None]] = [
    *((topology, None) for topology in TOPOLOGIES),
    ("e-p-d", "zmq-ipc"),
    ("e-p-d", "zmq-tcp"),
    ("e-p-d+mono", None),
    ("e-pd+p-d", None),
]


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
    assert [event.source for event in events(again, "radix_hit")] == [EmbeddingSource.RADIX] * 2
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


# --- transports -------------------------------------------------------------------------------------------------------


def moved_bytes() -> dict[tuple[str, str], float]:
    """What every link of this process has moved, by kind and transport."""
    kinds = {"embedding": metrics.EMBEDDING_TRANSFER_BYTES, "kv": metrics.KV_TRANSFER_BYTES}
    return {
        (kind, transport): counter.labels(transport=transport)._value.get()
        for kind, counter in kinds.items()
        for transport in ("shm", "zmq")
    }


async def test_every_transport_gives_the_tokens_and_logits_of_shared_memory(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames smaller than a page, and a link that is congested by every chunk."""
    monkeypatch.setattr(zmq_carrier, "MAX_PAYLOAD_BYTES", 1000)
    monkeypatch.setattr(zmq_carrier, "CONGESTED_BYTES", 1)
    requests = [asked(f"q{n}", picture(n), picture(n + 1)) for n in range(4)]
    results = {}
    for transport, label in (("shm", "shm"), ("auto", "shm"), ("zmq-ipc", "zmq"), ("zmq-tcp", "zmq")):
        before = moved_bytes()
        async with InProcessCluster(
            model_dir, chunk_tokens=16, kv_pool_bytes=SMALL_POOL, transport=transport, capture_logits=True
        ) as cluster:
            arenas = [worker._transfer._receivers.arena(kind) for worker in cluster.workers for kind in ArenaKind]
            has_segments = {arena.segment is not None for arena in arenas if arena is not None}
            assert has_segments == {label == "shm"}, "only shm needs /dev/shm"
            results[transport] = await cluster.generate_many(requests, concurrency=4)
            await all_is_given_back(cluster)
        moved = {key for key, count in moved_bytes().items() if count > before[key]}
        assert moved == {("embedding", label), ("kv", label)}
    for other in ("auto", "zmq-ipc", "zmq-tcp"):
        assert [result.token_ids for result in results[other]] == [result.token_ids for result in results["shm"]]
        for ours, theirs in zip(results[other], results["shm"], strict=True):
            assert ours.logits == pytest.approx(theirs.logits, abs=1e-4)


@pytest.mark.parametrize("transport", ["shm", "zmq-tcp"])
async def test_kv_that_lands_in_a_mirror_reaches_the_pool_that_is_computed_with(
    model_dir: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a GPU: the arena is host memory, and committed pages are copied to where the engine reads them."""
    requests = [asked(f"q{n}", picture(n)) for n in range(4)]
    answers = []
    for is_host_memory in (True, False):
        monkeypatch.setattr("triptych.stages.worker._is_host_memory", lambda _, answer=is_host_memory: answer)
        async with InProcessCluster(model_dir, kv_pool_bytes=SMALL_POOL, transport=transport) as cluster:
            answers.append([result.token_ids for result in await cluster.generate_many(requests, concurrency=4)])
            await all_is_given_back(cluster)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("transport", ["shm", "zmq-tcp"])
async def test_a_commit_that_covers_less_than_the_prompt_is_refused(
    model_dir: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill hands over all pages but the last, and says truly how many bytes that were."""
    request, copied = (
        asked("a prompt of more than one page", picture(1)),
        MappedPages if transport == "shm" else ZmqPageWriter,
    )
    sound = copied.copy

    def all_but_the_last(writer: Any, pages: Sequence[int], first: int) -> int:
        return sound(writer, pages[:-1], first)

    async with InProcessCluster(model_dir, kv_pool_bytes=SMALL_POOL, transport=transport) as cluster:
        control = await cluster.generate(request)
        with monkeypatch.context() as patched:
            patched.setattr(copied, "copy", all_but_the_last)
            with pytest.raises(TriptychError):
                await cluster.generate(request)
        await all_is_given_back(cluster)
        assert (await cluster.generate(request)).token_ids == control.token_ids


async def test_bytes_that_the_network_damages_are_an_error_and_never_an_answer(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.transport.landings.STALLED_S", 0.2)
    sound = zmq_carrier.pack

    def damaged(header: DataHeader, payload: memoryview) -> bytes:
        raw = bytearray(sound(header, payload))
        raw[-1] ^= 1
        return bytes(raw)

    async with InProcessCluster(model_dir, chunk_tokens=48, kv_pool_bytes=SMALL_POOL, transport="zmq-tcp") as cluster:
        for request in (asked("what is it?", picture(1)), asked("only text")):  # embedding and KV; KV alone
            control = await cluster.generate(request)
            cluster.clear_caches()
            with monkeypatch.context() as patched:
                patched.setattr(zmq_carrier, "pack", damaged)
                with pytest.raises(TriptychError):
                    await cluster.generate(request)
            await all_is_given_back(cluster)
            assert (await cluster.generate(request)).token_ids == control.token_ids
            cluster.clear_caches()


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


# --- cancellation -----------------------------------------------------------------------------------------------------


async def cancelled(cluster: InProcessCluster, request: ChatRequest, after_s: float) -> None:
    """Asks, and leaves after a while."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(after_s):
            await cluster.generate(request)


@pytest.mark.parametrize(("topology", "transport"), [wiring for wiring in WIRINGS if "+" not in wiring[0]])
async def test_requests_cancelled_at_any_moment_leave_nothing_behind(
    model_dir: Path, topology: str, transport: str | None, seed: int
) -> None:
    rng = random.Random(seed)
    requests = [asked(f"q{n}", *(picture(rng.randrange(40)) for _ in range(n % 3)), max_tokens=20) for n in range(40)]
    async with InProcessCluster(
        model_dir,
        topology,
        chunk_tokens=24,
        kv_pool_bytes=SMALL_POOL,
        transport=transport,
    ) as cluster:
        control = await cluster.generate(requests[5])
        cluster.clear_caches()
        moments = [rng.choice([0.0, 0.01, 0.03, 0.1, 0.3]) * rng.random() * 2 for _ in requests]
        await asyncio.gather(
            *(cancelled(cluster, each, moment) for each, moment in zip(requests, moments, strict=True))
        )
        await all_is_given_back(cluster)
        assert (await cluster.generate(requests[5])).token_ids == control.token_ids
        await all_is_given_back(cluster)


def pages_in(cluster: InProcessCluster, state: str) -> int:
    return sum(engine.call(engine.manager.counts).result(5)[state] for engine in engines(cluster))


async def test_a_request_left_while_its_pages_are_bound_and_its_slot_is_handed_out(
    epd: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill may still write to decode, and the encoder to prefill: both must say that they will not."""
    monkeypatch.setattr(supply_of(epd), "get", never)
    leaving = asyncio.create_task(epd.generate(asked("what is it?", picture(1))))
    await eventually(lambda: pages_in(epd, "leased") > 0)
    await eventually(lambda: any(engine.landing.counts_bytes()["owned"] for engine in engines(epd)))
    await asyncio.sleep(0.1)  # the slot is on its way to the encoder, or there
    leaving.cancel()
    await asyncio.wait([leaving])
    await all_is_given_back(epd)
    assert all(not engine.landing.counts_bytes()["quarantined"] for engine in engines(epd))


async def test_a_request_left_in_the_middle_of_its_answer(epd: InProcessCluster) -> None:
    plan = epd.plan(asked("what is it?", max_tokens=400))
    async with epd.pipeline.answer(plan, [], new_request_id()) as running:
        count = 0
        async for event in running.events():
            count += len(getattr(event, "tokens", ()))
            if count >= 5:
                break
    await all_is_given_back(epd)


async def test_a_call_cancelled_while_its_grant_is_on_the_way_gives_it_back(epd: InProcessCluster) -> None:
    """The router leaves between asking for room and hearing of it, many times over."""
    plan, decode = epd.plan(asked("text", max_tokens=20)), worker_of(epd, Role.DECODE)
    for turn in range(30):
        call = calls.GenerateCall(epd.pipeline._channels, decode, AttemptRef(new_request_id()), plan, timeout_s=5)
        await asyncio.sleep(0.0005 * (turn % 8))
        call.cancel()
    await all_is_given_back(epd)


async def test_of_two_calls_at_once_for_one_attempt_one_is_refused_and_nothing_leaks(epd: InProcessCluster) -> None:
    plan, decode = epd.plan(asked("text", max_tokens=20)), worker_of(epd, Role.DECODE)
    for _ in range(5):
        ref = AttemptRef(new_request_id())
        twins = [calls.GenerateCall(epd.pipeline._channels, decode, ref, plan, timeout_s=5) for _ in range(2)]
        heard = await asyncio.gather(*(twin.granted() for twin in twins), return_exceptions=True)
        assert sorted(type(each).__name__ for each in heard) == ["Grant", "StaleAttempt"]
        for twin in twins:
            twin.cancel()
    await all_is_given_back(epd)


# --- faults -----------------------------------------------------------------------------------------------------------


async def test_a_damaged_picture_is_the_callers_error_and_the_next_request_is_right(epd: InProcessCluster) -> None:
    good = asked("what is it?", picture(1))
    whole = picture(2, (280, 280))
    control = await epd.generate(good)
    epd.clear_caches()
    for damaged in (whole[: len(whole) // 2], whole[:60]):
        with pytest.raises(MediaInvalid):
            await epd.generate(asked("what is it?", damaged))
        with pytest.raises(MediaInvalid, match="picture 2 of the request"):  # a failure is not cached either
            await epd.generate(asked("what is it?", picture(3), damaged))
    assert (await epd.generate(good)).token_ids == control.token_ids
    await all_is_given_back(epd)


async def test_a_picture_that_is_not_the_size_it_said_is_refused(epd: InProcessCluster) -> None:
    request = asked("what is it?", picture(1))
    plan = epd.plan(request)
    other = picture(1, (140, 140))
    identity = epd.adapter.identity(Modality.IMAGE, other)
    item = dataclasses.replace(plan.items[0], media_bytes=len(other), identity=identity)
    with pytest.raises(MediaMismatch, match="real size"):
        await answer(epd, dataclasses.replace(plan, items=(item,)), [other])
    await all_is_given_back(epd)


async def test_an_embedding_that_never_comes_is_an_error_within_the_deadline(
    epd: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = asked("what is it?", picture(1))
    control = await epd.generate(good)
    epd.clear_caches()
    with monkeypatch.context() as patched:
        patched.setattr(supply_of(epd), "get", never)
        start_s = time.monotonic()
        plan = dataclasses.replace(epd.plan(good), timeout_s=1.0)
        with pytest.raises(TriptychError) as caught:
            await answer(epd, plan, good.media)
        assert time.monotonic() - start_s < 4
        assert isinstance(caught.value, DeadlineExceeded)
    await all_is_given_back(epd)
    assert (await epd.generate(good)).token_ids == control.token_ids


async def test_a_decode_worker_that_answers_no_transfer_is_replaced_by_another(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was stopped: the time that a link waits runs out long before the request's."""
    bind = functools.partialmethod(ReceiverLink.bind_kv, timeout_s=1.0)
    request = asked("what is it?", picture(1))
    async with InProcessCluster(model_dir, kv_pool_bytes=SMALL_POOL, num_prefills=2, num_decodes=2) as cluster:
        control = await cluster.generate(request)
        silent = next(worker.decode_stage for worker in cluster.workers if worker.ref.worker_id == "decode-0")
        with monkeypatch.context() as patched:
            patched.setattr(ReceiverLink, "bind_kv", bind)
            patched.setattr(silent, "bind", never)
            for _ in range(2):  # each decode worker's turn
                plan = cluster.plan(request)
                async with cluster.pipeline.answer(plan, request.media, new_request_id()) as running:
                    ids = [t.id async for event in running.events() for t in getattr(event, "tokens", ())]
                    assert ids == control.token_ids
                    assert running.progress.workers[Role.DECODE] == ["decode-1"]
        await all_is_given_back(cluster)


async def test_what_no_empty_pool_could_hold_is_refused_with_the_grant_wherever_it_is_decoded(model_dir: Path) -> None:
    """So that the router can still ask a larger worker."""
    for topology in TOPOLOGIES:
        async with InProcessCluster(model_dir, topology, kv_pool_bytes=8 * 24576) as cluster:
            plan = cluster.plan(asked("a question", max_tokens=400))
            decode = worker_of(cluster, Role.DECODE)
            call = calls.GenerateCall(cluster.pipeline._channels, decode, AttemptRef(new_request_id()), plan, 5)
            with pytest.raises(RequestTooLarge):
                await call.granted()
            with pytest.raises(RequestTooLarge):
                await answer(cluster, plan, [])
            await all_is_given_back(cluster)


async def test_what_the_engine_does_not_take_over_leaves_no_pages_behind(
    epd: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grant has ended by then: nobody else would give them back."""

    def refuse(*_: object) -> None:
        raise RequestTooLarge("it could outgrow the pool")

    request = asked("a question", picture(1))
    with monkeypatch.context() as patched:
        patched.setattr(LanguageEngine, "adopt", refuse)
        with pytest.raises(RequestTooLarge, match="outgrow"):
            await answer(epd, epd.plan(request), request.media)
    await all_is_given_back(epd)


async def test_an_encoder_that_meets_a_bug_is_an_error_and_never_an_answer(
    epd: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = asked("what is it?", picture(1))
    supply = supply_of(epd)

    def broken(*_: object) -> object:
        raise RuntimeError("a bug at 0x7f00")

    with monkeypatch.context() as patched:
        patched.setattr(supply._engine.part, "encode", broken)
        with pytest.raises(TriptychError) as caught:
            await epd.generate(good)
        assert "0x" not in str(caught.value)
    await all_is_given_back(epd)
    assert len((await epd.generate(good)).token_ids) == MAX_TOKENS


async def test_an_embedding_damaged_on_the_way_is_never_used(
    epd: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes in the slot are not those that were summed up: an error, and the next answer is right."""
    good = asked("what is it?", picture(1))
    control = await epd.generate(good)
    epd.clear_caches()
    with monkeypatch.context() as patched:
        patched.setattr("triptych.transport.slot_writer.checksum64", lambda _: 12345)
        with pytest.raises(TriptychError):
            await epd.generate(good)
    await all_is_given_back(epd)
    assert (await epd.generate(good)).token_ids == control.token_ids


# --- attempts ---------------------------------------------------------------------------------------------------------


def worker_of(cluster: InProcessCluster, role: Role) -> WorkerInfo:
    found = next(worker.info for worker in cluster.workers if worker.info is not None and role in worker.info.roles)
    assert found is not None
    return found


async def answer(cluster: InProcessCluster, plan: Plan, media: Sequence[bytes]) -> list[int]:
    async with cluster.pipeline.answer(plan, media, new_request_id()) as running:
        ids: list[int] = []
        async for event in running.events():
            ids += [token.id for token in getattr(event, "tokens", ())]
        return ids


async def refused(work: Awaitable[object]) -> None:
    with pytest.raises(StaleAttempt):
        await work


async def test_every_stage_refuses_an_attempt_older_than_one_it_has_seen(epd: InProcessCluster) -> None:
    channels, request = epd.pipeline._channels, asked("what is it?", picture(1))
    plan, request_id = epd.plan(request), new_request_id()
    decode, prefill = worker_of(epd, Role.DECODE), worker_of(epd, Role.PREFILL)
    encoder = worker_of(epd, Role.ENCODER)
    newer, older = AttemptRef(request_id, 0, 3), AttemptRef(request_id, 0, 2)

    def generate(ref: AttemptRef) -> calls.GenerateCall:
        return calls.GenerateCall(channels, decode, ref, plan, timeout_s=5)

    call = generate(newer)
    grant = await call.granted()
    await refused(generate(older).granted())
    await refused(generate(newer).granted())  # the very attempt, while it is being answered

    async def run_prefill(ref: AttemptRef) -> None:
        async for _ in calls.prefill_events(channels, prefill, ref, plan, grant, timeout_s=5):
            pass

    def encode(ref: AttemptRef) -> Awaitable[object]:
        job = calls.EncodeJob(ref, prefill, {0: plan.items[0]}, {0: request.media[0]}, plan.model_fingerprint)
        return calls.encode(channels, encoder, job, timeout_s=5)

    await asyncio.gather(run_prefill(newer), encode(newer))
    await refused(run_prefill(older))
    await refused(run_prefill(newer))  # an attempt is prefilled once
    await refused(encode(older))
    events_of_decode = [event async for event in call.events()]
    assert isinstance(events_of_decode[-1], calls.StageDone)
    await all_is_given_back(epd)


async def test_a_grant_of_one_attempt_is_of_no_use_to_another(epd: InProcessCluster) -> None:
    channels, plan = epd.pipeline._channels, epd.plan(asked("text"))
    decode, prefill = worker_of(epd, Role.DECODE), worker_of(epd, Role.PREFILL)
    mine, other = AttemptRef(new_request_id()), AttemptRef(new_request_id())
    call = calls.GenerateCall(channels, decode, mine, plan, timeout_s=5)
    grant = await call.granted()
    with pytest.raises(TriptychError):
        async for _ in calls.prefill_events(channels, prefill, other, plan, grant, timeout_s=5):
            pass
    call.cancel()
    await all_is_given_back(epd)


async def test_what_a_stopped_worker_showed_is_at_rest(model_dir: Path) -> None:
    names = "triptych_model_parameters", "triptych_embedding_cache_bytes"
    async with InProcessCluster(model_dir, "mono") as cluster:
        await cluster.generate(asked("what is this?", picture(1)))
        assert len(raised(*names)) == 3, "of the language, of the tower, and what it keeps"
    assert raised(*names) == {}
