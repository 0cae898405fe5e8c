"""Turns of a conversation at one decode worker: what it holds is not sent again, and is given back however they end."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from services.router import calls
from tests.integration import tiny_cluster
from tests.integration.stage_asking import (
    all_is_given_back,
    answer,
    asked,
    eventually,
    moved_bytes,
    never,
    pages_in,
    picture,
    supply_of,
    worker_of,
)
from tests.integration.tiny_cluster import SMALL_POOL
from triptych.core.ids import AttemptRef, new_request_id
from triptych.core.plan import Plan, Sampling
from triptych.core.worker import Role
from triptych.obs import metrics
from triptych.stages import decode
from triptych.stages.settings import LanguageSettings
from triptych.testing.cluster import InProcessCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")
model_dir, shared, epd = tiny_cluster.model_dir, tiny_cluster.shared, tiny_cluster.epd

PAGE = LanguageSettings.page_tokens
QUESTION = "what is it, and what is beside it, and why are there two of them in one picture?"
MEDIA = (picture(1),)


def next_turn(plan: Plan, ids: list[int]) -> Plan:
    """The answer's very tokens, and another question."""
    return dataclasses.replace(plan, compact_ids=(*plan.compact_ids, *ids, *range(40, 60)))


async def two_turns(cluster: InProcessCluster) -> tuple[Plan, list[int]]:
    """The plan of the second, and its answer."""
    first = cluster.plan(asked(QUESTION, *MEDIA, max_tokens=24))
    second = next_turn(first, await answer(cluster, first, MEDIA))
    return second, await answer(cluster, second, MEDIA)


def num_held() -> float:
    return metrics.KV_HELD_PAGES._value.get()


@pytest.fixture(params=["pool", "mirror"])
def landing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where KV lands: in the pool itself, or as with a GPU in a mirror on the host, which has not what was decoded."""
    if request.param == "mirror":
        monkeypatch.setattr("triptych.stages.worker._is_host_memory", lambda _: False)
    return str(request.param)


@pytest.mark.parametrize(("transport", "label"), [("shm", "shm"), ("zmq-tcp", "zmq")])
async def test_a_second_turn_sends_what_decode_has_not_and_its_answer_is_the_same(
    model_dir: Path, transport: str, label: str, landing: str
) -> None:
    async with InProcessCluster(model_dir, chunk_tokens=24, kv_pool_bytes=SMALL_POOL, transport=transport) as cluster:
        held = num_held()
        plan, ids = await two_turns(cluster)
        num_before = plan.num_prompt_tokens - 20 - 1  # the last token of the answer was never computed
        assert num_held() - held == num_before // PAGE > (num_before - 24) // PAGE, "pages of the answer are among them"
        cluster.clear_caches()
        moved = moved_bytes()["kv", label]
        assert await answer(cluster, plan, MEDIA) == ids
        sent_whole = moved_bytes()["kv", label] - moved
        assert await answer(cluster, plan, MEDIA) == ids
        sent_again = moved_bytes()["kv", label] - moved - sent_whole
        num_pages = -(-plan.num_prompt_tokens // PAGE)
        assert sent_again * num_pages == sent_whole * (num_pages - (plan.num_prompt_tokens - 1) // PAGE)
        await all_is_given_back(cluster)


async def test_a_mirror_that_lands_over_what_is_held_is_seen(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole prompt is copied from the mirror, where earlier answers have never been."""
    monkeypatch.setattr("triptych.stages.worker._is_host_memory", lambda _: False)
    sound = decode.DecodeStage._adopt

    def adopt(stage: decode.DecodeStage, opened: decode.Answer, *how: object) -> None:
        sound(stage, opened, *how)  # type: ignore[arg-type]
        land, sequence = stage._parts.land_pages, opened.sequence
        assert land is not None and sequence is not None and sequence.pages is not None
        land(sequence.pages.pages)

    async with InProcessCluster(model_dir, chunk_tokens=24, kv_pool_bytes=SMALL_POOL) as cluster:
        with monkeypatch.context() as patched:
            patched.setattr(decode.DecodeStage, "_adopt", adopt)
            plan, ids = await two_turns(cluster)
        cluster.clear_caches()
        assert await answer(cluster, plan, MEDIA) != ids


async def test_another_tenants_pages_are_sent_again(epd: InProcessCluster) -> None:
    plan = epd.plan(asked(QUESTION))
    ids, held = await answer(epd, plan, ()), num_held()
    other = dataclasses.replace(plan, cache_salt=b"another tenant")
    assert await answer(epd, other, ()) == ids and num_held() == held
    assert await answer(epd, other, ()) == ids and num_held() == held + (plan.num_prompt_tokens - 1) // PAGE


async def test_what_is_held_is_given_back_whenever_the_caller_leaves(
    epd: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a grant that is not bound, with pages bound, and in the middle of the answer."""
    plan, ids = await two_turns(epd)
    await all_is_given_back(epd)

    call = calls.GenerateCall(
        epd.pipeline._channels, worker_of(epd, Role.DECODE), AttemptRef(new_request_id()), plan, timeout_s=5
    )
    await call.granted()
    assert num_locked(epd) == (plan.num_prompt_tokens - 1) // PAGE
    call.cancel()
    await all_is_given_back(epd)

    other = epd.plan(asked(QUESTION, *MEDIA, picture(2), max_tokens=24))
    with monkeypatch.context() as patched:
        patched.setattr(supply_of(epd), "get", never)
        leaving = asyncio.create_task(answer(epd, other, (*MEDIA, picture(2))))
        await eventually(lambda: pages_in(epd, "leased") > 0)
        leaving.cancel()
        await asyncio.wait([leaving])
    await all_is_given_back(epd)

    leaving = asyncio.create_task(answer(epd, dataclasses.replace(plan, sampling=long(plan)), MEDIA))
    await eventually(lambda: metrics.DECODE_RUNNING._value.get() > 0)
    leaving.cancel()
    await asyncio.wait([leaving])
    await all_is_given_back(epd)
    assert await answer(epd, plan, MEDIA) == ids


def long(plan: Plan) -> Sampling:
    return dataclasses.replace(plan.sampling, max_tokens=200)


def num_locked(cluster: InProcessCluster) -> int:
    """Cached pages at decode that somebody holds."""
    engine = next(each.language_engine for each in cluster.workers if each.ref.worker_id == "decode-0")
    assert engine is not None
    return engine.call(lambda: sum(node.locks for node in engine.manager.tree.nodes())).result(5)
