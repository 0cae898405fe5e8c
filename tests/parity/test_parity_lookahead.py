"""The real model behind a runner that looks ahead: the engine launches step k+1 while step k computes on a thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parity.cluster_side import judged, request_of
from tests.parity.conftest import Extent
from tests.parity.matrix import prompts_of, sampled_families
from tests.parity.reference import ReferenceModel
from triptych.model.runner import LanguageRunner
from triptych.stages import language
from triptych.testing.async_runner import ThreadedFlight, ThreadedRunner
from triptych.testing.cluster import InProcessCluster, Topology


@pytest.mark.timeout(600)
@pytest.mark.parametrize("topology", ["mono", "e-p-d"])
async def test_parity_of_a_runner_that_looks_ahead(
    references: dict[str, ReferenceModel],
    model_dirs: dict[str, Path],
    extent: Extent,
    topology: Topology,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = references["qwen2.5-vl"]
    prompts = prompts_of(sampled_families(extent.seed, 10 if extent.is_full else 2))
    for prompt in prompts:
        reference.generate(prompt)
    runners: list[Counting] = []

    def looking_ahead(*args: Any) -> Counting:
        runners.append(Counting(LanguageRunner(*args)))
        return runners[-1]

    monkeypatch.setattr(language, "LanguageRunner", looking_ahead)
    async with InProcessCluster(model_dirs["qwen2.5-vl"], topology, chunk_tokens=48, capture_logits=True) as cluster:
        results = await cluster.generate_many([request_of(prompt) for prompt in prompts], concurrency=8)
        total = judged(reference, prompts, results)
        cluster.check_integrity()
    for runner in runners:
        runner.close()
    print(f"looking ahead {topology}: {total}")
    assert total.is_exact, total
    assert max(runner.num_followers for runner in runners) > len(prompts), "nothing was run ahead"


class Counting(ThreadedRunner):
    """Counts the slices that were launched before their id was known."""

    num_followers = 0

    def launch(self, slices: Any) -> ThreadedFlight:
        self.num_followers += sum(piece.follows is not None for piece in slices)
        return super().launch(slices)
