"""The random checkpoints are worth comparing with: their answers react to faults, and none of this needs our code."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.parity import stock_faults
from tests.parity.checkpoints import DEFAULT_SEED, make_tiny
from tests.parity.compare import LOGITS_WITHIN, TIES_AT_MOST
from tests.parity.conftest import MODELS, PROMPTS, PROMPTS_SEED, TINY_MODELS, Extent, is_full_run
from tests.parity.prompts import Prompt, make_prompts
from tests.parity.reference import ReferenceModel
from tests.parity.stock_faults import Fault
from tests.seed import rotating

FAMILIES = 3
CHANGED_AT_LEAST = 0.9


def has_pictures(prompt: Prompt) -> bool:
    return bool(prompt.media)


def has_pictures_to_swap(prompt: Prompt) -> bool:
    return prompt.media != prompt.media[::-1]


Case = tuple[Fault, stock_faults.Applies]

EVERY_FAMILY: tuple[Case, ...] = (
    (stock_faults.pictures_swapped, has_pictures_to_swap),
    (stock_faults.embeddings_reversed, has_pictures),
    (stock_faults.delta_dropped, has_pictures),
    (stock_faults.height_and_width_exchanged, has_pictures),
)
DEEPSTACK: tuple[Case, ...] = ((stock_faults.levels_dropped, has_pictures), (stock_faults.levels_swapped, has_pictures))
CASES = [(model, *case) for model in TINY_MODELS for case in EVERY_FAMILY]
CASES += [("qwen3-vl", *case) for case in DEEPSTACK]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("model", "fault", "applies"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_parity_checkpoint_is_a_witness(
    references: dict[str, ReferenceModel], extent: Extent, model: str, fault: Fault, applies: stock_faults.Applies
) -> None:
    """Each fault changes at least 90% of the outputs on prompts that it can touch."""
    tiny = references[model]
    prompts = [prompt for prompt in extent.prompts(FAMILIES) if applies(prompt)]
    sound = [tiny.generate(prompt).tokens for prompt in prompts]
    with fault(tiny):
        faulty = [tiny.generate_now(prompt).tokens for prompt in prompts]
    changed = sum(a != b for a, b in zip(sound, faulty, strict=True))
    print(f"{model}, {fault.__name__}: {changed} of {len(prompts)} outputs changed")
    assert changed >= CHANGED_AT_LEAST * len(prompts)
    assert prompts


@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", TINY_MODELS if is_full_run() else rotating(TINY_MODELS))
def test_parity_checkpoint_speaks_clearly(references: dict[str, ReferenceModel], model: str) -> None:
    """No loops that would hide a fault, few near-ties that would excuse one.

    Of all prompts, since near-ties come in clusters: a sample may hold most of them. So a run takes one model instead,
    another one with each seed; the weights of all are held by their digests below.
    """
    outputs = [references[model].generate(prompt) for prompt in make_prompts(PROMPTS_SEED, PROMPTS)]
    logits = np.sort(np.concatenate([output.logits for output in outputs]), axis=-1)
    margins = logits[:, -1] - logits[:, -2]
    variety = np.mean([len(set(output.tokens)) for output in outputs])
    print(f"{model}: {variety:.1f} different tokens an output, {np.mean(margins <= 1e-4):.3%} ties")
    assert variety >= 12
    assert np.mean(margins > 1e-3) >= 0.98
    assert np.mean(margins <= 1e-4) <= TIES_AT_MOST


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", MODELS)
def test_parity_reference_agrees_with_itself(references: dict[str, ReferenceModel], extent: Extent, model: str) -> None:
    """One step at a time and all at once stay within what we are held to: rounding alone is no excuse."""
    for prompt in extent.prompts(1)[:16]:
        output = references[model].generate(prompt)
        forced = references[model].teacher_forced_logits(prompt, output.tokens)
        assert np.abs(forced - output.logits).max() <= LOGITS_WITHIN


@pytest.mark.parametrize("model", TINY_MODELS)
def test_parity_reference_keeps_and_finds_its_outputs(
    references: dict[str, ReferenceModel], extent: Extent, model: str
) -> None:
    reference, prompt = references[model], extent.prompts(1)[0]
    first, again = reference.generate(prompt), reference.generate(prompt)
    fresh = reference.generate_now(prompt)
    assert first.tokens == again.tokens == fresh.tokens
    assert np.array_equal(first.logits, again.logits)
    assert np.abs(first.logits - fresh.logits).max() <= 1e-5


@pytest.mark.parametrize("family", TINY_MODELS)
def test_parity_checkpoint_is_the_same_each_time(model_dirs: dict[str, Path], tmp_path: Path, family: str) -> None:
    """And others have others: a seed that were ignored would make every checkpoint one."""
    again, other = (make_tiny(family, tmp_path / str(seed), seed) for seed in (DEFAULT_SEED, DEFAULT_SEED + 1))
    weights = [(path / "model.safetensors").read_bytes() for path in (model_dirs[family], again, other)]
    assert weights[0] == weights[1] != weights[2]


# What one machine made; another with other vector units, or another version of numpy, has to make the same.
WEIGHTS = {
    "qwen2-vl": "8326e1cea69264c079399f467529e933",
    "qwen2.5-vl": "012674fec87c554a0f3f02694c435473",
    "qwen3-vl": "66de607dc4b5ecbc178d08c932e2d37b",
}


@pytest.mark.parametrize("family", TINY_MODELS)
def test_parity_checkpoint_is_the_same_on_every_machine(model_dirs: dict[str, Path], family: str) -> None:
    tensors, digest = load_file(model_dirs[family] / "model.safetensors"), hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].numpy().tobytes())
    assert digest.hexdigest()[:32] == WEIGHTS[family]
