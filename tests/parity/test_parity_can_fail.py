"""The matrix is no formality: with a fault planted in the cluster, the same comparison fails on the random models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parity import engine_faults
from tests.parity.cluster_side import judged, request_of
from tests.parity.conftest import PROMPTS_SEED, TINY_MODELS, is_full_run
from tests.parity.prompts import Prompt, make_prompts
from tests.parity.reference import ReferenceModel
from tests.seed import SEED
from triptych.testing.cluster import InProcessCluster

Planted = Callable[[], contextlib.AbstractContextManager[None]]

# Two prompts at once where the fault is one of exchange between requests, else one after the other.
FAULTS: dict[str, tuple[Planted, int]] = {
    "pictures swapped": (engine_faults.pictures_swapped, 1),
    "embeddings reversed": (engine_faults.embeddings_reversed, 1),
    "delta dropped": (engine_faults.delta_dropped, 1),
    "keys exchanged": (lambda: engine_faults.keys_exchanged(layer=1), 2),
    "stale page": (lambda: engine_faults.stale_page(page=2), 1),
}
DEEPSTACK_FAULTS: dict[str, tuple[Planted, int]] = {
    "levels dropped": (engine_faults.levels_dropped, 1),
    "levels misplaced": (engine_faults.levels_misplaced, 1),
}


def cases() -> list[tuple[str, str]]:
    """Model and fault. An everyday run plants each fault in one model, another one with each seed."""
    own = [("qwen3-vl", fault) for fault in DEEPSTACK_FAULTS]
    if is_full_run():
        return [(model, fault) for model in TINY_MODELS for fault in FAULTS] + own
    return [(TINY_MODELS[(SEED + number) % len(TINY_MODELS)], fault) for number, fault in enumerate(FAULTS)] + own


def two_prompts() -> list[Prompt]:
    """Unlike each other, each with pictures whose order matters."""
    unlike = [p for p in make_prompts(PROMPTS_SEED, 24) if p.kind == "unrelated" and p.media != p.media[::-1]]
    return unlike[:2]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("model", "fault"), cases())
async def test_parity_comparison_catches_planted_fault(
    references: dict[str, ReferenceModel], model_dirs: dict[str, Path], model: str, fault: str
) -> None:
    plant, at_once = (FAULTS | DEEPSTACK_FAULTS)[fault]
    prompts = two_prompts()
    requests = [request_of(prompt) for prompt in prompts]
    async with InProcessCluster(model_dirs[model], "e-p-d", capture_logits=True) as cluster:
        with plant():
            results = await cluster.generate_many(requests, concurrency=at_once)
        total = judged(references[model], prompts, results)
        assert len(total.differing) > 5
        assert total.max_logit_difference > 0.1
        cluster.clear_caches()
        results = await cluster.generate_many(requests, concurrency=at_once)
        assert judged(references[model], prompts, results).is_exact
