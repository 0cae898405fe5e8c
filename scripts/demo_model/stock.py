"""The demo model through stock `transformers`: what a checkpoint answers with none of our serving code involved."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

IMAGE_PAD = "<|image_pad|>"
Messages = list[dict[str, Any]]


class StockModel:
    """A checkpoint directory in float32; answers several conversations at once, padded on the left."""

    def __init__(self, directory: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        self.model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
        self.model.eval()  # type: ignore[no-untyped-call]
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory, padding_side="left")
        self.processor: Any = Qwen2VLImageProcessorPil.from_pretrained(directory)
        self.image_id: int = self.model.config.image_token_id

    def answer(self, conversations: Sequence[Messages], max_tokens: int) -> list[str]:
        """Greedy answers without the end-of-turn token."""
        inputs = self.inputs(conversations)
        self.model.model.rope_deltas = None  # left over from the call before
        with torch.inference_mode():
            out = self.model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        said = self.tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return [str(text) for text in said]

    def inputs(self, conversations: Sequence[Messages]) -> dict[str, torch.Tensor]:
        """Token ids with every picture expanded, masks, and the pictures themselves."""
        pictures = [picture for messages in conversations for picture in _pictures(messages)]
        seen = self.processor(pictures, return_tensors="pt") if pictures else {}
        sizes = iter(seen["image_grid_thw"].prod(-1).tolist() if pictures else [])
        texts = [self._expanded(messages, sizes) for messages in conversations]
        tokens = self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        found = {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"], **seen}
        # Without these, positions would silently be one-dimensional.
        found["mm_token_type_ids"] = (tokens["input_ids"] == self.image_id).int()
        return found

    def _expanded(self, messages: Messages, sizes: Any) -> str:
        text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        first, *rest = text.split(IMAGE_PAD)
        return first + "".join(IMAGE_PAD * (next(sizes) // 4) + part for part in rest)


def _pictures(messages: Messages) -> list[Image.Image]:
    parts = [part for m in messages if isinstance(m["content"], list) for part in m["content"]]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    return [Image.open(io.BytesIO(base64.b64decode(url.split(",", 1)[1]))).convert("RGB") for url in urls]
