"""The tower's attention costs what the pictures cost alone, however many are packed into a pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.checkpoints import FAMILIES
from triptych.core.plan import Grid
from triptych.model.parts import VisionPart
from triptych.model.registry import adapter_for

GRIDS = [Grid(1, 8, 12), Grid(1, 4, 4), Grid(1, 16, 8), Grid(1, 8, 12), Grid(1, 6, 20), Grid(1, 4, 4)]
BATCH_INVARIANT_ATOL = 1e-5


@contextmanager
def attended() -> Iterator[list[tuple[int, int]]]:
    """(queries, keys) of each attention of what runs meanwhile. Raises AssertionError for one with a mask."""
    calls: list[tuple[int, int]] = []
    stock = torch.nn.functional.scaled_dot_product_attention

    def counting(query: torch.Tensor, key: torch.Tensor, *args: Any, **how: Any) -> torch.Tensor:
        assert how.get("attn_mask") is None and not args[1:], "a mask over the whole pass grows with its square"
        calls.append((query.shape[-2], key.shape[-2]))
        return stock(query, key, *args, **how)

    torch.nn.functional.scaled_dot_product_attention = counting
    try:
        yield calls
    finally:
        torch.nn.functional.scaled_dot_product_attention = stock


def cost(calls: list[tuple[int, int]]) -> int:
    assert calls, "the tower attends through torch's own function"
    return sum(queries * keys for queries, keys in calls)


@pytest.fixture(params=sorted(FAMILIES))
def part(request: pytest.FixtureRequest, tiny_model_dirs: dict[str, Path]) -> VisionPart:
    adapter = adapter_for(tiny_model_dirs[request.param])
    return adapter.load_vision(torch.float32, torch.device("cpu"))


def test_packed_pictures_cost_what_they_cost_alone_and_are_the_same(part: VisionPart, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pixels = [torch.randn(grid.h * grid.w, part.patch_elements, generator=generator) for grid in GRIDS]
    with attended() as apart:
        alone = [part.encode([each], [grid])[0] for each, grid in zip(pixels, GRIDS, strict=True)]
    with attended() as packed:
        together = part.encode(pixels, GRIDS)
    assert cost(packed) == cost(apart)
    for one, other in zip(alone, together, strict=True):
        assert torch.allclose(one, other, atol=BATCH_INVARIANT_ATOL)


def test_twice_the_pictures_cost_twice_as_much(part: VisionPart) -> None:
    def cost_of(count: int) -> int:
        grids = [Grid(1, 8, 8)] * count
        with attended() as calls:
            part.encode([torch.zeros(64, part.patch_elements)] * count, grids)
        return cost(calls)

    assert cost_of(16) == 2 * cost_of(8) == 16 * cost_of(1)
