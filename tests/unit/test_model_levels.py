"""Embedding rows with levels: split where the step begins, the further levels at rows that the host counted."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.unit.stock_parts import load_stock_language
from triptych.core.plan import Grid, Item, Modality, Sampling, TokenRange
from triptych.mm.sentinels import SENTINEL_BASE, item_sentinels
from triptych.model.registry import adapter_for
from triptych.model.runner import EmbeddingSpan, LanguageRunner, RunSlice, scatter
from triptych.model.sampler import SampleRow
from triptych.obs import metrics
from triptych.stages.language import ComputeChoice, build_engine
from triptych.stages.settings import LanguageSettings
from triptych.testing.cluster import ChatRequest, InProcessCluster
from triptych.transport.slots import SlotAllocator

CPU = torch.device("cpu")
S, HIDDEN, LEVELS = SENTINEL_BASE, 64, 2
SAMPLED = SampleRow(Sampling(1), 0, 0)


@pytest.fixture(scope="module")
def model_dir(tiny_model_dirs: dict[str, Path]) -> Path:
    return tiny_model_dirs["qwen3-vl"]


@pytest.fixture
def runner(model_dir: Path) -> LanguageRunner:
    adapter = adapter_for(model_dir)
    kv = adapter.kv_shape
    pool = torch.zeros(kv.num_layers, 2, 12, kv.num_kv_heads, 16, kv.head_dim)
    return LanguageRunner(adapter.load_language(torch.float32, CPU), pool, 16, adapter.lookup_id)


def rows_of(first: int, count: int) -> torch.Tensor:
    """(count, 3 * HIDDEN): row r is 100 * level + r all over a level, so that each element says where it is from."""
    row = torch.arange(float(first), first + count)[:, None]
    return torch.cat([(100 * level + row).expand(-1, HIDDEN) for level in range(1 + LEVELS)], dim=1)


def piece(ids: list[int], *spans: EmbeddingSpan, start: int = 0, pages: tuple[int, ...] = (1,)) -> RunSlice:
    positions = np.arange(start, start + len(ids))[None].repeat(3, axis=0)
    return RunSlice(np.array(ids, dtype=np.int64), positions, pages, start, spans, SAMPLED)


def test_each_level_goes_to_the_rows_of_its_first(runner: LanguageRunner) -> None:
    """The second picture is cut: its rows 3 to 4 are in this step, the others were in one before."""
    slices = [
        piece([7, S, S + 1, 9, S + 5], EmbeddingSpan(1, rows_of(0, 2)), EmbeddingSpan(4, rows_of(50, 1))),
        piece([8, 8]),
        piece([S + 2, S + 3, 6], EmbeddingSpan(0, rows_of(13, 2))),
    ]
    ids = np.concatenate([each.ids for each in slices])
    with torch.inference_mode():
        embeddings, levels = scatter(runner.part, ids, slices, lookup_id=5)
    assert levels is not None
    assert levels.rows.tolist() == [1, 2, 4, 7, 8]
    assert embeddings.shape == (10, HIDDEN)
    assert embeddings[levels.rows, 0].tolist() == [0, 1, 50, 13, 14]
    assert [level[:, 0].tolist() for level in levels.levels] == [[100, 101, 150, 113, 114], [200, 201, 250, 213, 214]]
    assert all(level.shape == (5, HIDDEN) and bool((level == level[:, :1]).all()) for level in levels.levels)
    text = [0, 3, 5, 6, 9]
    assert torch.equal(embeddings[text], runner.part.embed(torch.from_numpy(ids[text])))


def test_a_step_without_pictures_has_no_levels(runner: LanguageRunner) -> None:
    with torch.inference_mode():
        assert scatter(runner.part, np.array([1, 2, 3]), [piece([1, 2, 3])], lookup_id=5)[1] is None


def test_a_row_of_another_width_is_a_bug_that_shows(runner: LanguageRunner) -> None:
    with pytest.raises(AssertionError):
        runner.run([piece([7, S], EmbeddingSpan(1, torch.ones(1, HIDDEN)))])


def stock_language(model_dir: Path) -> Any:
    stock: Any = transformers.Qwen3VLForConditionalGeneration.from_pretrained(model_dir, dtype=torch.float32)
    return stock.eval()


def test_the_levels_are_added_as_the_stock_model_does(model_dir: Path, seed: int) -> None:
    """To the bit; there the rows are named by a mask, here by their indices."""
    generator = torch.Generator().manual_seed(seed)
    hidden, level = torch.randn(1, 20, HIDDEN, generator=generator), torch.randn(6, HIDDEN, generator=generator)
    rows = torch.randperm(20, generator=generator)[:6].sort().values
    mask = torch.zeros(1, 20, dtype=torch.bool)
    mask[0, rows] = True
    expected = stock_language(model_dir).model.language_model._deepstack_process(hidden, mask, level)
    before = hidden.clone()
    ours = load_stock_language(model_dir)
    assert torch.equal(ours.model._deepstack_process(hidden, rows, level), expected)
    assert torch.equal(hidden, before), "the rows that came in were changed"


def test_no_mask_is_read_back_from_the_device(model_dir: Path) -> None:
    """On the meta device there are no values to read: what looks at them fails, as the stock function does."""
    stock = stock_language(model_dir).model.language_model._deepstack_process
    ours = load_stock_language(model_dir)
    with torch.device("meta"):
        hidden, level, rows = torch.empty(1, 20, HIDDEN), torch.empty(6, HIDDEN), torch.empty(6, dtype=torch.int64)
        assert ours.model._deepstack_process(hidden, rows, level).shape == hidden.shape
        with pytest.raises(NotImplementedError):
            stock(hidden, torch.empty(1, 20, dtype=torch.bool), level)


def test_a_picture_cut_anywhere_gives_the_same_logits(runner: LanguageRunner, seed: int) -> None:
    """First chunk from one token to all but one: before, within and after the two pictures."""
    item = Item(Modality.IMAGE, bytes(32), 6, (TokenRange(2, 2, 6),), Grid(1, 4, 6))
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(count, 3 * HIDDEN, generator=generator) for count in (6, 4)]
    ids = [3, 4, *item_sentinels(item.identity, 6).tolist(), 5, *item_sentinels(bytes([1]) * 32, 4).tolist(), 6, 7]
    whole = logits_in_chunks(runner, ids, rows, [len(ids)])
    for cut in range(1, len(ids)):
        torch.testing.assert_close(logits_in_chunks(runner, ids, rows, [cut]), whole, rtol=1e-5, atol=1e-5)
    cuts = sorted(random.Random(seed).sample(range(1, len(ids)), 4))
    torch.testing.assert_close(logits_in_chunks(runner, ids, rows, cuts), whole, rtol=1e-5, atol=1e-5)


def logits_in_chunks(runner: LanguageRunner, ids: list[int], rows: list[torch.Tensor], cuts: list[int]) -> torch.Tensor:
    """Logits of the last token; the pictures' rows stand at 2 to 7 and 9 to 12."""
    runner.pool.zero_()
    bounds = [0, *cuts, *([len(ids)] if cuts[-1] < len(ids) else [])]
    logits = None
    for start, end in itertools.pairwise(bounds):
        spans = []
        for offset, picture in zip((2, 9), rows, strict=True):
            low, high = max(offset, start), min(offset + len(picture), end)
            if low < high:
                spans.append(EmbeddingSpan(low - start, picture[low - offset : high - offset]))
        logits = runner.run([piece(ids[start:end], *spans, start=start)]).logits
    assert logits is not None
    return logits


