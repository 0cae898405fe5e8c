"""The router and answers that lose their place at a decode worker: replayed with what is out already, before all who
wait, within one deadline, and the client notices nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.router.pipeline import Answer, Pipeline
from tests.integration import fake_workers as fake
from tests.integration.fake_requests import D, P, collect, plan_of
from tests.integration.fake_workers import Call, Script, once, running
from triptych.core.errors import DeadlineExceeded, NoRoom, PeerLost, Unavailable
from triptych.core.plan import MAX_RETRACTIONS, FinishReason
from triptych.core.worker import Role
from triptych.wire.v1 import decode_pb2, prefill_pb2

NUM_TOKENS = 12


def retracted(num_tokens: int) -> decode_pb2.GenerateResponse:
    return decode_pb2.GenerateResponse(retracted=decode_pb2.Retracted(num_tokens=num_tokens))


async def prefill(call: Call) -> AsyncIterator[Any]:
    """As a real one: the first token that it sends follows those that the plan brings along."""
    await call.hub.until_landed(call.key, len(call.request.plan.items))
    yield prefill_pb2.PrefillResponse(admitted=prefill_pb2.PrefillAdmitted(cached_tokens=3 + call.ref.attempt))
    yield prefill_pb2.PrefillResponse(first_token=fake.token(len(call.request.plan.answer_ids)))
    call.hub.kv[call.key].set()
    yield fake.prefill_done(call)


async def decode_on(call: Call) -> AsyncIterator[Any]:
    """To the end, from where the plan takes it up."""
    yield fake.grant(call.worker)
    await call.hub.kv[call.key].wait()
    yield fake.tokens(*range(len(call.request.plan.answer_ids) + 1, NUM_TOKENS))
    yield fake.generate_done(call, NUM_TOKENS)


async def decode_some(call: Call) -> AsyncIterator[Any]:
    """Two tokens further, and then it loses its place."""
    yield fake.grant(call.worker)
    await call.hub.kv[call.key].wait()
    start = len(call.request.plan.answer_ids) + 1
    yield fake.tokens(start, start + 1)
    await call.hub.until_out(start + 2)
    yield retracted(start + 2)


def retracting(times: int) -> Any:
    left = [decode_some] * times
    return lambda call: (left.pop() if left else decode_on)(call)


def plans_sent(cluster: fake.FakeCluster, role: Role) -> list[tuple[list[int], int]]:
    calls = cluster.hub.calls_to(role)
    return [(list(call.request.plan.answer_ids), call.request.plan.num_retractions) for call in calls]


def hub_of(pipeline: Pipeline) -> fake.Hub:
    assert isinstance(pipeline._registry, fake.FakeCluster)
    return pipeline._registry.hub


async def whole(pipeline: Pipeline, media: list[bytes], timeout_s: float = 10.0) -> tuple[list[int], Answer]:
    plan = plan_of(media, NUM_TOKENS, timeout_s)
    async with pipeline.answer(plan, media, "req-1") as answer:
        hub_of(pipeline).answer = answer
        ids, reason = await collect(answer)
        assert reason is FinishReason.LENGTH
    return ids, answer


@pytest.mark.parametrize("times", [1, MAX_RETRACTIONS])
async def test_an_answer_goes_on_where_it_was(times: int) -> None:
    async with running(script=Script(retracting(times), prefill)) as (cluster, pipeline):
        ids, answer = await whole(pipeline, [b"x", b"y"])
        assert ids == list(range(100, 100 + NUM_TOKENS)), "each index once"
        assert plans_sent(cluster, Role.DECODE) == plans_sent(cluster, Role.PREFILL)
        taken_up, retractions = zip(*plans_sent(cluster, Role.DECODE), strict=True)
        assert list(retractions) == list(range(times + 1))
        assert list(taken_up) == [ids[: 3 * number] for number in range(times + 1)]
        assert [call.ref.attempt for call in cluster.hub.calls_to(Role.DECODE)] == list(range(times + 1))
        assert len({call.request.plan.sampling.seed for call in cluster.hub.calls_to(Role.DECODE)}) == 1
        assert answer.usage(NUM_TOKENS).cached_tokens == 3, "what the replays found is not the caller's"
        await cluster.hub.until_all_ended()


async def test_there_are_three_replays() -> None:
    async with running(script=Script(retracting(MAX_RETRACTIONS + 1), prefill)) as (cluster, pipeline):
        with pytest.raises(Unavailable, match="memory") as failure:
            await whole(pipeline, [])
        assert failure.value.http_status == 503
        assert len(cluster.hub.calls_to(Role.DECODE)) == 1 + MAX_RETRACTIONS
        await cluster.hub.until_all_ended()


async def test_a_worker_that_retracts_is_no_failed_worker() -> None:
    """The same pair is asked again, first: prefill has the prompt in its cache."""
    workers = ("p-0", P), ("p-1", P), ("d-0", D), ("d-1", D)
    async with running(*workers, script=Script(retracting(2), prefill)) as (cluster, pipeline):
        await whole(pipeline, [])
        for role in (Role.DECODE, Role.PREFILL):
            assert len({call.worker.worker_id for call in cluster.hub.calls_to(role)}) == 1


async def test_the_first_token_may_come_later_than_the_news() -> None:
    """What is not out yet is sampled again, and is the same."""

    async def hurried(call: Call) -> AsyncIterator[Any]:
        yield fake.grant(call.worker)
        yield fake.tokens(1, 2)
        yield retracted(3)

    async def slow_prefill(call: Call) -> AsyncIterator[Any]:
        await asyncio.sleep(0.2)
        async for message in prefill(call):
            yield message

    script = Script(once(hurried, decode_on), slow_prefill)
    async with running(script=script) as (cluster, pipeline):
        ids, _ = await whole(pipeline, [])
        assert ids == list(range(100, 100 + NUM_TOKENS))
        assert plans_sent(cluster, Role.DECODE) == [([], 0), ([], 1)]


async def test_a_failure_and_retractions_have_budgets_of_their_own() -> None:
    async def lost(call: Call) -> AsyncIterator[Any]:
        raise PeerLost("gone")
        yield

    workers = ("p-0", P), ("d-0", D), ("d-1", D)
    script = Script(retracting(MAX_RETRACTIONS), once(lost, prefill))
    async with running(*workers, script=script) as (_, pipeline):
        ids, _ = await whole(pipeline, [])
        assert ids == list(range(100, 100 + NUM_TOKENS))


@pytest.mark.parametrize("stage", ["decode", "prefill"])
async def test_a_replay_that_loses_a_worker_before_it_has_sent_anything_is_repeated(stage: str) -> None:
    """The client has had tokens, but none of this attempt: another may send the rest."""
    asked: Counter[str] = Counter()

    def lost_at_its_replay(well: Any, name: str) -> Any:
        def call(call: Call) -> AsyncIterator[Any]:
            asked[name] += 1
            is_lost = stage == name and call.ref.attempt == 1
            return fake.failing(PeerLost("gone")) if is_lost else well(call)

        return call

    workers = ("p-0", P), ("p-1", P), ("d-0", D), ("d-1", D)
    script = Script(lost_at_its_replay(retracting(1), "decode"), lost_at_its_replay(prefill, "prefill"))
    async with running(*workers, script=script) as (cluster, pipeline):
        ids, _ = await whole(pipeline, [])
        assert ids == list(range(100, 100 + NUM_TOKENS)), "each index once"
        assert asked[stage] >= 3
        assert [list(call.request.plan.answer_ids) for call in cluster.hub.calls_to(Role.PREFILL)][-1] == [
            100,
            101,
            102,
        ]
        await cluster.hub.until_all_ended()


async def test_a_replay_has_room_before_anybody_who_waits() -> None:
    """All are full once it has lost its place; whoever waits had come before it."""
    room, granted = asyncio.Event(), []

    def decode(call: Call) -> AsyncIterator[Any]:
        if call.ref.attempt == 0 and call.ref.request_id == "req-1":
            return waiting_to_be_retracted(call)
        if not room.is_set():
            return fake.failing(NoRoom("full"))
        granted.append(call.ref.request_id)
        return decode_on(call)

    retract = asyncio.Event()

    async def waiting_to_be_retracted(call: Call) -> AsyncIterator[Any]:
        yield fake.grant(call.worker)
        await call.hub.kv[call.key].wait()
        yield fake.tokens(1)
        await retract.wait()
        yield retracted(2)

    async with running(script=Script(decode, prefill)) as (cluster, pipeline):
        first = asyncio.create_task(whole(pipeline, []))
        await cluster.hub.until_called(2)
        others = [asyncio.create_task(other(pipeline, f"other-{number}")) for number in range(3)]
        await cluster.hub.until_called(3)
        await asyncio.sleep(0.1)
        retract.set()
        await asyncio.sleep(0.2)
        room.set()
        ids, _ = await first
        await asyncio.gather(*others)
    assert ids == list(range(100, 100 + NUM_TOKENS))
    assert granted[0] == "req-1"
    assert sorted(granted[1:]) == ["other-0", "other-1", "other-2"]


async def other(pipeline: Pipeline, name: str) -> None:
    async with pipeline.answer(plan_of([], NUM_TOKENS), [], name) as answer:
        await collect(answer)


async def test_the_deadline_holds_while_a_replay_waits_for_room() -> None:
    def decode(call: Call) -> AsyncIterator[Any]:
        return decode_some(call) if call.ref.attempt == 0 else fake.failing(NoRoom("full"))

    async with running(script=Script(decode, prefill)) as (cluster, pipeline):
        with pytest.raises(DeadlineExceeded):
            await whole(pipeline, [], timeout_s=0.8)
        await cluster.hub.until_all_ended()


async def test_a_client_that_leaves_ends_a_replay_that_waits() -> None:
    def decode(call: Call) -> AsyncIterator[Any]:
        return decode_some(call) if call.ref.attempt == 0 else fake.failing(NoRoom("full"))

    async with running(script=Script(decode, prefill)) as (cluster, pipeline):
        async with pipeline.answer(plan_of([], NUM_TOKENS), [], "req-1"):
            await cluster.hub.until_called(4)
        await cluster.hub.until_all_ended()
        async with asyncio.timeout(2):
            while pipeline._queue.waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
