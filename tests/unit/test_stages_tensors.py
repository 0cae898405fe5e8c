"""Tensors from outside as torch takes them: exact where they can be, refused where they cannot."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from triptych.core.errors import InvalidRequest, MediaMismatch
from triptych.core.plan import Grid, Item, Modality, TokenRange
from triptych.mm.tensor import TensorValue
from triptych.model.registry import adapter_for
from triptych.stages.tensors import as_patches, as_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def value_of(tensor: torch.Tensor) -> TensorValue:
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return TensorValue.from_bytes(name_of(tensor.dtype), tuple(tensor.shape), raw)


@pytest.mark.parametrize("sent", DTYPES, ids=name_of)
@pytest.mark.parametrize("computed", DTYPES, ids=name_of)
def test_rows_are_rounded_once_to_what_the_worker_computes_in(
    sent: torch.dtype, computed: torch.dtype, seed: int
) -> None:
    rows = torch.randn(5, 7, generator=torch.Generator().manual_seed(seed)).to(sent)
    found = as_rows(value_of(rows), 7, computed)
    assert found.dtype is computed
    assert torch.equal(found, rows.to(computed))
    if computed is torch.float32 or computed is sent:
        assert torch.equal(found.double(), rows.double()), "nothing is lost where nothing need be"


@pytest.mark.parametrize("sent", DTYPES, ids=name_of)
def test_patches_are_widened_exactly(sent: torch.dtype, seed: int) -> None:
    patches = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).to(sent)
    found = as_patches(value_of(patches), 6)
    assert found.dtype is torch.float32
    assert torch.equal(found.double(), patches.double())


def test_a_value_too_large_for_the_workers_format_is_refused() -> None:
    rows = TensorValue.from_array(np.array([[1.0, 70_000.0]], np.float32))
    assert as_rows(rows, 2, torch.bfloat16).isfinite().all()
    with pytest.raises(InvalidRequest, match="too large for float16"):
        as_rows(rows, 2, torch.float16)
    largest = TensorValue.from_array(np.array([[np.finfo(np.float32).max]], np.float32))
    with pytest.raises(InvalidRequest, match="too large for bfloat16"):
        as_rows(largest, 1, torch.bfloat16)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    tensor = TensorValue.from_array(np.array([[0.0, bad]], np.float32))
    for work in (lambda: as_rows(tensor, 2, torch.float32), lambda: as_patches(tensor, 2)):
        with pytest.raises(InvalidRequest, match="infinity or a NaN"):
            work()


@pytest.mark.parametrize("shape", [(2, 3), (2, 5), (8,), (1, 2, 4)])
def test_another_width_is_refused(shape: tuple[int, ...]) -> None:
    tensor = TensorValue.from_array(np.zeros(shape, np.float32))
    for work in (lambda: as_rows(tensor, 4, torch.float32), lambda: as_patches(tensor, 4)):
        with pytest.raises(InvalidRequest, match="has 4 elements"):
            work()


def test_the_result_owns_its_memory() -> None:
    tensor = TensorValue.from_array(np.ones((2, 4), np.float32))
    as_rows(tensor, 4, torch.float32).zero_()
    as_patches(tensor, 4).zero_()
    assert np.frombuffer(tensor.data, np.float32).tolist() == [1.0] * 8


# --- grids ------------------------------------------------------------------------------------------------------------


def layout_item(num_tokens: int, grid: Grid, *lengths: int) -> Item:
    ranges, offset = [], 0
    for index, length in enumerate(lengths or (num_tokens,)):
        ranges.append(TokenRange(index, offset, length))
        offset += length
    return Item(Modality.IMAGE, bytes(32), num_tokens, tuple(ranges), grid)


def test_a_grid_that_cannot_give_the_tokens_is_told_before_positions_are_computed(tiny_model_dir: Path) -> None:
    adapter = adapter_for(tiny_model_dir)
    right = adapter.image_layout(84, 56)
    item = layout_item(right.num_tokens, right.grid)
    adapter.check_layout(item)
    adapter.check_layout(layout_item(right.num_tokens, Grid(1, right.grid.w, right.grid.h)))
    assert adapter.positions(item.num_tokens, [item])[0].shape[1] == item.num_tokens
    grid = right.grid
    for wrong in (
        dataclasses.replace(item, grid=Grid(1, grid.h + 1, grid.w)),
        dataclasses.replace(item, grid=Grid(1, grid.h, grid.w + 1)),
        dataclasses.replace(item, grid=Grid(2, grid.h, grid.w)),
        dataclasses.replace(item, grid=Grid(1, grid.h + 2, grid.w)),
        dataclasses.replace(item, grid=Grid(1, 1, 1)),
        layout_item(right.num_tokens + 1, grid),
        layout_item(right.num_tokens, grid, 1, right.num_tokens - 1),
    ):
        with pytest.raises(MediaMismatch):
            adapter.check_layout(wrong)
