"""Qwen2.5-VL: dynamic resolution, window attention in the tower, M-RoPE with three sections."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from triptych.core.errors import MediaInvalid, MediaMismatch, ModalityUnsupported, StartupError
from triptych.core.plan import Grid, Item, Modality
from triptych.mm.mrope import PositionArray, mrope_positions
from triptych.model.adapters.base import Adapter, ItemLayout, read_json, required_int

if TYPE_CHECKING:
    import torch

    from triptych.model.parts import LanguagePart, VisionPart

MAX_ASPECT_RATIO = 200
PROCESSOR_FILE = "preprocessor_config.json"


def resized_to_grid(height_px: int, width_px: int, unit_px: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The size the Qwen processor resizes to: both sides multiples of `unit_px`, area within the bounds, ratio kept.

    The rule is the one in the model's public image processor ("smart resize"): round to the unit; when that leaves the
    bounds, scale both sides by the square root of the excess and round inwards.
    """
    height = round(height_px / unit_px) * unit_px
    width = round(width_px / unit_px) * unit_px
    if height * width > max_pixels:
        shrink = math.sqrt(height_px * width_px / max_pixels)
        height = max(unit_px, math.floor(height_px / shrink / unit_px) * unit_px)
        width = max(unit_px, math.floor(width_px / shrink / unit_px) * unit_px)
    elif height * width < min_pixels:
        grow = math.sqrt(min_pixels / (height_px * width_px))
        height = math.ceil(height_px * grow / unit_px) * unit_px
        width = math.ceil(width_px * grow / unit_px) * unit_px
    return height, width


def _bound(processor: dict[str, Any], name: str, size: dict[str, Any], edge: str) -> int:
    """A bound in pixels; older processors keep it beside `size`, newer ones within."""
    if processor.get(name) is not None:
        return required_int(processor, name, PROCESSOR_FILE)
    return required_int(size, edge, PROCESSOR_FILE)


class Qwen25VLAdapter(Adapter):
    architecture: ClassVar[str] = "Qwen2_5_VLForConditionalGeneration"

    def __init__(self, model_dir: Path) -> None:
        super().__init__(model_dir)
        processor = read_json(model_dir / PROCESSOR_FILE)
        self.patch_px = required_int(processor, "patch_size", PROCESSOR_FILE)
        self.merge_size = required_int(processor, "merge_size", PROCESSOR_FILE)
        size = processor.get("size") or {}
        self.min_pixels = _bound(processor, "min_pixels", size, "shortest_edge")
        self.max_pixels = _bound(processor, "max_pixels", size, "longest_edge")
        self.image_token_id = required_int(self.config, "image_token_id", "config.json")
        if self.text_config.get("use_sliding_window"):
            raise StartupError(f"model {self.model_name!r} attends in sliding windows, which Triptych cannot serve yet")

    def image_layout(self, width_px: int, height_px: int) -> ItemLayout:
        if min(width_px, height_px) < 1:
            raise MediaInvalid("the picture has no pixels")
        if max(width_px, height_px) > MAX_ASPECT_RATIO * min(width_px, height_px):
            raise MediaInvalid(
                f"the picture is {width_px}x{height_px}; "
                f"its longer side may be at most {MAX_ASPECT_RATIO} times the shorter"
            )
        unit_px = self.patch_px * self.merge_size
        height, width = resized_to_grid(height_px, width_px, unit_px, self.min_pixels, self.max_pixels)
        grid = Grid(1, height // self.patch_px, width // self.patch_px)
        return ItemLayout(grid, (grid.h * grid.w // self.merge_size**2,))

    def check_layout(self, item: Item) -> None:
        grid, merge = item.grid, self.merge_size
        rows = grid.t * (grid.h // merge) * (grid.w // merge)
        if grid.h % merge or grid.w % merge or rows != item.num_tokens or len(item.ranges) != 1:
            raise MediaMismatch(
                f"a grid of {grid.t} x {grid.h} x {grid.w} patches cannot give {item.num_tokens} tokens "
                f"in {len(item.ranges)} ranges"
            )

    def placeholder_id(self, modality: Modality) -> int:
        if modality is not Modality.IMAGE:
            raise ModalityUnsupported(f"{modality.value} input is not served yet; send pictures and text")
        return self.image_token_id

    def positions(self, num_tokens: int, items: Sequence[Item]) -> tuple[PositionArray, int]:
        return mrope_positions(num_tokens, items, self.merge_size)

    def load_vision(self, dtype: torch.dtype, device: torch.device) -> VisionPart:
        from triptych.model.qwen_vl_parts import load_qwen25_vision

        return load_qwen25_vision(self, dtype, device)

    def load_language(self, dtype: torch.dtype, device: torch.device) -> LanguagePart:
        from triptych.model.qwen_vl_parts import load_qwen25_language

        return load_qwen25_language(self, dtype, device)
