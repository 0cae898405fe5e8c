"""The cluster against the reference: {a tiny model of each family, demo} x {mono, e-p-d} x {cold, warm} x {alone, 8 at
a time}.

Each group starts one cluster; *cold* asks all its prompts with empty caches, *warm* asks them again. `make
verify-parity` asks 200 prompts a cell and writes `benchmarks/results/parity.json`; `make test` asks a few families,
other ones each time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parity.cluster_side import cache_facts, judged, request_of
from tests.parity.conftest import MODELS, PROMPTS_SEED, Extent
from tests.parity.reference import ReferenceModel
from tests.parity.report import MatrixReport
from triptych.core.topology import TOPOLOGIES
from triptych.testing.cluster import InProcessCluster, Topology

FAMILIES = 2
CHUNKS = (48, 512)
SAMPLE_BYTES = 32 << 20
ROOMY_BYTES = 256 << 20
"""Holds all 200 prompts of either model, so that a warm cell is warm."""

TIGHT_BYTES = 800_000
"""About 65 pages of the tiny Qwen2.5-VL: three or four prompts at a time, and hardly anything stays cached."""


@pytest.fixture(scope="module")
def report(extent: Extent) -> Iterator[MatrixReport]:
    collected = MatrixReport(PROMPTS_SEED)
    yield collected
    if extent.is_full:
        collected.write()


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("concurrency", [1, 8], ids=["alone", "8-at-a-time"])
@pytest.mark.parametrize("topology", ["mono", "e-p-d"])
@pytest.mark.parametrize("model", MODELS)
async def test_parity_matrix(
    references: dict[str, ReferenceModel],
    model_dirs: dict[str, Path],
    extent: Extent,
    report: MatrixReport,
    model: str,
    topology: Topology,
    concurrency: int,
) -> None:
    rng = random.Random(f"{extent.seed}/{model}/{topology}/{concurrency}")
    prompts, chunk_tokens = extent.prompts(FAMILIES), rng.choice(CHUNKS)
    reference = references[model]
    for prompt in prompts:
        reference.generate(prompt)  # before any clock of the cluster runs
    async with InProcessCluster(
        model_dirs[model],
        topology,
        chunk_tokens=chunk_tokens,
        capture_logits=True,
        dtype="float32",
        kv_pool_bytes=ROOMY_BYTES if extent.is_full else SAMPLE_BYTES,
    ) as cluster:
        for heat in ("cold", "warm"):
            rng.shuffle(prompts)
            results = await cluster.generate_many([request_of(prompt) for prompt in prompts], concurrency=concurrency)
            cell = f"{model}/{topology}/{heat}/{'alone' if concurrency == 1 else f'{concurrency} at a time'}"
            total = judged(reference, prompts, results)
            facts = {"chunk_tokens": chunk_tokens, **cache_facts(results)}
            report.add(cell, total, facts)
            print(f"{cell}: {total} {facts}")
            assert total.is_exact, f"{cell}: {total}"
            assert total.has_few_ties or not extent.is_full, f"{cell}: {total}"
            if heat == "warm":
                assert facts["prompts_with_cached_tokens"] == len(prompts)
        cluster.check_integrity()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("topology", [*TOPOLOGIES, "e-p-d+mono", "e-pd+p-d"])
async def test_parity_in_a_tight_pool(
    references: dict[str, ReferenceModel], model_dirs: dict[str, Path], extent: Extent, topology: Topology
) -> None:
    """Eviction, waiting for room and pages that change hands all the time change no answer."""
    prompts = extent.prompts(3)[:40]
    for prompt in prompts:
        references["qwen2.5-vl"].generate(prompt)
    async with InProcessCluster(
        model_dirs["qwen2.5-vl"], topology, chunk_tokens=48, capture_logits=True, kv_pool_bytes=TIGHT_BYTES
    ) as cluster:
        results = await cluster.generate_many([request_of(prompt) for prompt in prompts * 2], concurrency=8)
        total = judged(references["qwen2.5-vl"], prompts * 2, results)
        cluster.check_integrity()
    print(f"tight {topology}: {total} {cache_facts(results)}")
    assert total.is_exact, total
