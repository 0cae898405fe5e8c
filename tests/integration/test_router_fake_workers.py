"""The router's pipeline against workers that do exactly what each test says."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from services.router.calls import GenerateCall
from services.router.pipeline import Answer, Batch, Pipeline
from services.router.queue import AdmissionQueue
from tests.integration import fake_workers as fake
from tests.integration.fake_workers import Call, Script, fake_cluster, once, running
from triptych.core.clock import SystemClock
from triptych.core.errors import (
    Aborted,
    DeadlineExceeded,
    EmbeddingMissing,
    MediaInvalid,
    NoRoom,
    Overloaded,
    PeerLost,
    ReceiverLost,
    RequestTooLarge,
    StaleAttempt,
    TriptychError,
    Unauthenticated,
    Unavailable,
)
from triptych.core.plan import FinishReason, Grid, Item, Modality, Plan, Sampling, TokenRange
from triptych.core.worker import Role
from triptych.rpc.client import ChannelPool
from triptych.wire.v1 import encoder_pb2, prefill_pb2

E, P, D = [Role.ENCODER], [Role.PREFILL], [Role.DECODE]


def item(number: int, media: bytes) -> Item:
    ranges = (TokenRange(number, number * 4, 4),)
    identity = hashlib.sha256(media).digest()
    return Item(Modality.IMAGE, identity, 4, ranges, Grid(1, 4, 4), len(media), 56, 56)


def plan_of(media: Sequence[bytes] = (), max_tokens: int = 5, timeout_s: float = 10.0) -> Plan:
    items = tuple(item(number, one) for number, one in enumerate(media))
    return Plan(tuple([7] * len(media) + [1, 2, 3]), items, Sampling(max_tokens, seed=1), timeout_s)


async def collect(answer: Answer) -> tuple[list[int], FinishReason]:
    ids: list[int] = []
    async for event in answer.events():
        if isinstance(event, Batch):
            assert [token.index for token in event.tokens] == list(range(len(ids), len(ids) + len(event.tokens)))
            ids += [token.id for token in event.tokens]
        else:
            return ids, event.finish_reason
    raise AssertionError("no end")


async def ask(pipeline: Pipeline, plan: Plan, media: Sequence[bytes] = (), name: str = "req-1") -> list[int]:
    async with pipeline.answer(plan, media, name) as answer:
        return (await collect(answer))[0]


def expected(count: int) -> list[int]:
    return [100 + index for index in range(count)]


async def test_text_only() -> None:
    async with running() as (cluster, pipeline), pipeline.answer(plan_of(), [], "req-1") as answer:
        assert await collect(answer) == (expected(5), FinishReason.LENGTH)
        usage = answer.usage(5)
        assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (3, 3, 5)
        assert answer.progress.workers == {Role.DECODE: ["decode-0"], Role.PREFILL: ["prefill-0"]}
        stages = {(event.stage, event.event) for event in answer.all_events()}
        wanted = {("router", "queue"), ("router", "dispatch"), ("prefill", "first_token"), ("decode", "finish")}
        assert stages == wanted
    assert not cluster.hub.calls_to(Role.ENCODER)


async def test_pictures_reach_the_encoders_in_pieces() -> None:
    media = [random.randbytes(size) for size in (1, 2**20, 2**20 + 1, 3 * 2**20 + 5)]
    async with running(("e-0", E), ("e-1", E), ("p-0", P), ("d-0", D)) as (cluster, pipeline):
        assert await ask(pipeline, plan_of(media), media) == expected(5)
        assert cluster.hub.media == {hashlib.sha256(one).digest(): one for one in media}


async def test_the_same_picture_always_goes_to_the_same_encoder() -> None:
    media = [bytes([number]) for number in range(12)]
    async with running(("e-0", E), ("e-1", E), ("e-2", E), ("p-0", P), ("d-0", D)) as (cluster, pipeline):
        served: dict[bytes, set[str]] = {}
        for turn in range(3):
            await ask(pipeline, plan_of(media), media, f"req-{turn}")
        for call in cluster.hub.calls_to(Role.ENCODER):
            for one in call.request.items:
                served.setdefault(one.item.identity, set()).add(call.worker.worker_id)
        assert all(len(encoders) == 1 for encoders in served.values())
        assert len(set.union(*served.values())) > 1


async def test_decode_may_be_ahead_of_prefill() -> None:
    ahead = asyncio.Event()

    async def decode(call: Call) -> AsyncIterator[Any]:
        yield fake.grant(call.worker)
        yield fake.tokens(1, 2)
        yield fake.tokens(3)
        yield fake.generate_done(call, 4)
        ahead.set()

    async def prefill(call: Call) -> AsyncIterator[Any]:
        await ahead.wait()
        await asyncio.sleep(0.05)
        yield fake.first_token()
        yield fake.prefill_done(call)

    async with running(script=Script(decode, prefill)) as (_, pipeline):
        assert await ask(pipeline, plan_of(max_tokens=4)) == expected(4)


async def test_tokens_come_once_whichever_stream_repeats_them() -> None:
    async def decode(call: Call) -> AsyncIterator[Any]:
        yield fake.grant(call.worker)
        yield fake.tokens(0, 1)
        yield fake.tokens(1, 2)
        yield fake.generate_done(call, 3)

    async with running(script=Script(decode)) as (_, pipeline):
        assert await ask(pipeline, plan_of(max_tokens=3)) == expected(3)


async def test_an_answer_that_ends_at_its_first_token_gives_the_grant_back() -> None:
    async def prefill(call: Call) -> AsyncIterator[Any]:
        yield fake.first_token()
        yield fake.prefill_done(call, FinishReason.STOP)

    async with running(script=Script(prefill=prefill)) as (cluster, pipeline):
        async with pipeline.answer(plan_of(), [], "req-1") as answer:
            assert await collect(answer) == ([100], FinishReason.STOP)
        await cluster.hub.until_all_ended()
        assert [call.outcome for call in cluster.hub.calls_to(Role.DECODE)] == ["cancelled"]


async def test_a_full_worker_is_passed_over() -> None:
    def decode(call: Call) -> AsyncIterator[Any]:
        return fake.failing(NoRoom("full")) if call.worker.worker_id == "d-0" else fake.decode_well(call)

    async with running(("p-0", P), ("d-0", D), ("d-1", D), script=Script(decode)) as (cluster, pipeline):
        for turn in range(2):
            assert await ask(pipeline, plan_of(), name=f"req-{turn}") == expected(5)
        served = [call.worker.worker_id for call in cluster.hub.calls_to(Role.DECODE) if call.outcome == "ended"]
        assert served == ["d-1", "d-1"]


async def test_requests_wait_in_line_until_there_is_room() -> None:
    room = asyncio.Event()

    def decode(call: Call) -> AsyncIterator[Any]:
        return fake.decode_well(call) if room.is_set() else fake.failing(NoRoom("full"))

    async with running(script=Script(decode)) as (cluster, pipeline):
        done: list[str] = []

        async def one(name: str) -> None:
            assert await ask(pipeline, plan_of(), name=name) == expected(5)
            done.append(name)

        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(one(f"req-{number}"))
                await asyncio.sleep(0.02)
            room.set()
        granted = [call.ref.request_id for call in cluster.hub.calls_to(Role.DECODE) if call.outcome == "ended"]
        assert granted == [f"req-{number}" for number in range(4)]


async def test_no_room_until_the_deadline_is_a_503_and_a_full_line_a_429() -> None:
    script = Script(decode=lambda call: fake.failing(NoRoom("full")))
    async with running(script=script, max_queue=1) as (_, pipeline):
        first = asyncio.create_task(ask(pipeline, plan_of(timeout_s=0.5), name="req-1"))
        await asyncio.sleep(0.1)
        with pytest.raises(Overloaded):
            await ask(pipeline, plan_of(timeout_s=0.5), name="req-2")
        with pytest.raises(NoRoom, match=r"0\.5 s"):
            await first


async def test_too_big_for_an_empty_pool_is_said_at_once() -> None:
    script = Script(decode=lambda call: fake.failing(RequestTooLarge("needs 9 pages of 4")))
    async with running(script=script) as (_, pipeline):
        with pytest.raises(RequestTooLarge, match="9 pages"):
            await ask(pipeline, plan_of())


@pytest.mark.parametrize("missing", ["encoder-0", "prefill-0", "decode-0"])
async def test_a_stage_without_a_worker_is_named(missing: str) -> None:
    async with running() as (cluster, pipeline):
        cluster.remove(missing)
        with pytest.raises(Unavailable, match=missing[:-2]):
            await ask(pipeline, plan_of([b"x"]), [b"x"])
        await cluster.hub.until_all_ended()


async def test_an_encoders_verdict_on_a_picture_ends_everything() -> None:
    script = Script(encode=lambda call: fake.failing(MediaInvalid("item 0 is a broken JPEG", param="messages")))
    async with running(script=script) as (cluster, pipeline):
        with pytest.raises(MediaInvalid, match="broken JPEG"):
            await ask(pipeline, plan_of([b"x"]), [b"x"])
        await cluster.hub.until_all_ended()
        assert {call.outcome for call in cluster.hub.calls} == {"cancelled", "media_invalid"}
        assert len(cluster.hub.calls_to(Role.DECODE)) == 1, "the caller's own fault is not tried again"


@pytest.mark.parametrize("error", [PeerLost("gone"), EmbeddingMissing("item 0 did not come"), Unavailable("draining")])
async def test_a_lost_prefill_worker_is_replaced_by_another(error: TriptychError) -> None:
    script = Script(prefill=once(lambda call: fake.failing(error), fake.prefill_well))
    async with running(("e-0", E), ("p-0", P), ("p-1", P), ("d-0", D), script=script) as (cluster, pipeline):
        async with pipeline.answer(plan_of([b"x"]), [b"x"], "req-1") as answer:
            assert (await collect(answer))[0] == expected(5)
            workers = answer.progress.workers
        tries = [(call.ref.attempt, call.worker.worker_id) for call in cluster.hub.calls_to(Role.PREFILL)]
        assert [number for number, _ in tries] == [0, 1]
        assert tries[0][1] != tries[1][1]
        assert workers[Role.PREFILL] == [tries[1][1]]


async def test_a_lost_encoder_is_replaced_though_its_pictures_are_at_home_there() -> None:
    script = Script(encode=once(lambda call: fake.failing(PeerLost("gone")), fake.encode_well))
    async with running(("e-0", E), ("e-1", E), ("p-0", P), ("d-0", D), script=script) as (cluster, pipeline):
        assert await ask(pipeline, plan_of([b"x"]), [b"x"]) == expected(5)
        first, second = (call.worker.worker_id for call in cluster.hub.calls_to(Role.ENCODER))
        assert first != second


async def test_a_call_that_breaks_off_without_a_word_is_a_loss() -> None:
    async def break_off(call: Call) -> AsyncIterator[Any]:
        raise RuntimeError("gRPC makes this UNKNOWN, as it does of some resets")
        yield

    async with running(script=Script(prefill=once(break_off, fake.prefill_well))) as (_, pipeline):
        assert await ask(pipeline, plan_of()) == expected(5)


@pytest.mark.parametrize("stage", ["encoder", "prefill", "decode", "granting"])
async def test_a_worker_whose_channel_is_closed_under_a_call_is_a_loss(stage: str) -> None:
    """As when the registry no longer shows it. gRPC cancels the call from inside."""

    async def hang(call: Call) -> AsyncIterator[Any]:
        if stage == "decode":
            yield fake.grant(call.worker)
        await fake.for_ever()

    script = Script()
    setattr(script, "decode" if stage == "granting" else stage.replace("encoder", "encode"), hang)
    worker_id = {"encoder": "encoder-0", "prefill": "prefill-0"}.get(stage, "decode-0")
    async with fake_cluster(script=script) as cluster:
        channels = ChannelPool(fake.TOKEN)
        pipeline = Pipeline(cluster, channels, AdmissionQueue(8), SystemClock())
        async with asyncio.timeout(5), pipeline.answer(plan_of([b"x"]), [b"x"], "req-1") as answer:
            await cluster.hub.until_called(1 if stage == "granting" else 3)
            cluster.remove(worker_id)
            await channels.forget(worker_id)
            with pytest.raises((PeerLost, Unavailable)):
                await collect(answer)
        await channels.close()


@pytest.mark.parametrize("stage", ["encode", "prefill", "decode"])
async def test_a_worker_that_shuts_down_is_a_loss(stage: str) -> None:
    script = Script()
    well = getattr(script, stage)
    setattr(script, stage, once(lambda call: fake.failing(Aborted("the worker is shutting down")), well))
    two = [(f"{name}-{number}", role) for name, role in (("e", E), ("p", P), ("d", D)) for number in (0, 1)]
    async with running(*two, script=script) as (_, pipeline):
        assert await ask(pipeline, plan_of([b"x"]), [b"x"]) == expected(5)


async def test_a_worker_that_does_not_answer_its_port_is_passed_over() -> None:
    async with running(("p-0", P), ("d-0", D), ("d-1", D)) as (cluster, pipeline):
        dead = next(index for index, info in enumerate(cluster.infos) if info.worker_id == "d-0")
        cluster.infos[dead] = fake.replace(cluster.infos[dead], grpc_address="127.0.0.1:1")
        for turn in range(2):
            assert await ask(pipeline, plan_of(), name=f"req-{turn}") == expected(5)


async def test_a_retry_sees_the_workers_as_they_are_by_then_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The registry has not noticed yet that the one decode worker was replaced by another."""
    async with running(("p-0", P), ("d-0", D), ("d-1", D)) as (cluster, pipeline):
        prefill, dead, born = cluster.infos
        cluster.infos = [prefill, born]
        cluster.stale = (prefill, fake.replace(dead, grpc_address="127.0.0.1:1"))
        assert await ask(pipeline, plan_of()) == expected(5)
    lines = [record for record in caplog.records if record.name.startswith("services.router")]
    assert [(line.__dict__["code"], line.__dict__["failed_workers"]) for line in lines] == [("peer_lost", "d-0")]


