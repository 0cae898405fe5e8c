"""From a picture's size alone we know how many rows its embedding has: against the stock processor and the real tower.

`TRIPTYCH_VERIFY=full` (set by `make verify-expansion`) tries 5,000 sizes a family, `make test` a hundred.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoImageProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from tests.parity.checkpoints import FAMILIES
from tests.seed import IS_FULL
from triptych.core.errors import MediaInvalid
from triptych.core.plan import Grid
from triptych.model.adapters.base import ItemLayout
from triptych.model.registry import adapter_for

SIZES = 5_000 if IS_FULL else 100
MOST_PIXELS_DRAWN = 160_000
"""Larger pictures are not drawn and processed, only counted by the processor's own function."""

PUBLISHED_BOUNDS = {
    "qwen2-vl": (56 * 56, 28 * 28 * 16_384),
    "qwen2.5-vl": (56 * 56, 28 * 28 * 16_384),
    "qwen3-vl": (256 * 256, 4_096 * 4_096),
}


@dataclass(frozen=True, slots=True)
class Family:
    """`tiny` and `published` are the adapter with the stock processor, within small and within the usual bounds."""

    tiny: tuple[Any, Any]
    published: tuple[Any, Any]
    vision: Any


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, tiny_model_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Family]:
    tiny_dir = tiny_model_dirs[request.param]
    published = Path(shutil.copytree(tiny_dir, tmp_path_factory.mktemp("published") / request.param))
    settings_path = published / "preprocessor_config.json"
    bounds = dict(zip(("shortest_edge", "longest_edge"), PUBLISHED_BOUNDS[request.param], strict=True))
    settings_path.write_text(json.dumps(json.loads(settings_path.read_text()) | {"size": bounds}))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tiny = with_processor(tiny_dir)
    yield Family(tiny, with_processor(published), tiny[0].load_vision(torch.float32, torch.device("cpu")))
    torch.set_num_threads(threads)


def with_processor(model_dir: Path) -> tuple[Any, Any]:
    return adapter_for(model_dir), AutoImageProcessor.from_pretrained(model_dir)  # type: ignore[no-untyped-call]


def stock_layout(processor: Any, width: int, height: int) -> ItemLayout | None:
    """What the stock processor makes of the size, None where it refuses it."""
    patch, merge = processor.patch_size, processor.merge_size
    try:
        tokens = processor.get_number_of_image_patches(height, width) // merge**2
        bounds = processor.size["shortest_edge"], processor.size["longest_edge"]
        rows, cols = (side // patch for side in smart_resize(height, width, patch * merge, *bounds))
    except (ValueError, ZeroDivisionError):
        return None
    return ItemLayout(Grid(1, rows, cols), (tokens,))


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int]:
    """All magnitudes alike, so that small sides, both bounds and the extreme ratios are met often."""
    width, height = (int(2 ** draw(st.floats(0, 13.5))) for _ in range(2))
    if draw(st.integers(0, 9)) == 0:  # at the edge of what is taken
        height = max(1, width // 200 + draw(st.integers(-1, 1)))
        width, height = draw(st.permutations([width, height]))
    return width, height


@pytest.mark.timeout(1800 if IS_FULL else 120)
@settings(
    max_examples=SIZES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(size=sizes(), share=st.integers(0, 4), seed=st.integers(0, 2**32 - 1))
@example(size=(1, 1), share=0, seed=0)
@example(size=(3, 7), share=0, seed=0)
@example(size=(3, 3), share=0, seed=0)
@example(size=(1, 200), share=0, seed=0)
@example(size=(1, 201), share=0, seed=0)
@example(size=(200, 1), share=0, seed=0)
@example(size=(201, 1), share=0, seed=0)
def test_a_size_gives_as_many_rows_as_processor_and_tower(
    family: Family, size: tuple[int, int], share: int, seed: int
) -> None:
    width, height = size
    for adapter, processor in (family.tiny, family.published):
        expected = stock_layout(processor, width, height)
        if expected is None:
            with pytest.raises(MediaInvalid):
                adapter.image_layout(width, height)
            event("refused")
        else:
            assert adapter.image_layout(width, height) == expected
    if stock_layout(family.tiny[1], width, height) is not None and width * height <= MOST_PIXELS_DRAWN:
        check_drawn(family, width, height, np.random.default_rng(seed), goes_through_tower=share == 0)


def check_drawn(family: Family, width: int, height: int, rng: np.random.Generator, *, goes_through_tower: bool) -> None:
    """A picture of that size, through the stock processor, through ours, and through the tower."""
    adapter, processor = family.tiny
    layout = adapter.image_layout(width, height)
    picture = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    stock = processor(images=[picture], return_tensors="pt")
    assert stock["image_grid_thw"].tolist() == [[layout.grid.t, layout.grid.h, layout.grid.w]]
    pixels, grid = family.vision.preprocess(picture)
    assert grid == layout.grid
    assert torch.equal(pixels, stock["pixel_values"])
    event("drawn")
    if goes_through_tower:
        (rows,) = family.vision.encode([pixels], [grid])
        assert rows.shape == (layout.num_tokens, adapter.row_elements)
        event("through the tower")


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0), (1, 4_000), (3_999, 19), (10_000, 49)])
def test_what_the_processor_refuses_is_refused(family: Family, size: tuple[int, int]) -> None:
    """Pictures for which there is no grid; the processor's own error comes when it is given such a picture, too."""
    adapter, processor = family.tiny
    assert stock_layout(processor, *size) is None
    with pytest.raises(MediaInvalid):
        adapter.image_layout(*size)
    with pytest.raises((ValueError, ZeroDivisionError)):
        processor(images=[Image.new("RGB", size)], return_tensors="pt")
