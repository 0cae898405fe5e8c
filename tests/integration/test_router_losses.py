"""Workers that are lost, break off, or break the rules, under the router's pipeline: another try, or an error."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.router.calls import GenerateCall
from services.router.pipeline import Pipeline
from services.router.queue import AdmissionQueue
from tests.integration import fake_workers as fake
from tests.integration.fake_requests import D, E, P, ask, collect, expected, plan_of
from tests.integration.fake_workers import Call, Script, fake_cluster, once, running
from triptych.core.clock import SystemClock
from triptych.core.errors import (
    Aborted,
    DeadlineExceeded,
    EmbeddingMissing,
    NoRoom,
    PeerLost,
    ReceiverLost,
    StaleAttempt,
    TriptychError,
    Unavailable,
)
from triptych.core.worker import Role
from triptych.rpc.client import ChannelPool
from triptych.wire.v1 import prefill_pb2

pytestmark = pytest.mark.usefixtures("by_grpc_and_line")


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
