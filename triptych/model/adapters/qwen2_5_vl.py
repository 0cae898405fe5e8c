"""Qwen2.5-VL: the tower attends within windows of the picture, in some blocks over the whole of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from triptych.model.adapters.qwen_vl import QwenVLAdapter


class Qwen25VLAdapter(QwenVLAdapter):
    architecture: ClassVar[str] = "Qwen2_5_VLForConditionalGeneration"
    family: ClassVar[str] = "Qwen2.5-VL"
    vision_defaults: ClassVar[Mapping[str, Any]] = {
        "depth": 32,
        "hidden_size": 3584,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    }

    def _check_tower(self) -> None:
        vision = self.vision_config
        self._check_tower_heads(vision.positive("hidden_size"))
        self._check_row_width("out_hidden_size")
        vision.indexes("fullatt_block_indexes", vision.positive("depth"))
        if vision.positive("window_size") < self.patch_px * self.merge_size:
            vision.refuse("window_size", f"which is less than one token's {self.patch_px * self.merge_size} pixels")
