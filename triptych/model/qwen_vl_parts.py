"""The halves of the Qwen-VL families: the architecture's own modules from transformers, each with its own weights only.

The architecture's class is built on the meta device, where it takes no memory, and the half that is not wanted is
dropped. What a family does differently is a subclass of these parts in a module of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from triptych.core.errors import StartupError
from triptych.core.plan import Grid
from triptych.media.frames import Target
from triptych.model.checkpoint_files import PROCESSOR_FILE, read_json
from triptych.model.language_weights import HEAD_NAME, LanguageWeights
from triptych.model.loader import (
    check_all_claimed,
    check_loaded,
    count_parameters,
    load_part,
    select_prefix,
    tensor_index,
)
from triptych.model.stock import in_one_line, stock_on_meta
from triptych.model.stock_language import StockLanguage

if TYPE_CHECKING:
    from triptych.model.adapters.qwen_vl import QwenVLAdapter

# Newest checkpoint layout first; the older one has no common root.
VISION_PREFIXES = ("model.visual.", "visual.")
LANGUAGE_PREFIXES = ("model.language_model.", "model.")
# Names of classes in the processor's file; nothing is ever looked up by them.
_NOT_SETTINGS = frozenset({"image_processor_type", "feature_extractor_type", "processor_class", "auto_map"})


class QwenVision:
    """VisionPart over the family's model stripped of its language model, so that the family's own `get_image_features`
    is what runs."""

    def __init__(self, model: Any, processor: Qwen2VLImageProcessorPil, row_elements: int) -> None:
        self.model = model
        self.processor = processor
        weight = next(model.visual.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.row_elements = row_elements
        embedding: Any = model.visual.patch_embed
        self.patch_elements = int(embedding.in_channels * embedding.temporal_patch_size * embedding.patch_size**2)
        self.num_parameters = count_parameters(model)

    def target(self, grid: Grid) -> Target:
        side_px = self.processor.patch_size
        return Target(grid.w * side_px, grid.h * side_px, int(self.processor.resample))

    def patches(self, picture: npt.NDArray[np.uint8]) -> torch.Tensor:
        pixels: torch.Tensor = self.processor(
            images=[picture], input_data_format="channels_last", do_resize=False, return_tensors="pt"
        )["pixel_values"]
        return pixels

    def preprocess(self, image: Image.Image) -> tuple[torch.Tensor, Grid]:
        """All of it in one, as the family does it."""
        features = self.processor(images=[image], return_tensors="pt")
        t, h, w = features["image_grid_thw"][0].tolist()
        return features["pixel_values"], Grid(t, h, w)

    @torch.inference_mode()
    def encode(self, pixels: Sequence[torch.Tensor], grids: Sequence[Grid]) -> list[torch.Tensor]:
        grid_thw = torch.tensor([[grid.t, grid.h, grid.w] for grid in grids], device=self.device)
        packed = torch.cat(list(pixels)).to(self.device)
        return self._rows(self.model.get_image_features(packed, grid_thw, return_dict=True))

    def _rows(self, features: Any) -> list[torch.Tensor]:
        """For each picture (num_tokens, row_elements)."""
        return list(features.pooler_output)


class QwenLanguage(StockLanguage):
    """With M-RoPE: positions on three axes."""

    def position_ids(self, positions: torch.Tensor) -> torch.Tensor:
        return positions.unsqueeze(1)


Vision = TypeVar("Vision", bound=QwenVision)


def load_vision(adapter: QwenVLAdapter, part: type[Vision], dtype: torch.dtype, device: torch.device) -> Vision:
    """The tower's weights in a `part`. Raises StartupError."""
    index = tensor_index(adapter.model_dir)
    adapter.check_depths(len(index))
    model = stock_on_meta(adapter).model
    del model.language_model
    names, _ = _names_of_parts(index)
    load_part(model.visual, index, names, dtype, device, "vision")
    # Computed from the config and never stored; on meta they have no values yet.
    model.visual.rotary_pos_emb = type(model.visual.rotary_pos_emb)(model.config.vision_config).to(device)
    check_loaded(model, "vision")
    model.train(False)
    vision = part(model, _processor(adapter), adapter.row_elements)
    _check_processor(adapter, vision)
    return vision


def language_weights(adapter: QwenVLAdapter) -> LanguageWeights:
    """Those of the language model and its head. Raises StartupError."""
    index = tensor_index(adapter.model_dir)
    adapter.check_depths(len(index))
    whole = stock_on_meta(adapter)
    _, names = _names_of_parts(index)
    return LanguageWeights(adapter, whole, whole.model.language_model, index, names)


def _names_of_parts(index: Mapping[str, Path]) -> tuple[dict[str, str], dict[str, str]]:
    """Tensors of the tower and of the language model without its head: name within the part -> in the checkpoint."""
    vision = select_prefix(index, VISION_PREFIXES)
    language = select_prefix(index.keys() - set(vision.values()), LANGUAGE_PREFIXES)
    check_all_claimed(index, [*vision.values(), *language.values(), HEAD_NAME])
    return vision, language


def _processor(adapter: QwenVLAdapter) -> Qwen2VLImageProcessorPil:
    settings = {k: v for k, v in read_json(adapter.model_dir / PROCESSOR_FILE).items() if k not in _NOT_SETTINGS}
    try:
        return Qwen2VLImageProcessorPil(**settings)
    except Exception as error:
        raise StartupError(
            f"{PROCESSOR_FILE} is not one of a Qwen-VL picture processor: {in_one_line(error)}"
        ) from error


def _check_processor(adapter: QwenVLAdapter, vision: QwenVision) -> None:
    """Tries it on a picture: a setting that stock reads only then must not wait for the first request, nor give every
    picture pixels that are no numbers. Raises StartupError."""
    unit_px = adapter.patch_px * adapter.merge_size
    width_px, height_px = 3 * unit_px + 1, 2 * unit_px + 1  # not what it is resized to
    picture = Image.linear_gradient("L").resize((width_px, height_px)).convert("RGB")
    try:
        pixels, grid = vision.preprocess(picture)
        is_right = pixels.shape == (grid.t * grid.h * grid.w, vision.patch_elements) and pixels.dtype == torch.float32
    except Exception as error:
        raise StartupError(f"{PROCESSOR_FILE} makes nothing of a picture: {in_one_line(error)}") from error
    if not is_right or grid != adapter.image_layout(width_px, height_px).grid:
        raise StartupError(f"{PROCESSOR_FILE} makes another number of patches of a picture than its sizes say")
    if not bool(torch.isfinite(pixels).all()):
        raise StartupError(f"{PROCESSOR_FILE} makes pixels that are no numbers; look at image_mean and image_std")