def test_a_tower_without_further_levels_has_rows_of_one(model_dir: Path, tmp_path: Path) -> None:
    """The levels are the checkpoint's choice, and none is one, too."""
    plain = Path(shutil.copytree(model_dir, tmp_path / "plain"))
    config = json.loads((plain / "config.json").read_text())
    config["vision_config"]["deepstack_visual_indexes"] = []
    (plain / "config.json").write_text(json.dumps(config))
    tensors = load_file(plain / "model.safetensors")
    save_file({n: t.clone() for n, t in tensors.items() if "deepstack" not in n}, plain / "model.safetensors")
    adapter = adapter_for(plain)
    vision, language = adapter.load_vision(torch.float32, CPU), adapter.load_language(torch.float32, CPU)
    pixels, grid = vision.preprocess(Image.new("RGB", (96, 64), (200, 30, 30)))
    (rows,) = vision.encode([pixels], [grid])
    assert rows.shape[1] == adapter.row_elements == HIDDEN
    slices = [piece([S], EmbeddingSpan(0, rows[:1]))]
    with torch.inference_mode():
        assert scatter(language, np.array([S]), slices, adapter.lookup_id)[1] is None


# --- what moves between the stages ------------------------------------------------------------------------------------


def test_a_landing_slot_has_room_for_all_levels(model_dir: Path) -> None:
    adapter = adapter_for(model_dir)
    kv = adapter.kv_shape
    pool = torch.zeros(kv.num_layers, 2, 12, kv.num_kv_heads, 16, kv.head_dim)
    choice = ComputeChoice(CPU, torch.float32)
    settings = LanguageSettings()
    clock: Any = type("Clock", (), {"monotonic_ns": staticmethod(lambda: 0)})()
    engine = build_engine(adapter, settings, choice, pool, SlotAllocator(1 << 20), clock, "prefill")
    assert engine.limits.row_bytes == (1 + LEVELS) * HIDDEN * 4


@pytest.mark.parametrize("topology", ["mono", "e-p-d"])
async def test_the_figures_count_all_levels(model_dir: Path, tmp_path: Path, topology: Any) -> None:
    picture = Image.new("RGB", (96, 64), (200, 30, 30))
    picture.save(tmp_path / "picture.png")
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it"}]}
    request = ChatRequest((message,), ((tmp_path / "picture.png").read_bytes(),), 2)
    async with InProcessCluster(model_dir, topology) as cluster:
        tokens = cluster.adapter.image_layout(96, 64).num_tokens
        (result,) = await cluster.generate_many([request], concurrency=1)
        num_bytes = tokens * (1 + LEVELS) * HIDDEN * 4
        written = [event.num_bytes for event in result.timeline if event.event == "write"]
        assert written == [num_bytes]
        assert metrics.EMBEDDING_CACHE_BYTES._value.get() == num_bytes