async def test_a_lost_worker_is_not_asked_again_while_others_are_only_full() -> None:
    room, asked = asyncio.Event(), Counter[str]()

    def decode(call: Call) -> AsyncIterator[Any]:
        asked[call.worker.worker_id] += 1
        if call.worker.worker_id == "d-0":
            return fake.failing(PeerLost("gone"))
        return fake.decode_well(call) if room.is_set() else fake.failing(NoRoom("full"))

    async with running(("p-0", P), ("d-0", D), ("d-1", D), script=Script(decode)) as (_, pipeline):
        waiting = asyncio.create_task(ask(pipeline, plan_of()))
        await asyncio.sleep(0.3)
        room.set()
        assert await waiting == expected(5)
    assert asked["d-0"] == 1 < asked["d-1"]


async def test_a_worker_too_small_for_the_request_is_passed_over() -> None:
    def decode(call: Call) -> AsyncIterator[Any]:
        small = call.worker.worker_id == "d-0"
        return fake.failing(RequestTooLarge("needs 9 pages of 4")) if small else fake.decode_well(call)

    async with running(("p-0", P), ("d-0", D), ("d-1", D), script=Script(decode)) as (_, pipeline):
        for turn in range(2):
            assert await ask(pipeline, plan_of(), name=f"req-{turn}") == expected(5)


