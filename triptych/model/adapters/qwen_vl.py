"""What the Qwen-VL families have in common: pictures at their own resolution, patches merged two by two (or as the
checkpoint says), M-RoPE positions, causal attention throughout the language model."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from triptych.core.errors import MediaInvalid, MediaMismatch, ModalityUnsupported
from triptych.core.plan import Grid, Item, Modality
from triptych.mm.mrope import PositionArray, mrope_positions
from triptych.model.adapters.base import Adapter, ItemLayout
from triptych.model.checkpoint_files import CONFIG_FILE, PROCESSOR_FILE, Table, read_json
from triptych.model.text_config import check_full_attention, check_rope

if TYPE_CHECKING:
    import torch

    from triptych.model.parts import LanguagePart, VisionPart

log = logging.getLogger(__name__)

MAX_ASPECT_RATIO = 200
COLOURS = 3
ROPE_TYPES = ("default", "mrope", "linear", "yarn")


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


class QwenVLAdapter(Adapter):
    """Base of the families. What they share of the vision tower's config is read here, the rest in `_check_tower`.

    Attributes:
        vision_defaults: fields of `vision_config` with the values that they have where a checkpoint leaves them out.
            Nested configs are published without what equals the default of transformers' class, so these are that
            class's (a test compares them). Everything else has to be there.
    """

    vision_defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, model_dir: Path) -> None:
        super().__init__(model_dir)
        whole = Table(self.config, CONFIG_FILE)
        self.vision_config = self._read_vision_config(whole.table("vision_config"))
        self.image_token_id = whole.token_id("image_token_id", self.vocab_size)
        self._read_processor(Table(read_json(model_dir / PROCESSOR_FILE), PROCESSOR_FILE))
        self._check_language()
        self._check_tower()

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
        from triptych.model.qwen_vl_parts import QwenVision, load_vision

        return load_vision(self, QwenVision, dtype, device)

    def load_language(self, dtype: torch.dtype, device: torch.device) -> LanguagePart:
        from triptych.model.qwen_vl_parts import QwenLanguage, language_weights

        return language_weights(self).load(QwenLanguage, dtype, device)

    def check_depths(self, num_tensors: int) -> None:
        # Building what a config says must not take hours and all memory to find out that it is of another checkpoint.
        for table, field in ((self.text_config, "num_hidden_layers"), (self.vision_config, "depth")):
            if table.positive(field) > num_tensors:
                table.refuse(field, f"and the weights have {num_tensors} tensors in all")

    # -- what config and processor must say --------------------------------------------------------------------------

    def _read_vision_config(self, given: Table) -> Table:
        left_out = sorted(self.vision_defaults.keys() - given.values.keys())
        if left_out:
            log.info("the config leaves fields of the tower to the family's defaults", extra={"fields": left_out})
        vision = replace(given, values={**self.vision_defaults, **given.values})
        if vision.values.get("in_channels", COLOURS) != COLOURS:
            vision.refuse("in_channels", f"and pictures have {COLOURS}")
        return vision

    @abstractmethod
    def _check_tower(self) -> None:
        """Checks the family's own fields. Raises StartupError that names the field."""

    def _read_processor(self, processor: Table) -> None:
        self.patch_px = processor.positive("patch_size")
        self.merge_size = processor.positive("merge_size")
        self.min_pixels = _bound(processor, "min_pixels", "shortest_edge")
        self.max_pixels = _bound(processor, "max_pixels", "longest_edge")
        if self.min_pixels > self.max_pixels:
            processor.refuse("size", f"and {self.min_pixels} pixels at least are more than {self.max_pixels} at most")
        if processor.values.get("do_resize", True) is not True:
            processor.refuse("do_resize", "but sizes are served only as the processor resizes them")
        for field in ("do_rescale", "do_normalize", "do_convert_rgb"):
            if field in processor:
                processor.flag(field)
        if "image_mean" in processor:
            processor.numbers("image_mean", COLOURS)
        if "image_std" in processor and 0.0 in processor.numbers("image_std", COLOURS):
            processor.refuse("image_std", "and pixels are divided by it")
        if "rescale_factor" in processor:
            processor.number("rescale_factor")
        vision = self.vision_config
        self._same(processor, "patch_size", vision, "patch_size")
        self._same(processor, "merge_size", vision, "spatial_merge_size")
        self._same(processor, "temporal_patch_size", vision, "temporal_patch_size")

    def _check_language(self) -> None:
        text = self.text_config
        text.positive("intermediate_size")
        text.number("rms_norm_eps")
        check_full_attention(text)
        rope = text.table("rope_scaling" if "rope_scaling" in text else "rope_parameters")
        check_rope(text, rope, ROPE_TYPES)
        sections, pairs = rope.positives("mrope_section", 3), self.kv_shape.head_dim // 2
        if sum(sections) != pairs or self.kv_shape.head_dim % 2:
            rope.refuse("mrope_section", f"whose sum should be {pairs}, half of the head size {self.kv_shape.head_dim}")

    def _check_tower_heads(self, width: int) -> None:
        """Heads share the tower's `width`; each head turns rows and columns in pairs."""
        vision = self.vision_config
        vision.positive("depth")
        heads = vision.positive("num_heads")
        if width % (4 * heads):
            vision.refuse("num_heads", f"and the tower's width {width} is not a multiple of four times that")

    def _check_row_width(self, field: str) -> None:
        """What the tower gives must be as wide as what the language model takes."""
        if self.vision_config.positive(field) != self.hidden_size:
            self.vision_config.refuse(
                field, f"but {self.text_config.name('hidden_size')} is {self.hidden_size}; they should be equal"
            )

    def _same(self, processor: Table, field: str, vision: Table, vision_field: str) -> None:
        given, expected = processor.positive(field), vision.positive(vision_field)
        if given != expected:
            processor.refuse(field, f"but {vision.name(vision_field)} is {expected}; they should be equal")


def _bound(processor: Table, name: str, edge: str) -> int:
    """A bound in pixels; older processors keep it beside `size`, newer ones within."""
    if name in processor:
        return processor.positive(name)
    return processor.table("size").positive(edge)
