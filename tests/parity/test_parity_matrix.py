"""The cluster against the reference, over models, topologies, transports, caches, concurrency and chunk sizes.

Each combo starts one cluster; *cold* asks its prompts with empty caches, *warm* asks them again. `make verify-parity`
runs every combo and writes `benchmarks/results/parity.json`; `make test` runs a few, other ones each time.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parity.cluster_side import cache_facts, expected_ways, judged, moved_bytes, moved_since, request_of
from tests.parity.conftest import Extent, is_full_run
from tests.parity.matrix import (
    HEATS,
    SAMPLED_FAMILIES,
    TOPOLOGIES,
    Combo,
    Shard,
    prompts_of,
    sampled_combos,
    sampled_families,
)
from tests.parity.reference import ReferenceModel
from tests.parity.report import MatrixReport
from tests.seed import SEED
from triptych.testing.cluster import InProcessCluster, Topology

SAMPLE_BYTES = 32 << 20
ROOMY_BYTES = 96 << 20
"""Holds all prompts of a combo, so that a warm cell is warm."""

TIGHT_BYTES = 800_000
"""About 65 pages of a tiny model: three or four prompts at a time, and hardly anything stays cached."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "combo" in metafunc.fixturenames:
        combos = Shard.from_environment().combos() if is_full_run() else sampled_combos(SEED)
        metafunc.parametrize("combo", combos, ids=[combo.name for combo in combos])


@pytest.fixture(scope="module")
def report() -> Iterator[MatrixReport]:
    """A full run leaves its cells where `TRIPTYCH_PARITY_OUT` says."""
    collected = MatrixReport()
    yield collected
    if is_full_run():
        collected.write_part(Path(os.environ["TRIPTYCH_PARITY_OUT"]))


@pytest.mark.timeout(900)
async def test_parity_matrix(
    references: dict[str, ReferenceModel],
    model_dirs: dict[str, Path],
    extent: Extent,
    report: MatrixReport,
    combo: Combo,
) -> None:
    rng = random.Random(f"{extent.seed}/{combo.name}")
    families = combo.families if extent.is_full else sampled_families(extent.seed, SAMPLED_FAMILIES)
    prompts = prompts_of(families)
    reference = references[combo.model]
    for prompt in prompts:
        reference.generate(prompt)  # before any clock of the cluster runs
    async with InProcessCluster(
        model_dirs[combo.model],
        combo.topology,
        transport=combo.transport,
        chunk_tokens=combo.chunk_tokens,
        capture_logits=True,
        dtype="float32",
        kv_pool_bytes=ROOMY_BYTES if extent.is_full else SAMPLE_BYTES,
    ) as cluster:
        before = moved_bytes()
        for heat in HEATS:
            rng.shuffle(prompts)
            requests = [request_of(prompt) for prompt in prompts]
            results = await cluster.generate_many(requests, concurrency=combo.concurrency)
            total, facts = judged(reference, prompts, results), cache_facts(results)
            report.add(f"{combo.name}/{heat}", total, facts)
            print(f"{combo.name}/{heat}: {total} {facts}")
            assert total.is_exact, total
            assert total.has_few_ties or not extent.is_full, total
            if heat == "warm":
                assert facts["prompts_with_cached_tokens"] == len(prompts)
        moved = moved_since(before)
        assert set(moved) == expected_ways(combo.topology, combo.transport), moved
        cluster.check_integrity()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_parity_in_a_tight_pool(
    references: dict[str, ReferenceModel], model_dirs: dict[str, Path], extent: Extent, topology: Topology
) -> None:
    """Eviction, waiting for room and pages that change hands all the time change no answer."""
    reference = references["qwen2.5-vl"]
    prompts = prompts_of(sampled_families(extent.seed, 10 if extent.is_full else 3))
    for prompt in prompts:
        reference.generate(prompt)
    async with InProcessCluster(
        model_dirs["qwen2.5-vl"], topology, chunk_tokens=48, capture_logits=True, kv_pool_bytes=TIGHT_BYTES
    ) as cluster:
        results = await cluster.generate_many([request_of(prompt) for prompt in prompts * 2], concurrency=8)
        total = judged(reference, prompts * 2, results)
        cluster.check_integrity()
    print(f"tight {topology}: {total} {cache_facts(results)}")
    assert total.is_exact, total
