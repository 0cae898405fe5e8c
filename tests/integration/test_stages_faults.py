"""Damaged pictures, what never comes, workers that meet bugs: an error in time, and never an answer."""

from __future__ import annotations

import dataclasses
import functools
import time
from pathlib import Path

import pytest

from services.router import calls
from tests.integration import tiny_cluster
from tests.integration.stage_asking import all_is_given_back, answer, asked, never, picture, supply_of, worker_of
from tests.integration.tiny_cluster import MAX_TOKENS, SMALL_POOL
from triptych.core.errors import (
    DeadlineExceeded,
    MediaInvalid,
    MediaMismatch,
    RequestTooLarge,
    TriptychError,
)
from triptych.core.ids import AttemptRef, new_request_id
from triptych.core.plan import Modality
from triptych.core.topology import TOPOLOGIES
from triptych.core.worker import Role
from triptych.engine.loop import LanguageEngine
from triptych.testing.cluster import InProcessCluster
from triptych.transport.receiver_link import ReceiverLink

pytestmark = pytest.mark.asyncio(loop_scope="module")
model_dir, shared, epd = tiny_cluster.model_dir, tiny_cluster.shared, tiny_cluster.epd


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
