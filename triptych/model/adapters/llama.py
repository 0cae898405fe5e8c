"""Llama and what shares its architecture (SmolLM2 and many others): text alone, one position a token, no tower."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NoReturn

import numpy as np

from triptych.core.errors import ModalityUnsupported, StartupError
from triptych.core.plan import Item, Modality
from triptych.mm.mrope import PositionArray
from triptych.model.adapters.base import Adapter, ItemLayout
from triptych.model.text_config import check_full_attention, check_rope

if TYPE_CHECKING:
    import torch

    from triptych.model.parts import LanguagePart, VisionPart

ROPE_TYPES = ("default", "linear", "yarn", "llama3")


class LlamaAdapter(Adapter):
    architecture: ClassVar[str] = "LlamaForCausalLM"
    family: ClassVar[str] = "Llama"
    modalities: ClassVar[tuple[Modality, ...]] = ()

    def __init__(self, model_dir: Path) -> None:
        super().__init__(model_dir)
        text = self.text_config
        text.positive("intermediate_size")
        text.number("rms_norm_eps")
        check_full_attention(text)
        tables = [text.table(name) for name in ("rope_scaling", "rope_parameters") if name in text]
        check_rope(text, tables[0] if tables else text, ROPE_TYPES)
        if self.kv_shape.head_dim % 2:
            text.refuse("head_dim", "and a head is rotated in pairs")

    def image_layout(self, width_px: int, height_px: int) -> ItemLayout:
        self._refuse_media()

    def placeholder_id(self, modality: Modality) -> int:
        self._refuse_media()

    def check_layout(self, item: Item) -> None:
        self._refuse_media()

    def positions(self, num_tokens: int, items: Sequence[Item]) -> tuple[PositionArray, int]:
        return np.arange(num_tokens, dtype=np.int64)[None], 0

    def load_vision(self, dtype: torch.dtype, device: torch.device) -> VisionPart:
        raise StartupError(f"{self.model_name} takes text only: it has no tower for an encoder to load")

    def load_language(self, dtype: torch.dtype, device: torch.device) -> LanguagePart:
        from triptych.model.llama_parts import language_weights
        from triptych.model.stock_language import StockLanguage

        return language_weights(self).load(StockLanguage, dtype, device)

    def check_depths(self, num_tensors: int) -> None:
        if self.kv_shape.num_layers > num_tensors:
            self.text_config.refuse("num_hidden_layers", f"and the weights have {num_tensors} tensors in all")

    def _read_head_dim(self, heads: int) -> int:
        if "head_dim" in self.text_config:
            return self.text_config.positive("head_dim")
        return super()._read_head_dim(heads)

    def _refuse_media(self) -> NoReturn:
        raise ModalityUnsupported(f"{self.model_name} takes text only; ask without pictures, or of another model")
