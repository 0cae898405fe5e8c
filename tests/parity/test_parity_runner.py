"""The model's two halves against the reference, below the engine: random chunks, random batch mixes, scattered pages.

What fails here is mathematics (positions, scatter, attention over pages); what fails only in the matrix is logistics.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.parity.compare import Comparison, compare
from tests.parity.conftest import MODELS, TINY_MODELS, Extent
from tests.parity.prompts import Prompt, make_prompts
from tests.parity.reference import NEW_TOKENS, ReferenceModel
from triptych.core.plan import Grid, Item, Modality, Sampling, TokenRange
from triptych.mm.sentinels import item_sentinels
from triptych.model.adapters.base import Adapter
from triptych.model.parts import VisionPart
from triptych.model.registry import adapter_for
from triptych.model.runner import EmbeddingSpan, LanguageRunner, RunSlice
from triptych.model.sampler import SampleRow

PAGE_TOKENS = 16
NUM_PAGES = 256
AT_ONCE = 4
GREEDY = Sampling(max_tokens=NEW_TOKENS)


@dataclass(slots=True)
class Row:
    """One sequence on its way: what it is made of, and what it has said."""

    prompt: Prompt
    ids: list[int]
    positions: np.ndarray
    delta: int
    items: list[Item]
    embeddings: list[torch.Tensor]
    pages: list[int]
    num_prompt: int
    computed: int = 0
    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


def start(prompt: Prompt, reference: ReferenceModel, adapter: Adapter, vision: VisionPart, free: list[int]) -> Row:
    ids = reference.inputs(prompt)["input_ids"][0].tolist()
    pixels, grids = zip(*(vision.preprocess(p) for p in prompt.pictures), strict=True) if prompt.media else ((), ())
    embeddings = vision.encode(pixels, grids) if prompt.media else []
    items = make_items(ids, reference.image_token_id, grids)
    for item in items:
        ids[item.offset : item.end] = item_sentinels(item.identity, item.num_tokens).tolist()
    positions, delta = adapter.positions(len(ids), items)
    num_pages = -(-(len(ids) + NEW_TOKENS) // PAGE_TOKENS)
    return Row(prompt, ids, positions, delta, items, embeddings, [free.pop() for _ in range(num_pages)], len(ids))


def make_items(ids: list[int], placeholder: int, grids: tuple[Grid, ...]) -> list[Item]:
    runs = [list(run) for key, run in itertools.groupby(range(len(ids)), lambda i: ids[i] == placeholder) if key]
    return [
        Item(Modality.IMAGE, bytes([n]) * 32, len(run), (TokenRange(0, run[0], len(run)),), grid)
        for n, (run, grid) in enumerate(zip(runs, grids, strict=True))
    ]


def next_slice(row: Row, rng: random.Random) -> RunSlice:
    begin = row.computed
    end = begin + 1 if begin >= row.num_prompt else min(row.num_prompt, begin + rng.choice((1, 7, 16, 33, 500)))
    positions = row.positions[:, begin:end]
    if begin >= row.num_prompt:
        positions = np.full((3, 1), begin + row.delta, dtype=np.int64)
    spans = []
    for item, rows in zip(row.items, row.embeddings, strict=True):
        low, high = max(begin, item.offset), min(end, item.end)
        if low < high:
            spans.append(EmbeddingSpan(low - begin, rows[low - item.offset : high - item.offset]))
    wanted = SampleRow(GREEDY, 0, end) if end >= row.num_prompt else None
    return RunSlice(np.array(row.ids[begin:end]), positions, row.pages, begin, tuple(spans), wanted)


def step(runner: LanguageRunner, rows: list[Row], rng: random.Random) -> None:
    slices = [next_slice(row, rng) for row in rows]
    out = runner.run(slices)
    sampled = iter([] if out.logits is None else list(out.logits))
    for row, piece, token in zip(rows, slices, out.token_ids, strict=True):
        row.computed += len(piece.ids)
        if token is not None:
            row.ids.append(token)
            row.tokens.append(token)
            row.logits.append(next(sampled))


def run_all(reference: ReferenceModel, adapter: Adapter, prompts: list[Prompt], rng: random.Random) -> Comparison:
    """All prompts through both halves, a few at a time."""
    vision = adapter.load_vision(torch.float32, torch.device("cpu"))
    part = adapter.load_language(torch.float32, torch.device("cpu"))
    shape = adapter.kv_shape
    pool = torch.zeros(shape.num_layers, 2, NUM_PAGES, shape.num_kv_heads, PAGE_TOKENS, shape.head_dim)
    runner = LanguageRunner(part, pool, PAGE_TOKENS, adapter.lookup_id)
    free = list(range(1, NUM_PAGES))
    rng.shuffle(free)
    waiting, running, total = list(prompts), list[Row](), Comparison()
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            running.append(start(waiting.pop(), reference, adapter, vision, free))
        step(runner, running, rng)
        for row in [row for row in running if len(row.tokens) == NEW_TOKENS]:
            running.remove(row)
            free += row.pages
            total.add(judged(reference, row))
    assert not pool[:, :, 0].any(), "the reserved page was written"
    return total


@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", MODELS)
def test_parity_runner_in_random_chunks_and_mixes(
    references: dict[str, ReferenceModel], model_dirs: dict[str, Path], extent: Extent, model: str
) -> None:
    prompts = extent.prompts(2)
    total = run_all(references[model], adapter_for(model_dirs[model]), prompts, random.Random(extent.seed))
    print(f"{model}: {total}")
    assert total.outputs == len(prompts)
    assert total.is_exact, total


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rope", [{"rope_type": "yarn", "factor": 2.0}, {"rope_type": "linear", "factor": 3.0}])
@pytest.mark.parametrize("model", TINY_MODELS)
def test_parity_runner_with_stretched_positions(
    references: dict[str, ReferenceModel],
    model_dirs: dict[str, Path],
    tmp_path: Path,
    seed: int,
    model: str,
    rope: dict[str, Any],
) -> None:
    """As checkpoints ask for it whose context was lengthened after training."""
    stretched = Path(shutil.copytree(model_dirs[model], tmp_path / model))
    config = json.loads((stretched / "config.json").read_text())
    config["text_config"]["rope_parameters"] |= {**rope, "original_max_position_embeddings": 2048}
    (stretched / "config.json").write_text(json.dumps(config))
    reference, prompts = ReferenceModel(stretched, tmp_path / "cache"), make_prompts(seed, 4)
    assert run_all(reference, adapter_for(stretched), prompts, random.Random(seed)).is_exact
    plain = references[model].generate_now(prompts[0])
    assert plain.tokens != reference.generate(prompts[0]).tokens, "it made no difference"


def judged(reference: ReferenceModel, row: Row) -> Comparison:
    return compare(
        reference.generate(row.prompt),
        row.tokens,
        torch.stack(row.logits).numpy(),
        lambda tokens: reference.teacher_forced_logits(row.prompt, tokens),
    )
