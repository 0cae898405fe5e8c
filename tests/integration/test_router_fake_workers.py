"""The router's pipeline against workers that do exactly what each test says."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.router.pipeline import Pipeline
from services.router.queue import AdmissionQueue
from tests.integration import fake_workers as fake
from tests.integration.fake_requests import D, E, P, ask, collect, expected, plan_of
from tests.integration.fake_workers import Call, Script, fake_cluster, running
from triptych.core.clock import SystemClock
from triptych.core.errors import (
    DeadlineExceeded,
    MediaInvalid,
    NoRoom,
    RequestTooLarge,
    Saturated,
    TriptychError,
    Unauthenticated,
    Unavailable,
)
from triptych.core.plan import FinishReason
from triptych.core.worker import Role
from triptych.rpc.client import ChannelPool
from triptych.wire.v1 import encoder_pb2

pytestmark = pytest.mark.usefixtures("by_grpc_and_line")


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


async def test_no_room_until_the_deadline_is_a_503_and_a_full_line_too() -> None:
    script = Script(decode=lambda call: fake.failing(NoRoom("full")))
    async with running(script=script, max_queue=1) as (_, pipeline):
        first = asyncio.create_task(ask(pipeline, plan_of(timeout_s=0.5), name="req-1"))
        await asyncio.sleep(0.1)
        with pytest.raises(Saturated) as refused:
            await ask(pipeline, plan_of(timeout_s=0.5), name="req-2")
        with pytest.raises(NoRoom, match=r"0\.5 s") as late:
            await first
        assert (refused.value.http_status, late.value.http_status) == (503, 503)
        assert refused.value.retry_after_s is not None and 0 < refused.value.retry_after_s < 5, "it has not moved"
        assert late.value.retry_after_s is not None, "who left it is told what those who stay will take: nobody here"


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


async def test_a_worker_too_small_for_the_request_is_passed_over() -> None:
    def decode(call: Call) -> AsyncIterator[Any]:
        small = call.worker.worker_id == "d-0"
        return fake.failing(RequestTooLarge("needs 9 pages of 4")) if small else fake.decode_well(call)

    async with running(("p-0", P), ("d-0", D), ("d-1", D), script=Script(decode)) as (_, pipeline):
        for turn in range(2):
            assert await ask(pipeline, plan_of(), name=f"req-{turn}") == expected(5)


async def test_text_needs_no_encoder() -> None:
    async with running(("p-0", P), ("d-0", D)) as (_, pipeline):
        assert await ask(pipeline, plan_of()) == expected(5)


async def test_a_mono_worker_serves_beside_the_others_and_sees_its_own_pictures_only() -> None:
    async with running(("e-0", E), ("p-0", P), ("d-0", D), ("mono-0", list(Role))) as (cluster, pipeline):
        for turn in range(6):
            media = [b"another picture each time %d" % turn]
            assert await ask(pipeline, plan_of(media), media, f"req-{turn}") == expected(5)
        by_request: dict[str, set[str]] = {}
        for call in cluster.hub.calls:
            by_request.setdefault(call.ref.request_id, set()).add(call.worker.worker_id)
    assert Counter(map(frozenset, by_request.values())) == {
        frozenset({"mono-0"}): 3,
        frozenset({"e-0", "p-0", "d-0"}): 3,
    }


async def test_one_worker_with_all_roles_gets_all_calls() -> None:
    both = ("mono-0", [*E, *P, *D]), ("mono-1", [*E, *P, *D])
    async with running(*both, ("p-0", P), ("e-0", E)) as (cluster, pipeline):
        for turn in range(4):
            media = [b"another picture each time %d" % turn]
            assert await ask(pipeline, plan_of(media), media, f"req-{turn}") == expected(5)
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
