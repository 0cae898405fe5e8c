"""Answers that lose their pages after any token, to host memory or to be replayed, against `transformers`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parity.cluster_side import judged, request_of
from tests.parity.compare import Comparison
from tests.parity.conftest import Extent, is_full_run
from tests.parity.matrix import PROMPTS, PROMPTS_SEED, TOPOLOGIES
from tests.parity.prompts import Prompt, make_prompts
from tests.parity.reference import NEW_TOKENS, ReferenceModel
from tests.parity.retracting import WAYS, Forcing
from tests.seed import SEED
from triptych.core.errors import TriptychError
from triptych.engine.parking import Parking
from triptych.engine.residency import Residency
from triptych.engine.sequence import Sequence
from triptych.stages import sequences
from triptych.testing.cluster import InProcessCluster, Topology
from triptych.testing.holdings import until_idle

STEPS = range(1, NEW_TOKENS)
SAMPLED_STEPS = 5

MODELS = ("qwen2.5-vl", "qwen3-vl")
CASES = list(itertools.product(MODELS, TOPOLOGIES, WAYS))


def cases() -> list[tuple[str, str, str]]:
    """Model, topology, way. An everyday run takes each topology with each way, and each model with every second of
    these, the first of them by the seed."""
    if is_full_run():
        return CASES
    pairs = itertools.product(TOPOLOGIES, WAYS)
    return [(MODELS[(SEED + number + number // 2) % 2], *pair) for number, pair in enumerate(pairs)]


def two_prompts(extent: Extent) -> list[Prompt]:
    """One of text alone, one with pictures; others with each seed."""
    prompts = random.Random(extent.seed).sample(make_prompts(PROMPTS_SEED, PROMPTS), PROMPTS)
    return [next(p for p in prompts if not p.media), next(p for p in prompts if p.media)]


def steps_of(extent: Extent) -> list[int]:
    """Every one, or a sample with the first and the last."""
    if extent.is_full:
        return list(STEPS)
    return [STEPS[0], STEPS[-1], *random.Random(extent.seed).sample(STEPS[1:-1], SAMPLED_STEPS - 2)]


async def retracted(
    cluster: InProcessCluster, reference: ReferenceModel, prompt: Prompt, way: str, steps: list[int]
) -> Comparison:
    """The same prompt once for each of `steps`, retracted after that many tokens."""
    with pytest.MonkeyPatch.context() as patch:
        forcing = Forcing(way, steps)
        forcing.force(patch, cluster)
        results = await cluster.generate_many([request_of(prompt)] * len(steps), concurrency=8)
    assert forcing.num_forced == len(steps)
    return judged(reference, [prompt] * len(steps), results)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "topology", "way"), cases())
async def test_parity_of_answers_that_were_retracted(
    references: dict[str, ReferenceModel],
    model_dirs: dict[str, Path],
    extent: Extent,
    model: str,
    topology: Topology,
    way: str,
) -> None:
    reference, prompts = references[model], two_prompts(extent)
    for prompt in prompts:
        reference.generate(prompt)
    async with InProcessCluster(model_dirs[model], topology, chunk_tokens=48, capture_logits=True) as cluster:
        for prompt in prompts:
            total = await retracted(cluster, reference, prompt, way, steps_of(extent))
            assert total.is_exact, total
        await until_idle(cluster.workers)


# --- faults that must show --------------------------------------------------------------------------------------------


def nothing_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Parking, "_load", lambda self, parked: None)


def the_last_page_is_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Parking._load

    def lossy(self: Parking, parked: object) -> None:
        object.__setattr__(parked, "saved", parked.saved[:, :, :-1])  # type: ignore[attr-defined]
        load(self, parked)  # type: ignore[arg-type]

    monkeypatch.setattr(Parking, "_load", lossy)


def replayed_tokens_have_their_indices_for_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = sequences.with_answer
    monkeypatch.setattr(sequences, "with_answer", lambda positions, delta, count: honest(positions, 0, count))


def the_positions_after_a_replay_count_from_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    make = sequences.new_sequence

    def off(*args: object) -> Sequence:
        made = make(*args)  # type: ignore[arg-type]
        made.position_delta -= len(made.plan.answer_ids)
        return made

    for stage in ("prefill", "decode"):
        monkeypatch.setattr(f"triptych.stages.{stage}.new_sequence", off)


def a_replay_forgets_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    make = sequences.new_sequence

    def forgetful(*args: object) -> Sequence:
        made = make(*args)  # type: ignore[arg-type]
        if made.plan.answer_ids:
            made.ids[-1] = made.ids[0]
        return made

    for stage in ("prefill", "decode"):
        monkeypatch.setattr(f"triptych.stages.{stage}.new_sequence", forgetful)


def pages_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(self: Residency, sequence: Sequence) -> None:
        sequence.pages = None

    monkeypatch.setattr(Residency, "vacate", keep)


FAULTS: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (nothing_is_restored, "retract"),
    (the_last_page_is_not_restored, "retract"),
    (pages_are_lost, "retract"),
    (replayed_tokens_have_their_indices_for_positions, "retract_for_replay"),
    (the_positions_after_a_replay_count_from_the_answer, "retract_for_replay"),
    (a_replay_forgets_a_token, "retract_for_replay"),
]


def fault_cases() -> list[tuple[Callable[[pytest.MonkeyPatch], None], str, str]]:
    """Each fault in both topologies; in an everyday run in one of them, by the seed."""
    topologies = ("mono", "e-p-d")
    if is_full_run():
        return [(*fault, topology) for fault in FAULTS for topology in topologies]
    return [(*fault, topologies[(SEED + number) % 2]) for number, fault in enumerate(FAULTS)]


@pytest.mark.parametrize(("plant", "way", "topology"), fault_cases())
async def test_faults_of_retraction_show(
    references: dict[str, ReferenceModel],
    model_dirs: dict[str, Path],
    extent: Extent,
    plant: Callable[[pytest.MonkeyPatch], None],
    way: str,
    topology: Topology,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference, prompt = references["qwen2.5-vl"], two_prompts(extent)[1]
    reference.generate(prompt)
    plant(monkeypatch)
    async with InProcessCluster(model_dirs["qwen2.5-vl"], topology, chunk_tokens=48, capture_logits=True) as cluster:
        with pytest.raises((AssertionError, TriptychError)):
            await exactly_retracted(cluster, reference, prompt, way)


async def exactly_retracted(cluster: InProcessCluster, reference: ReferenceModel, prompt: Prompt, way: str) -> None:
    total = await retracted(cluster, reference, prompt, way, [3, 9, 15, 20])
    assert total.is_exact
    await until_idle(cluster.workers, 1.0)
