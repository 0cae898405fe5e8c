"""The router and workers that are lost in the middle of an answer: others go on where it was, as often as they may."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from services.router import pipeline as pipelines
from services.router.breakers import NUM_FAILURES
from services.router.pipeline import Answer, Pipeline
from services.router.tries import MAX_FAILURES, RetryBudget
from tests.integration import fake_workers as fake
from tests.integration.fake_requests import D, E, P, collect, expected, plan_of
from tests.integration.fake_workers import Call, Gone, Script, fake_cluster, once, running
from tests.integration.test_router_replays import NUM_TOKENS, decode_on, decode_some, hub_of, prefill, whole
from triptych.core.errors import PeerLost, RequestRefused
from triptych.core.plan import FinishReason
from triptych.core.worker import Role
from triptych.obs import metrics
from triptych.wire.v1 import prefill_pb2

pytestmark = pytest.mark.usefixtures("by_grpc_and_line")

ALL = ("e-0", E), ("e-1", E), ("p-0", P), ("p-1", P), ("d-0", D), ("d-1", D)
ANSWER = expected(NUM_TOKENS)


async def lost_in_decode(call: Call) -> AsyncIterator[Any]:
    """Two tokens further, and then it is no more."""
    yield fake.grant(call.worker)
    await call.hub.kv[call.key].wait()
    start = len(call.request.plan.answer_ids) + 1
    yield fake.tokens(start, start + 1)
    await call.hub.until_out(start + 2)
    raise Gone


async def lost_in_prefill(call: Call) -> AsyncIterator[Any]:
    """Its first token is out, the KV never comes."""
    await call.hub.until_landed(call.key, len(call.request.plan.items))
    yield prefill_pb2.PrefillResponse(admitted=prefill_pb2.PrefillAdmitted(cached_tokens=3))
    yield prefill_pb2.PrefillResponse(first_token=fake.token(len(call.request.plan.answer_ids)))
    await call.hub.until_out(len(call.request.plan.answer_ids) + 1)
    raise Gone


def replays(when: str) -> float:
    return float(metrics.ROUTER_REPLAYS.labels(when)._value.get())


@pytest.mark.parametrize(
    ("script", "num_out"),
    [
        (lambda: Script(once(lost_in_decode, decode_on), prefill), 3),
        (lambda: Script(decode_on, once(lost_in_prefill, prefill)), 1),
    ],
    ids=["decode", "prefill"],
)
async def test_an_answer_goes_on_where_its_worker_was_lost(script: Callable[[], Script], num_out: int) -> None:
    before = replays("mid_answer")
    async with running(*ALL, script=script()) as (cluster, pipeline):
        ids, answer = await whole(pipeline, [b"x", b"y"])
        assert ids == ANSWER, "each index once"
        first, second = (call.request.plan for call in cluster.hub.calls_to(Role.PREFILL))
        assert (list(first.answer_ids), list(second.answer_ids)) == ([], ids[:num_out])
        assert first.sampling.seed == second.sampling.seed
        assert second.num_retractions == 0
        assert answer.usage(NUM_TOKENS).cached_tokens == 3, "what the replay found is not the caller's"
        await cluster.hub.until_all_ended()
    assert replays("mid_answer") == before + 1


async def test_the_worker_that_was_lost_is_not_asked_again() -> None:
    async with running(*ALL, script=Script(once(lost_in_decode, decode_on), prefill)) as (cluster, pipeline):
        await whole(pipeline, [])
        first, second = cluster.hub.calls_to(Role.DECODE)
        assert first.worker.worker_id != second.worker.worker_id


@pytest.mark.parametrize("lost", ["e-0", "e-1"])
async def test_an_encoder_that_is_lost_is_replaced(lost: str) -> None:
    async def encode(call: Call) -> AsyncIterator[Any]:
        async for message in fake.encode_well(call):
            yield message
            if call.worker.worker_id == lost:
                raise Gone

    async with running(*ALL, script=Script(decode_on, prefill, encode)) as (_, pipeline):
        ids, _ = await whole(pipeline, [b"x", b"y", b"z"])
        assert ids == ANSWER


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
async def test_a_worker_that_is_lost_after_its_last_token_costs_nothing(reason: FinishReason) -> None:
    """A replay would go on behind the end."""
    count = NUM_TOKENS if reason is FinishReason.LENGTH else 4

    async def lost_at_the_end(call: Call) -> AsyncIterator[Any]:
        yield fake.grant(call.worker)
        await call.hub.kv[call.key].wait()
        yield fake.tokens(*range(1, count))
        await call.hub.until_out(count)
        raise Gone

    stop = frozenset() if reason is FinishReason.LENGTH else frozenset({100 + count - 1})
    plan = plan_of([], NUM_TOKENS)
    plan = replace(plan, sampling=replace(plan.sampling, stop_token_ids=stop))
    async with running(*ALL, script=Script(lost_at_the_end, prefill)) as (cluster, pipeline):
        async with pipeline.answer(plan, [], "req-1") as answer:
            cluster.hub.answer = answer
            assert await collect(answer) == (expected(count), reason)
        assert len(cluster.hub.calls_to(Role.DECODE)) == 1


async def refused(pipeline: Pipeline, kind: type[Exception]) -> Answer:
    async with pipeline.answer(plan_of([], NUM_TOKENS), [], "req-1") as answer:
        hub_of(pipeline).answer = answer
        with pytest.raises(kind):
            await collect(answer)
    return answer


async def test_a_request_under_which_two_workers_went_is_not_given_to_a_third() -> None:
    three = ("p-0", P), ("d-0", D), ("d-1", D), ("d-2", D)
    async with running(*three, script=Script(lost_in_decode, prefill)) as (cluster, pipeline):
        answer = await refused(pipeline, RequestRefused)
        assert answer.order.emitted == 6
        assert len(cluster.hub.calls_to(Role.DECODE)) == 2


async def failing_decode(call: Call) -> AsyncIterator[Any]:
    yield fake.grant(call.worker)
    await call.hub.kv[call.key].wait()
    raise PeerLost("gave up")


async def test_workers_that_live_and_fail_are_tried_a_few_times() -> None:
    async with running(*ALL, script=Script(failing_decode, prefill)) as (cluster, pipeline):
        await refused(pipeline, PeerLost)
        assert len(cluster.hub.calls_to(Role.DECODE)) == MAX_FAILURES


async def test_when_the_budget_is_used_up_a_failure_is_an_error() -> None:
    async with running(*ALL, script=Script(failing_decode, prefill)) as (cluster, pipeline):
        pipeline._budget = RetryBudget(capacity=1.0, share=0.0)
        await refused(pipeline, PeerLost)
        await refused(pipeline, PeerLost)
        assert len(cluster.hub.calls_to(Role.DECODE)) == 3


async def test_after_a_retraction_a_loss_is_made_good_as_well() -> None:
    turns = [decode_on, lost_in_decode, decode_some]

    async with running(*ALL, script=Script(lambda call: turns.pop()(call), prefill)) as (cluster, pipeline):
        ids, _ = await whole(pipeline, [])
        assert ids == ANSWER
        plans = [
            (len(c.request.plan.answer_ids), c.request.plan.num_retractions) for c in cluster.hub.calls_to(Role.DECODE)
        ]
        assert plans == [(0, 0), (3, 1), (6, 1)]


async def test_a_worker_that_fails_all_is_left_alone_and_then_tried_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two decode workers, one of which never does its part."""
    now_s = 100.0

    def decode(call: Call) -> AsyncIterator[Any]:
        return failing_decode(call) if call.worker.worker_id == "d-0" and is_failing else fake.decode_well(call)

    is_failing = True
    monkeypatch.setattr(random, "random", lambda: 0.0)
    async with fake_cluster(("p-0", P), ("d-0", D), ("d-1", D), script=Script(decode)) as cluster:
        channels = pipelines.ChannelPool(fake.TOKEN)
        pipeline = Pipeline(cluster, channels, pipelines.AdmissionQueue(8), fake.SystemClock())
        pipeline._breakers._clock = lambda: now_s

        async def asked_of_d0(count: int) -> int:
            before = len(cluster.hub.calls_to(Role.DECODE))
            for number in range(count):
                async with pipeline.answer(plan_of(), [], f"req-{number}") as answer:
                    assert (await collect(answer))[0] == expected(5)
            calls = cluster.hub.calls_to(Role.DECODE)[before:]
            return sum(call.worker.worker_id == "d-0" for call in calls)

        assert await asked_of_d0(20) == NUM_FAILURES, "the circuit is open"
        now_s += 1.5
        assert await asked_of_d0(10) == 1, "one probe, which failed"
        now_s += 1.5
        assert await asked_of_d0(10) == 0, "the second pause is longer"
        now_s += 1.5
        is_failing = False
        assert await asked_of_d0(10) >= 4, "it serves again"
        await channels.close()