@pytest.mark.parametrize("stage", ["prefill", "encode"])
async def test_a_worker_that_could_not_reach_its_receiver_is_not_blamed_for_it(
    stage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Prefill sends to decode and encoders to prefill: the next try is without the receiver."""
    script = Script()
    setattr(script, stage, once(lambda call: fake.failing(ReceiverLost("silent")), getattr(script, stage)))
    two = [(f"{name}-{number}", role) for name, role in (("p", P), ("d", D)) for number in (0, 1)]
    async with running(("e-0", E), *two, script=script) as (cluster, pipeline):
        assert await ask(pipeline, plan_of([b"x"]), [b"x"]) == expected(5)
        receiver = Role.DECODE if stage == "prefill" else Role.PREFILL
        tried = [call.worker.worker_id for call in cluster.hub.calls_to(receiver)]
        receivers = {info.worker_id for info in cluster.infos if receiver in info.roles}
    (line,) = [record for record in caplog.records if record.name == "services.router.pipeline"]
    # The first try may fail before its call has reached the receiver: then only the second one is on record.
    lost = line.__dict__["failed_workers"]
    assert receivers == {lost, tried[-1]} and tried.count(tried[-1]) == 1 and set(tried) <= receivers


async def test_text_needs_no_encoder() -> None:
    async with running(("p-0", P), ("d-0", D)) as (_, pipeline):
        assert await ask(pipeline, plan_of()) == expected(5)


async def test_a_mono_worker_serves_beside_the_others_and_sees_its_own_pictures_only() -> None:
    async with running(("e-0", E), ("p-0", P), ("d-0", D), ("mono-0", list(Role))) as (cluster, pipeline):
        for turn in range(6):
            assert await ask(pipeline, plan_of([b"x"]), [b"x"], f"req-{turn}") == expected(5)
        by_request: dict[str, set[str]] = {}
        for call in cluster.hub.calls:
            by_request.setdefault(call.ref.request_id, set()).add(call.worker.worker_id)
    assert Counter(map(frozenset, by_request.values())) == {
        frozenset({"mono-0"}): 3,
        frozenset({"e-0", "p-0", "d-0"}): 3,
    }


async def test_lost_embeddings_are_dispatched_again() -> None:
    async def prefill(call: Call) -> AsyncIterator[Any]:
        await call.hub.until_landed(call.key, 2)
        call.hub.landed[call.key].discard(1)
        yield prefill_pb2.PrefillResponse(need_items=prefill_pb2.NeedItems(item_indices=[1]))
        async for message in fake.prefill_well(call):
            yield message

    media = [b"one", b"two"]
    async with running(script=Script(prefill=prefill)) as (cluster, pipeline):
        assert await ask(pipeline, plan_of(media), media) == expected(5)
        sent = [[one.item_index for one in call.request.items] for call in cluster.hub.calls_to(Role.ENCODER)]
        assert sent == [[0, 1], [1]]
        assert {call.ref.attempt for call in cluster.hub.calls} == {0}


async def test_lost_embeddings_are_not_asked_of_an_encoder_that_has_left() -> None:
    async def prefill(call: Call) -> AsyncIterator[Any]:
        await call.hub.until_landed(call.key, 1)
        call.hub.landed[call.key].clear()
        cluster.remove(call.hub.calls_to(Role.ENCODER)[0].worker.worker_id)
        yield prefill_pb2.PrefillResponse(need_items=prefill_pb2.NeedItems(item_indices=[0]))
        async for message in fake.prefill_well(call):
            yield message

    script = Script(prefill=prefill)
    async with running(("e-0", E), ("e-1", E), ("p-0", P), ("d-0", D), script=script) as (cluster, pipeline):
        assert await ask(pipeline, plan_of([b"x"]), [b"x"]) == expected(5)
        first, second = cluster.hub.calls_to(Role.ENCODER)
        assert first.worker != second.worker
        assert (first.ref.attempt, second.ref.attempt) == (0, 0)


async def test_a_picture_that_prefill_had_all_along_may_come_too_late() -> None:
    """Its KV was cached: prefill is through before the encoder asks, and the encoder hears that the attempt is over."""
    said = asyncio.Event()

    async def encode(call: Call) -> AsyncIterator[Any]:
        said.set()
        raise StaleAttempt("this attempt has ended")
        yield

    async def prefill(call: Call) -> AsyncIterator[Any]:
        await said.wait()
        await asyncio.sleep(0.05)
        call.hub.landed[call.key].add(0)
        async for message in fake.prefill_well(call):
            yield message

    async with running(script=Script(prefill=prefill, encode=encode)) as (cluster, pipeline):
        assert await ask(pipeline, plan_of([b"x"]), [b"x"]) == expected(5)
        assert {call.ref.attempt for call in cluster.hub.calls} == {0}


async def test_an_encoder_that_is_lost_after_the_first_token_does_no_harm() -> None:
    async def encode(call: Call) -> AsyncIterator[Any]:
        await call.hub.land(call.key, 0)
        await call.hub.kv[call.key].wait()
        await asyncio.sleep(0.05)
        raise PeerLost("gone")
        yield

    async def decode(call: Call) -> AsyncIterator[Any]:
        async for message in fake.decode_well(call):
            await asyncio.sleep(0.05)
            yield message

    async with running(script=Script(decode, encode=encode)) as (_, pipeline):
        assert await ask(pipeline, plan_of([b"x"]), [b"x"]) == expected(5)


async def test_one_worker_with_all_roles_gets_all_calls() -> None:
    both = ("mono-0", [*E, *P, *D]), ("mono-1", [*E, *P, *D])
    async with running(*both, ("p-0", P), ("e-0", E)) as (cluster, pipeline):
        for turn in range(4):
            assert await ask(pipeline, plan_of([b"x"]), [b"x"], f"req-{turn}") == expected(5)
        for turn in range(4):
            calls = [call for call in cluster.hub.calls if call.ref.request_id == f"req-{turn}"]
            assert len(calls) == 3
            assert len({call.worker.worker_id for call in calls}) == 1
        assert {call.worker.worker_id for call in cluster.hub.calls} == {"mono-0", "mono-1"}


async def test_leaving_cancels_every_stage() -> None:
    async def encode(call: Call) -> AsyncIterator[Any]:
        yield encoder_pb2.EncodeResponse(need_bytes=encoder_pb2.NeedBytes(item_index=0))
        await fake.for_ever()

    async with running(script=Script(encode=encode)) as (cluster, pipeline):
        async with pipeline.answer(plan_of([b"x"]), [b"x"], "req-1"):
            await cluster.hub.until_called(3)
        await cluster.hub.until_all_ended()
        assert [call.outcome for call in cluster.hub.calls] == ["cancelled"] * 3


@pytest.mark.parametrize("why", ["the caller leaves", "the time is over"])
async def test_no_attempt_follows_one_that_fails_while_it_is_being_ended(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task group that has errors to tell forgets that it was cancelled."""
    is_ending = asyncio.Event()
    events = GenerateCall.events

    async def end_slowly(call: GenerateCall) -> AsyncIterator[Any]:
        try:
            async for event in events(call):
                yield event
        finally:
            is_ending.set()
            await asyncio.sleep(0.3)

    monkeypatch.setattr(GenerateCall, "events", end_slowly)
    timeout_s = 0.25 if why == "the time is over" else 10.0
    script = Script(prefill=once(lambda call: fake.failing(PeerLost("gone")), fake.prefill_well))
    async with running(("p-0", P), ("p-1", P), ("d-0", D), script=script) as (cluster, pipeline):
        async with pipeline.answer(plan_of(timeout_s=timeout_s), [], "req-1") as answer:
            await is_ending.wait()
            if why == "the time is over":
                with pytest.raises(DeadlineExceeded):
                    await collect(answer)
        await cluster.hub.until_all_ended()
        assert [call.ref.attempt for call in cluster.hub.calls_to(Role.DECODE)] == [0]


async def test_the_deadline_ends_everything() -> None:
    async def prefill(call: Call) -> AsyncIterator[Any]:
        await fake.for_ever()
        yield

    async with running(script=Script(prefill=prefill)) as (cluster, pipeline):
        with pytest.raises(DeadlineExceeded):
            await ask(pipeline, plan_of(timeout_s=0.4))
        await cluster.hub.until_all_ended()
        assert all(call.request.plan.timeout_ms <= 400 for call in cluster.hub.calls)
        assert {call.outcome for call in cluster.hub.calls} == {"cancelled"}


async def nonsense(call: Call) -> AsyncIterator[Any]:
    yield fake.grant(fake.replace(call.worker, worker_id="../../etc"))


async def no_grant(call: Call) -> AsyncIterator[Any]:
    yield fake.tokens(1)


async def a_hole(call: Call) -> AsyncIterator[Any]:
    yield fake.grant(call.worker)
    yield fake.tokens(1, 3)
    yield fake.generate_done(call, 2)


async def too_few(call: Call) -> AsyncIterator[Any]:
    yield fake.grant(call.worker)
    yield fake.tokens(1)
    yield fake.generate_done(call, 3)


async def too_many(call: Call) -> AsyncIterator[Any]:
    yield fake.grant(call.worker)
    yield fake.tokens(1, 2, 3, 4, 5, 6)
    yield fake.generate_done(call, 7)


@pytest.mark.parametrize("decode", [nonsense, no_grant, a_hole, too_few, too_many])
async def test_a_worker_that_breaks_the_rules_gives_an_error_never_an_answer(decode: Any) -> None:
    async with running(script=Script(decode)) as (_, pipeline):
        with pytest.raises(TriptychError) as caught:
            await ask(pipeline, plan_of())
        assert caught.value.http_status == 500
        assert "etc" not in caught.value.message


async def test_a_stream_that_breaks_off_is_a_loss() -> None:
    async def decode(call: Call) -> AsyncIterator[Any]:
        yield fake.grant(call.worker)
        await call.hub.kv[call.key].wait()
        yield fake.tokens(1)

    async with running(script=Script(decode)) as (_, pipeline):
        with pytest.raises(PeerLost):
            await ask(pipeline, plan_of())


async def test_a_wrong_cluster_token_is_not_the_callers_fault() -> None:
    async with fake_cluster() as cluster:
        channels = ChannelPool("another token")
        pipeline = Pipeline(cluster, channels, AdmissionQueue(8), SystemClock())
        with pytest.raises(TriptychError) as caught:
            await ask(pipeline, plan_of())
        assert not isinstance(caught.value, Unauthenticated)
        await channels.close()


async def test_many_at_once_all_end_right() -> None:
    async with running(("e-0", E), ("e-1", E), ("p-0", P), ("p-1", P), ("d-0", D), ("d-1", D)) as (cluster, pipeline):

        async def one(number: int) -> None:
            media = [bytes([number, k]) for k in range(number % 4)]
            assert await ask(pipeline, plan_of(media, 1 + number % 7), media, f"req-{number}") == expected(
                1 + number % 7
            )

        async with asyncio.TaskGroup() as group:
            for number in range(60):
                group.create_task(one(number))
        await cluster.hub.until_all_ended()
