"""The Qwen2.5-VL halves: the architecture's own modules from transformers, each with its own weights only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from PIL import Image
from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLModel,
    Qwen2_5_VLRotaryEmbedding,
    Qwen2_5_VLVisionRotaryEmbedding,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from triptych.core.errors import StartupError
from triptych.core.plan import Grid
from triptych.model.loader import check_loaded, count_parameters, load_part, select_prefix, tensor_index
from triptych.model.paged import ATTENTION_NAME, PagedBatch, register_paged_attention

if TYPE_CHECKING:
    from triptych.model.adapters.qwen2_5_vl import Qwen25VLAdapter

# Newest checkpoint layout first; the older one has no common root.
VISION_PREFIXES = ("model.visual.", "visual.")
LANGUAGE_PREFIXES = ("model.language_model.", "model.")
HEAD_NAME = "lm_head.weight"


class Qwen25Vision:
    """VisionPart over `Qwen2_5_VLModel` stripped of its language model, so that the family's own
    `get_image_features` is what runs."""

    def __init__(self, model: Qwen2_5_VLModel, processor: Qwen2VLImageProcessorPil, device: torch.device) -> None:
        self.model = model
        self.processor = processor
        self.device = device
        self.dtype = next(model.visual.parameters()).dtype
        self.row_elements = int(cast(Any, model.config).vision_config.out_hidden_size)
        embedding: Any = model.visual.patch_embed
        self.patch_elements = int(embedding.in_channels * embedding.temporal_patch_size * embedding.patch_size**2)
        self.num_parameters = count_parameters(model)

    def preprocess(self, image: Image.Image) -> tuple[torch.Tensor, Grid]:
        features = self.processor(images=[image], return_tensors="pt")
        t, h, w = features["image_grid_thw"][0].tolist()
        return features["pixel_values"], Grid(t, h, w)

    @torch.inference_mode()
    def encode(self, pixels: Sequence[torch.Tensor], grids: Sequence[Grid]) -> list[torch.Tensor]:
        grid_thw = torch.tensor([[grid.t, grid.h, grid.w] for grid in grids], device=self.device)
        packed = torch.cat(list(pixels)).to(self.device)
        features = self.model.get_image_features(packed, grid_thw, return_dict=True)
        return list(features.pooler_output)


class Qwen25Language:
    """LanguagePart over the text model and its head."""

    def __init__(self, model: Any, head: torch.Tensor, device: torch.device) -> None:
        self.model = model
        self.head = head
        self.device = device
        self.dtype = head.dtype
        tied = head.data_ptr() == model.embed_tokens.weight.data_ptr()
        self.num_parameters = count_parameters(model) + (0 if tied else head.numel())

    @torch.inference_mode()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.model.embed_tokens(ids)
        return rows

    @torch.inference_mode()
    def hidden(self, embeddings: torch.Tensor, positions: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        out = self.model(
            inputs_embeds=embeddings.unsqueeze(0), position_ids=positions.unsqueeze(1), use_cache=False, paged=batch
        )
        last: torch.Tensor = out.last_hidden_state[0]
        return last

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, self.head).float()


def load_qwen25_vision(adapter: Qwen25VLAdapter, dtype: torch.dtype, device: torch.device) -> Qwen25Vision:
    config = AutoConfig.from_pretrained(adapter.model_dir)
    with torch.device("meta"):
        model = Qwen2_5_VLModel(config)
    del model.language_model
    index = tensor_index(adapter.model_dir)
    load_part(model.visual, index, select_prefix(index, VISION_PREFIXES), dtype, device, "vision")
    model.visual.rotary_pos_emb = Qwen2_5_VLVisionRotaryEmbedding(config.vision_config).to(device)
    check_loaded(model, "vision")
    processor = Qwen2VLImageProcessorPil(**_processor_settings(adapter))
    model.train(False)
    return Qwen25Vision(model, processor, device)


def load_qwen25_language(adapter: Qwen25VLAdapter, dtype: torch.dtype, device: torch.device) -> Qwen25Language:
    register_paged_attention()
    config = AutoConfig.from_pretrained(adapter.model_dir, attn_implementation=ATTENTION_NAME)
    with torch.device("meta"):
        whole = Qwen2_5_VLForConditionalGeneration(config)
    model: Any = whole.model.language_model
    index = tensor_index(adapter.model_dir)
    names = select_prefix(index, LANGUAGE_PREFIXES)
    load_part(model, index, names, dtype, device, "language")
    model.rotary_emb = Qwen2_5_VLRotaryEmbedding(config.text_config).to(device)
    check_loaded(model, "language")
    head = model.embed_tokens.weight
    if not config.tie_word_embeddings:
        holder = torch.nn.Linear(head.shape[1], head.shape[0], bias=False, device="meta", dtype=dtype)
        if HEAD_NAME not in index:
            raise StartupError(f"the checkpoint lacks the tensor {HEAD_NAME!r}, and its config does not tie the head")
        load_part(holder, index, {"weight": HEAD_NAME}, dtype, device, "language head")
        head = holder.weight
    model.train(False)
    return Qwen25Language(model, head.detach(), device)


def _processor_settings(adapter: Qwen25VLAdapter) -> dict[str, Any]:
    raw = json.loads((adapter.model_dir / "preprocessor_config.json").read_text())
    return {
        name: value for name, value in raw.items() if not name.endswith("processor_type") and name != "processor_class"
    }
