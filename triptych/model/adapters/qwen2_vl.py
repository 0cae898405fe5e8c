"""Qwen2-VL: full attention in the tower, whose config calls its own width `embed_dim` and its output `hidden_size`."""

from __future__ import annotations

from typing import ClassVar

from triptych.model.adapters.qwen_vl import QwenVLAdapter


class Qwen2VLAdapter(QwenVLAdapter):
    architecture: ClassVar[str] = "Qwen2VLForConditionalGeneration"
    family: ClassVar[str] = "Qwen2-VL"

    def _check_tower(self) -> None:
        self._check_tower_heads(self.vision_config.positive("embed_dim"))
        self._check_row_width("hidden_size")
