"""Qwen2-VL: full attention in the tower, whose config calls its own width `embed_dim` and its output `hidden_size`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from triptych.model.adapters.qwen_vl import QwenVLAdapter


class Qwen2VLAdapter(QwenVLAdapter):
    architecture: ClassVar[str] = "Qwen2VLForConditionalGeneration"
    family: ClassVar[str] = "Qwen2-VL"
    vision_defaults: ClassVar[Mapping[str, Any]] = {
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 3584,
        "num_heads": 16,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }

    def _check_tower(self) -> None:
        self._check_tower_heads(self.vision_config.positive("embed_dim"))
        self._check_row_width("hidden_size")
