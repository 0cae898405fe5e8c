"""Qwen3-VL: some blocks of the tower give each token one row more, and those rows go into the language model's first
layers (DeepStack, arXiv:2406.04334). M-RoPE is interleaved, inside the stock rotary module; positions are as before."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from triptych.model.adapters.base import ExtraInput
from triptych.model.adapters.qwen_vl import QwenVLAdapter

if TYPE_CHECKING:
    import torch

    from triptych.model.parts import LanguagePart, VisionPart


class Qwen3VLAdapter(QwenVLAdapter):
    architecture: ClassVar[str] = "Qwen3VLForConditionalGeneration"
    family: ClassVar[str] = "Qwen3-VL"
    vision_defaults: ClassVar[Mapping[str, Any]] = {
        "depth": 27,
        "hidden_size": 1152,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    }
    extra_inputs: ClassVar[tuple[ExtraInput, ...]] = (ExtraInput.EMBEDDING_LEVELS,)

    def __init__(self, model_dir: Path) -> None:
        super().__init__(model_dir)
        vision = self.vision_config
        self.num_embedding_levels = len(vision.indexes("deepstack_visual_indexes", vision.positive("depth")))
        if self.num_embedding_levels > self.kv_shape.num_layers:
            vision.refuse(
                "deepstack_visual_indexes",
                f"but the language model has only {self.kv_shape.num_layers} layers for them",
            )

    def load_vision(self, dtype: torch.dtype, device: torch.device) -> VisionPart:
        from triptych.model.qwen3_vl_parts import Qwen3Vision
        from triptych.model.qwen_vl_parts import load_vision

        return load_vision(self, Qwen3Vision, dtype, device)

    def load_language(self, dtype: torch.dtype, device: torch.device) -> LanguagePart:
        from triptych.model.qwen3_vl_parts import Qwen3Language
        from triptych.model.qwen_vl_parts import language_weights

        return language_weights(self).load(Qwen3Language, dtype, device)

    def _check_tower(self) -> None:
        vision = self.vision_config
        self._check_tower_heads(vision.positive("hidden_size"))
        self._check_row_width("out_hidden_size")
        if math.isqrt(places := vision.positive("num_position_embeddings")) ** 2 != places:
            vision.refuse("num_position_embeddings", "which should be the square of a side")

    def _read_head_dim(self, heads: int) -> int:
        """A size of its own: heads need not share the hidden size."""
        return self.text_config.positive("head_dim")
