"""The random checkpoint is worth comparing with: its answers react to faults, and none of this needs our code."""

from __future__ import annotations

import numpy as np
import pytest

from tests.parity import stock_faults
from tests.parity.compare import LOGITS_WITHIN, TIES_AT_MOST
from tests.parity.conftest import PROMPTS, PROMPTS_SEED, Extent
from tests.parity.prompts import Prompt, make_prompts
from tests.parity.reference import ReferenceModel
from tests.parity.stock_faults import Fault

FAMILIES = 3
CHANGED_AT_LEAST = 0.9


def has_pictures(prompt: Prompt) -> bool:
    return bool(prompt.media)


def has_pictures_to_swap(prompt: Prompt) -> bool:
    return prompt.media != prompt.media[::-1]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("fault", "applies"),
    [
        (stock_faults.pictures_swapped, has_pictures_to_swap),
        (stock_faults.embeddings_reversed, has_pictures),
        (stock_faults.delta_dropped, has_pictures),
        (stock_faults.height_and_width_exchanged, has_pictures),
    ],
    ids=lambda value: value.__name__,
)
def test_parity_checkpoint_is_a_witness(
    references: dict[str, ReferenceModel], extent: Extent, fault: Fault, applies: stock_faults.Applies
) -> None:
    """Each fault changes at least 90% of the outputs on prompts that it can touch."""
    tiny = references["tiny"]
    prompts = [prompt for prompt in extent.prompts(FAMILIES) if applies(prompt)]
    sound = [tiny.generate(prompt).tokens for prompt in prompts]
    with fault(tiny):
        faulty = [tiny.generate_now(prompt).tokens for prompt in prompts]
    changed = sum(a != b for a, b in zip(sound, faulty, strict=True))
    print(f"{fault.__name__}: {changed} of {len(prompts)} outputs changed")
    assert changed >= CHANGED_AT_LEAST * len(prompts)
    assert prompts


@pytest.mark.timeout(900)
def test_parity_checkpoint_speaks_clearly(references: dict[str, ReferenceModel]) -> None:
    """No loops that would hide a fault, few near-ties that would excuse one.

    Of all prompts, since near-ties come in clusters: a sample may hold most of them.
    """
    outputs = [references["tiny"].generate(prompt) for prompt in make_prompts(PROMPTS_SEED, PROMPTS)]
    logits = np.sort(np.concatenate([output.logits for output in outputs]), axis=-1)
    margins = logits[:, -1] - logits[:, -2]
    assert np.mean([len(set(output.tokens)) for output in outputs]) >= 12
    assert np.mean(margins > 1e-3) >= 0.98
    assert np.mean(margins <= 1e-4) <= TIES_AT_MOST


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", ["tiny", "demo"])
def test_parity_reference_agrees_with_itself(references: dict[str, ReferenceModel], extent: Extent, model: str) -> None:
    """One step at a time and all at once stay within what we are held to: rounding alone is no excuse."""
    for prompt in extent.prompts(1)[:16]:
        output = references[model].generate(prompt)
        forced = references[model].teacher_forced_logits(prompt, output.tokens)
        assert np.abs(forced - output.logits).max() <= LOGITS_WITHIN


def test_parity_reference_keeps_and_finds_its_outputs(references: dict[str, ReferenceModel], extent: Extent) -> None:
    prompt = extent.prompts(1)[0]
    first, again = references["tiny"].generate(prompt), references["tiny"].generate(prompt)
    fresh = references["tiny"].generate_now(prompt)
    assert first.tokens == again.tokens == fresh.tokens
    assert np.array_equal(first.logits, again.logits)
    assert np.abs(first.logits - fresh.logits).max() <= 1e-5
