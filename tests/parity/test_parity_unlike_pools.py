"""Prefill and decode whose pages hold other numbers of tokens, or other numbers, against `transformers`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.parity.cluster_side import judged, moved_bytes, moved_since, request_of
from tests.parity.conftest import Extent
from tests.parity.matrix import prompts_of, sampled_families
from tests.parity.prompts import Prompt
from tests.parity.reference import ReferenceModel
from tests.parity.retracting import WAYS
from tests.parity.test_parity_retraction import retracted
from tests.parity.test_parity_turns import conversation, counted, opening
from tests.unlike import Differences, UnlikeCluster
from triptych.obs import metrics
from triptych.testing.holdings import until_idle
from triptych.transport import retiling

BFLOAT16_LOGITS_WITHIN = 0.75
"""A coarse judge: two ways to compute in bfloat16 are up to 0.25 apart. `test_unlike_pools.py` compares the numbers."""

PAGE_SIZES = ((16, 32), (32, 16), (16, 24), (24, 16), (5, 16))


def pages_of(prefill: int, decode: int) -> Differences:
    return {"prefill": {"page_tokens": prefill}, "ep": {"page_tokens": prefill}, "decode": {"page_tokens": decode}}


def retiled() -> float:
    return metrics.KV_CONVERTED_PAGES.labels("retiled")._value.get()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("sizes", PAGE_SIZES, ids=str)
@pytest.mark.parametrize("transport", ["shm", "zmq"])
async def test_parity_of_pools_whose_pages_differ(
    references: dict[str, ReferenceModel],
    model_dirs: dict[str, Path],
    extent: Extent,
    sizes: tuple[int, int],
    transport: str,
) -> None:
    rng = random.Random(f"{extent.seed}/{sizes}/{transport}")
    model = rng.choice(["qwen2-vl", "qwen2.5-vl", "qwen3-vl", "demo"])
    topology, chunk_tokens = rng.choice(["e-p-d", "p-d"]), rng.choice([16, 40, 512])
    prompts = prompts_of(sampled_families(rng.randrange(2**32), 1))
    reference = references[model]
    for prompt in prompts:
        reference.generate(prompt)
    print(f"{model}/{topology}/{transport}/chunk-{chunk_tokens}, {sizes[0]} tokens to {sizes[1]}")
    moved, before = moved_bytes(), retiled()
    async with UnlikeCluster(
        model_dirs[model],
        topology,
        pages_of(*sizes),
        transport=transport,
        chunk_tokens=chunk_tokens,
        capture_logits=True,
        kv_pool_bytes=8 << 20,
    ) as cluster:
        results = await cluster.generate_many([request_of(prompt) for prompt in prompts * 2], concurrency=4)
        await until_idle(cluster.workers)
        cluster.check_integrity()
    assert judged(reference, prompts * 2, results).is_exact
    assert moved_since(moved)[f"kv over {transport}"] > 0 and retiled() > before


@pytest.mark.timeout(120)
@pytest.mark.parametrize("sizes", [(16, 24), (32, 8)], ids=str)
async def test_parity_of_turns_held_in_pages_of_another_size(
    references: dict[str, ReferenceModel], model_dirs: dict[str, Path], extent: Extent, sizes: tuple[int, int]
) -> None:
    """Whole pages of decode's are not sent again, wherever they end in prefill's."""
    reference = references["qwen2.5-vl"]
    async with UnlikeCluster(
        model_dirs["qwen2.5-vl"], "e-p-d", pages_of(*sizes), chunk_tokens=48, capture_logits=True
    ) as cluster:
        held, totals = counted()[0], []
        moved = moved_bytes()
        prompts, results = await conversation(cluster, reference, opening(extent))
        num_held = counted()[0] - held
        totals.append(moved_since(moved)["kv over shm"])
        assert judged(reference, prompts, results).is_exact
        await until_idle(cluster.workers)
        moved = moved_bytes()
        for prompt, result in zip(prompts, results, strict=True):
            cluster.clear_caches()
            assert (await cluster.generate(request_of(prompt))).token_ids == result.token_ids
        totals.append(moved_since(moved)["kv over shm"])
        await until_idle(cluster.workers)
    kv = cluster.adapter.kv_shape
    page_bytes = 2 * kv.num_layers * kv.num_kv_heads * kv.head_dim * sizes[1] * 4
    assert num_held > 0 and totals[1] - totals[0] == num_held * page_bytes


@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", WAYS)
async def test_parity_of_answers_that_lose_pages_of_another_size(
    references: dict[str, ReferenceModel], model_dirs: dict[str, Path], extent: Extent, way: str
) -> None:
    """A replay sends prompt and answer so far, wherever that ends; what was held meanwhile may be gone."""
    reference, prompt = references["qwen3-vl"], opening(extent)
    async with UnlikeCluster(
        model_dirs["qwen3-vl"], "p-d", pages_of(16, 24), chunk_tokens=48, capture_logits=True
    ) as cluster:
        total = await retracted(cluster, reference, prompt, way, [1, 9, 20, 31])
        assert total.is_exact, total
        await until_idle(cluster.workers)


def widened_logits(reference: ReferenceModel, prompt: Prompt, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """What stock models say along `tokens`: one in bfloat16 reads the prompt, one in float32 goes on from its KV."""
    kind, inputs = type(reference.model), reference.inputs(prompt)
    narrow = kind.from_pretrained(reference.model_dir, dtype=torch.bfloat16).eval()
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].to(torch.bfloat16)
    with torch.inference_mode():
        prefilled = narrow(**inputs, use_cache=True)
        for layer in prefilled.cache.layers:
            layer.keys, layer.values = layer.keys.float(), layer.values.float()
        reference.model.model.rope_deltas = narrow.model.rope_deltas
        forced = torch.tensor([list(tokens[:-1])])
        answered = reference.model(input_ids=forced, cache=prefilled.cache, use_cache=True).logits[0]
    return torch.cat([prefilled.logits[0, -1:].float(), answered]).numpy()


@pytest.mark.timeout(120)
async def test_what_bfloat16_computed_goes_on_in_float32(
    references: dict[str, ReferenceModel], model_dirs: dict[str, Path], extent: Extent
) -> None:
    """Within what bfloat16 leaves open: its rounding depends on the order of sums."""
    reference, prompts = references["demo"], prompts_of(sampled_families(extent.seed, 1))
    widened = {"ep": {"dtype": "bfloat16", "page_tokens": 24}}
    async with UnlikeCluster(model_dirs["demo"], "p-d", widened, chunk_tokens=48, capture_logits=True) as cluster:
        results = await cluster.generate_many([request_of(prompt) for prompt in prompts])
    for prompt, result in zip(prompts, results, strict=True):
        truth = widened_logits(reference, prompt, result.token_ids)
        distance = float(np.abs(truth - result.logits).max())
        taken = truth[np.arange(len(truth)), result.token_ids]
        print(f"prompt {prompt.index}: {distance:.3f} apart, {float((truth.max(-1) - taken).max()):.3f} below the best")
        assert distance < BFLOAT16_LOGITS_WITHIN and (truth.max(-1) - taken < BFLOAT16_LOGITS_WITHIN).all()


# --- faults that must show --------------------------------------------------------------------------------------------


@contextmanager
def tokens_are_taken_from_one_page_behind() -> Iterator[None]:
    """How many are ready stays right: a commit of another size would be refused before anybody compares tokens."""
    sound = retiling.RetiledPages.gather_cells

    def gather(pages: retiling.RetiledPages, wanted: Sequence[int]) -> torch.Tensor:
        shift = pages.layout.format.page_tokens
        pages._first += shift
        try:
            return sound(pages, wanted)
        finally:
            pages._first -= shift

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retiling.RetiledPages, "gather_cells", gather)
        yield


@pytest.mark.timeout(120)
async def test_parity_catches_tokens_in_the_wrong_page(
    references: dict[str, ReferenceModel], model_dirs: dict[str, Path], extent: Extent
) -> None:
    reference = references["demo"]
    prompts = [opening(extent)]
    with tokens_are_taken_from_one_page_behind():
        async with UnlikeCluster(
            model_dirs["demo"], "p-d", pages_of(16, 4), chunk_tokens=48, capture_logits=True
        ) as cluster:
            results = await cluster.generate_many([request_of(prompt) for prompt in prompts])
    assert not judged(reference, prompts, results).is_exact
