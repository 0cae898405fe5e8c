"""Storms: whatever is evicted and taken back at every step, answers are those of transformers and nothing is left held.

Each run takes a few seeds, other ones each time; `make verify-engine` takes a thousand. A seed that fails:

    python -m scripts.verify_engine --seed N
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from tests.parity.reference import one_thread
from tests.seed import SEED
from tests.storm import camp
from tests.storm.faults import FAULTS
from tests.storm.prompts import NUM_ROOTS, Variant
from tests.storm.storm import run_camp, run_yard, truths_of
from tests.storm.truth import certain
from tests.storm.world import FAMILIES
from triptych.core.plan import Sampling
from triptych.model.sampler import SampleRow, sample

FIRST_SEED = SEED % 10_000
YARDS, CAMPS = 6, 3
MOST_SEEDS_A_FAULT = 60


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + YARDS))
def test_storm_over_one_engine(seed: int) -> None:
    report = run_yard(seed)
    assert report.compared_rows >= report.tokens > 0


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + CAMPS))
def test_storm_over_a_cluster(seed: int) -> None:
    report = run_camp(seed)
    assert report.compared_rows >= report.tokens > 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", FAULTS)
def test_storm_finds_a_planted_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On seeds that never change: how many it takes is known."""
    fault = FAULTS[name]
    monkeypatch.setattr(camp, "PATIENCE_S", 2.5)
    monkeypatch.setattr(camp, "IDLE_PATIENCE_S", 0.5)
    logging.disable(logging.CRITICAL)  # an engine that fails turn after turn tells so at length
    try:
        with fault.planted():
            found = next((seed for seed in range(MOST_SEEDS_A_FAULT) if _breaks(seed, fault.needs_camp)), None)
    finally:
        logging.disable(logging.NOTSET)
    print(f"{name}: found by seed {found}")
    assert found is not None, "no storm finds the fault"


def _breaks(seed: int, is_camp: bool) -> bool:
    try:
        run_camp(seed) if is_camp else run_yard(seed)
    except Exception:
        return True
    return False


@pytest.mark.parametrize("family", FAMILIES)
def test_storm_truth_is_what_the_stock_model_generates(family: str) -> None:
    """The truth is a loop of ours around the stock model; its own `generate` says the same."""
    truths = truths_of(family)
    for root in (SEED % NUM_ROOTS, (SEED + 7) % NUM_ROOTS):
        prompt = truths.prompt(root, Variant.BASE)
        tokens = truths.of(prompt, 0, 0).tokens
        truths._model.model.rope_deltas = None
        inputs = truths._inputs(prompt)
        with torch.inference_mode():
            out = truths._model.generate(**inputs, do_sample=False, max_new_tokens=len(tokens), eos_token_id=None)
        assert tuple(out[0, inputs["input_ids"].shape[1] :].tolist()) == tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_storm_look_alikes_are_told_apart_by_the_truth(family: str) -> None:
    """One pixel moves the logits by far more than the storms' tolerance: a swapped embedding cannot hide."""
    truths = truths_of(family)
    for root in range(SEED % 6, NUM_ROOTS, 6):
        one, other = (truths.of(truths.prompt(root, v), 0, 0) for v in (Variant.BASE, Variant.LOOK_ALIKE))
        assert abs(one.logits[0] - other.logits[0]).max() > 1e-3


def test_a_token_that_hangs_on_what_is_nearly_equal_to_the_kth_is_not_certain() -> None:
    """A top-k keeps all that equal the k-th: a rounding error more, and the others become less likely."""
    row = torch.tensor([1.0, 0.5, 0.5 - 2e-7, -5.0])
    equal = torch.tensor([1.0, 0.5, 0.5, -5.0])
    num_differing = 0
    for position in range(200):
        asked = SampleRow(Sampling(1, temperature=1.0, top_k=2, seed=7), 0, position)

        def choose(logits: torch.Tensor, asked: SampleRow = asked) -> int:
            return sample(logits[None], [asked])[0]

        if choose(row) != choose(equal):
            num_differing += 1
            assert certain(row, choose) is None
    assert num_differing > 20
