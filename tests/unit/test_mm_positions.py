"""Sizes and positions against transformers' own functions."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from triptych.core.errors import MediaInvalid
from triptych.core.plan import Grid, Item, Modality, TokenRange
from triptych.mm.mrope import mrope_positions
from triptych.model.adapters.qwen2_5_vl import Qwen25VLAdapter
from triptych.model.adapters.qwen_vl import MAX_ASPECT_RATIO, resized_to_grid

STOCK_MODELS = (Qwen2VLModel, Qwen2_5_VLModel, Qwen3VLModel)


def stock_positions(
    stock: type[torch.nn.Module], types: list[int], grids: list[Grid], merge_size: int
) -> tuple[torch.Tensor, int]:
    """transformers' M-RoPE positions of one sequence whose token types (0 text, 1 picture) are given."""
    model: Any = stock.__new__(stock)
    torch.nn.Module.__init__(model)
    model.config = SimpleNamespace(
        vision_config=SimpleNamespace(spatial_merge_size=merge_size, tokens_per_second=2),
    )
    grid_thw = torch.tensor([[grid.t, grid.h, grid.w] for grid in grids]) if grids else None
    ids = torch.zeros(1, len(types), dtype=torch.long)
    positions, deltas = model.get_rope_index(ids, torch.tensor([types]), image_grid_thw=grid_thw)
    return positions[:, 0], int(deltas[0])


def random_layout(rng: random.Random, merge_size: int) -> tuple[list[int], list[Grid], list[Item]]:
    """Up to five pictures with text (at least one token: the vision markers) around them."""
    types: list[int] = [0] * rng.randint(1, 12)
    grids: list[Grid] = []
    items: list[Item] = []
    for number in range(rng.randint(0, 5)):
        grid = Grid(1, merge_size * rng.randint(1, 9), merge_size * rng.randint(1, 9))
        count = grid.h * grid.w // merge_size**2
        run = TokenRange(len(types) - sum(item.num_tokens - 1 for item in items), len(types), count)
        items.append(Item(Modality.IMAGE, bytes([number]) * 32, count, (run,), grid))
        grids.append(grid)
        types += [1] * count + [0] * rng.randint(1, 12)
    return types, grids, items


@pytest.mark.parametrize("stock", STOCK_MODELS)
@pytest.mark.parametrize("merge_size", [1, 2, 3])
def test_positions_are_those_of_transformers(seed: int, merge_size: int, stock: type[torch.nn.Module]) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        types, grids, items = random_layout(rng, merge_size)
        expected, expected_delta = stock_positions(stock, types, grids, merge_size)
        positions, delta = mrope_positions(len(types), items, merge_size)
        assert positions.dtype == np.int64
        assert np.array_equal(positions, expected.numpy())
        assert delta == expected_delta


@pytest.mark.parametrize("stock", STOCK_MODELS)
def test_a_picture_may_end_the_prompt(stock: type[torch.nn.Module]) -> None:
    item = Item(Modality.IMAGE, bytes(32), 6, (TokenRange(2, 2, 6),), Grid(1, 4, 6))
    expected, expected_delta = stock_positions(stock, [0, 0, *[1] * 6], [item.grid], 2)
    positions, delta = mrope_positions(8, [item], 2)
    assert np.array_equal(positions, expected.numpy())
    assert delta == expected_delta == -3


def random_size(rng: random.Random) -> tuple[int, int]:
    """All magnitudes alike, so that both bounds and the ratio are met often."""
    return int(2 ** rng.uniform(0, 13)), int(2 ** rng.uniform(0, 13))


def test_sizes_are_those_of_the_stock_processor(seed: int) -> None:
    rng = random.Random(seed)
    compared = 0
    while compared < 5_000:
        height, width = random_size(rng)
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            continue
        unit = rng.choice([28, 28, 32, 14])
        least = rng.choice([1, 56 * 56, 3136, 4 * 28 * 28])
        most = rng.choice([14 * 14 * 4 * 1280, 336 * 336, 12845056, 100_352])
        ours = resized_to_grid(height, width, unit, least, most)
        assert ours == smart_resize(height, width, unit, least, most), (height, width, unit, least, most)
        compared += 1


@pytest.mark.parametrize(("height", "width"), [(14, 14), (42, 70), (70, 42), (98, 98), (126, 14), (42, 42)])
def test_halves_round_as_in_the_stock_processor(height: int, width: int) -> None:
    """Half a unit goes to the even neighbour, in Python's `round` as in the processor's."""
    assert resized_to_grid(height, width, 28, 1, 10**9) == smart_resize(height, width, 28, 1, 10**9)


@pytest.fixture
def adapter() -> Qwen25VLAdapter:
    """Only what a layout needs: no checkpoint."""
    made = Qwen25VLAdapter.__new__(Qwen25VLAdapter)
    made.patch_px, made.merge_size, made.min_pixels, made.max_pixels = 14, 2, 56 * 56, 336 * 336
    return made


def test_a_layout_counts_the_merged_patches_of_the_resized_picture(adapter: Qwen25VLAdapter, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(1_000):
        height, width = random_size(rng)
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            with pytest.raises(MediaInvalid, match="200 times"):
                adapter.image_layout(width, height)
            with pytest.raises(ValueError, match="aspect ratio"):
                smart_resize(height, width, 28, adapter.min_pixels, adapter.max_pixels)
            continue
        layout = adapter.image_layout(width, height)
        resized = smart_resize(height, width, 28, adapter.min_pixels, adapter.max_pixels)
        assert layout.grid == Grid(1, resized[0] // 14, resized[1] // 14)
        assert layout.run_lengths == (resized[0] * resized[1] // 28**2,)


@pytest.mark.parametrize(("width", "height"), [(1, 200), (200, 1), (1, 1)])
def test_the_longest_picture_that_is_taken(adapter: Qwen25VLAdapter, width: int, height: int) -> None:
    assert adapter.image_layout(width, height).num_tokens >= 4


@pytest.mark.parametrize(("width", "height"), [(1, 201), (201, 1), (0, 5), (5, 0), (0, 0), (-3, 4)])
def test_a_picture_without_pixels_or_far_too_long_is_refused(adapter: Qwen25VLAdapter, width: int, height: int) -> None:
    with pytest.raises(MediaInvalid):
        adapter.image_layout(width, height)
