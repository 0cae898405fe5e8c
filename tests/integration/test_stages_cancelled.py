"""Requests that are left at any moment, and attempts that come twice or too late: nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable
from pathlib import Path

import pytest

from services.router import calls
from tests.integration import tiny_cluster
from tests.integration.stage_asking import (
    WIRINGS,
    all_is_given_back,
    asked,
    engines,
    eventually,
    never,
    pages_in,
    picture,
    supply_of,
    worker_of,
)
from tests.integration.tiny_cluster import SMALL_POOL
from tests.unit.test_engine_gauges import raised
from triptych.core.errors import (
    StaleAttempt,
    TriptychError,
)
from triptych.core.ids import AttemptRef, new_request_id
from triptych.core.worker import Role
from triptych.testing.cluster import ChatRequest, InProcessCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")
model_dir, shared, epd = tiny_cluster.model_dir, tiny_cluster.shared, tiny_cluster.epd


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


# --- attempts ---------------------------------------------------------------------------------------------------------


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
