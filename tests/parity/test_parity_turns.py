"""Conversations of several turns, whose earlier pages decode holds and is not sent again, against `transformers`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.parity.cluster_side import judged, moved_bytes, moved_since, request_of
from tests.parity.conftest import Extent
from tests.parity.matrix import PROMPTS, PROMPTS_SEED
from tests.parity.prompts import Prompt, make_prompts
from tests.parity.reference import ReferenceModel
from triptych.engine import handoff, loop
from triptych.engine.sequence import Sequence
from triptych.kv.manager import CacheManager
from triptych.obs import metrics
from triptych.stages.settings import LanguageSettings
from triptych.testing.cluster import ChatResult, InProcessCluster
from triptych.testing.holdings import until_idle

FOLLOW_UPS = ("and what is beside it?", "why is that so?")


def opening(extent: Extent) -> Prompt:
    """One with pictures, another one with each seed; the first turn of what follows."""
    with_pictures = [prompt for prompt in make_prompts(PROMPTS_SEED, PROMPTS) if prompt.media]
    return with_pictures[extent.seed % len(with_pictures)]


async def conversation(
    cluster: InProcessCluster, reference: ReferenceModel, prompt: Prompt
) -> tuple[list[Prompt], list[ChatResult]]:
    """Each turn's prompt holds the answer to the one before, as a client would send it: as text."""
    prompts, results = [prompt], [await cluster.generate(request_of(prompt))]
    for question in FOLLOW_UPS:
        said = reference.tokenizer.decode(results[-1].token_ids, skip_special_tokens=True)
        asked = {"role": "user", "content": [{"type": "text", "text": question}]}
        await router_has_heard(cluster)
        messages = (*prompts[-1].messages, {"role": "assistant", "content": said}, asked)
        prompts.append(replace(prompts[-1], kind="next turn", messages=messages))
        results.append(await cluster.generate(request_of(prompts[-1])))
    return prompts, results


async def router_has_heard(cluster: InProcessCluster) -> None:
    """That workers are idle again: who seems full is not asked, whatever it holds, and the pools are small here."""
    await until_idle(cluster.workers)
    index = cluster.pipeline.routing.index
    async with asyncio.timeout(20):
        for worker in cluster.workers:
            engine = worker.language_engine
            while engine is not None and (  # noqa: ASYNC110
                (load := index.load(worker.ref)) is None or load.free_pages != engine.manager.num_available
            ):
                await asyncio.sleep(0.01)


def counted() -> tuple[float, float]:
    """Pages that were not sent, and turns that were served where their conversation was."""
    return metrics.KV_HELD_PAGES._value.get(), metrics.FOLLOW_UP_TURNS.labels("home")._value.get()


@pytest.fixture(params=["pool", "mirror"])
def landing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where KV lands: in the pool itself, or as with a GPU in a mirror on the host, which has not what was decoded."""
    if request.param == "mirror":
        monkeypatch.setattr("triptych.stages.worker._is_host_memory", lambda _: False)
    return str(request.param)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("model", ["qwen2.5-vl", "demo"])
async def test_parity_of_a_conversation_whose_pages_stay_at_decode(
    references: dict[str, ReferenceModel], model_dirs: dict[str, Path], extent: Extent, model: str, landing: str
) -> None:
    reference = references[model]
    async with InProcessCluster(
        model_dirs[model], chunk_tokens=48, capture_logits=True, num_prefills=2, num_decodes=2
    ) as cluster:
        held, at_home = counted()
        moved, totals = moved_bytes(), []
        prompts, results = await conversation(cluster, reference, opening(extent))
        num_held = counted()[0] - held
        totals.append(moved_since(moved)["kv over shm"])
        assert judged(reference, prompts, results).is_exact
        assert counted()[1] - at_home == len(FOLLOW_UPS), "both went where the turn before them had been"
        await until_idle(cluster.workers)
        moved = moved_bytes()
        for prompt, result in zip(prompts, results, strict=True):
            cluster.clear_caches()
            assert (await cluster.generate(request_of(prompt))).token_ids == result.token_ids
        totals.append(moved_since(moved)["kv over shm"])
        await until_idle(cluster.workers)
    kv = cluster.adapter.kv_shape
    page_bytes = 2 * kv.num_layers * kv.num_kv_heads * kv.head_dim * LanguageSettings.page_tokens * 4
    assert totals[1] - totals[0] == num_held * page_bytes
    assert num_held > 0
    print(f"{model}: {totals[0]} bytes of KV moved in three turns, {totals[1]} with nothing held")


# --- faults that must show --------------------------------------------------------------------------------------------


@contextmanager
def pages_are_sent_from_the_beginning() -> Iterator[None]:
    """The grant's pages are filled with as many of the prompt's first ones."""

    def push(sequence: Sequence, manager: CacheManager) -> int:
        shift, pages = sequence.num_held_pages, sequence.pages
        if pages is None or not shift:
            return sound(sequence, manager)
        rows, pages.pages = pages.pages, pages.pages[-shift:] + pages.pages[:-shift]
        try:
            return sound(sequence, manager)
        finally:
            pages.pages = rows

    sound = handoff.push_pages
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "push_pages", push)
        yield


@pytest.mark.timeout(120)
async def test_parity_of_turns_catches_pages_in_the_wrong_place(
    references: dict[str, ReferenceModel], model_dirs: dict[str, Path], extent: Extent
) -> None:
    reference = references["demo"]
    with pages_are_sent_from_the_beginning():
        async with InProcessCluster(model_dirs["demo"], chunk_tokens=48, capture_logits=True) as cluster:
            prompts, results = await conversation(cluster, reference, opening(extent))
    assert not judged(reference, prompts, results).is_exact
