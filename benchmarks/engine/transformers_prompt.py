"""What the server of `transformers` makes of a request: ids, pictures and positions, by stock parts alone."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """Attributes:
    ids: (n,), placeholders expanded.
    keys: as `ids`, but a picture's rows are named by its content: what a prefix is compared by.
    positions: (4, n) int64: place in the text, then M-RoPE; (n,) for a text model.
    pictures: for each its first row, its patches and its grid.
    """

    ids: tuple[int, ...]
    keys: tuple[int | str, ...]
    positions: torch.Tensor
    pictures: tuple[tuple[int, torch.Tensor, torch.Tensor], ...] = ()


class Prompter:
    def __init__(self, folder: Path, model: Any) -> None:
        self._model = model
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._sees = (folder / "preprocessor_config.json").exists()
        if self._sees:
            self._images: Any = AutoImageProcessor.from_pretrained(folder)  # type: ignore[no-untyped-call]
            self._pad: Any = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> Prompt:
        """Raises ValueError for what it cannot do."""
        media = [_picture(part) for message in messages for part in _parts(message) if part["type"] == "image_url"]
        if media and not self._sees:
            raise ValueError("this model takes no pictures")
        text = self.tokenizer.apply_chat_template(
            [_without_media(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._with_pictures(ids, media) if media else self._text(ids)

    def _text(self, ids: Sequence[int]) -> Prompt:
        places = torch.arange(len(ids))
        return Prompt(tuple(ids), tuple(ids), places.expand(4, -1) if self._sees else places)

    def _with_pictures(self, ids: Sequence[int], media: Sequence[bytes]) -> Prompt:
        made = [self._images(images=[Image.open(io.BytesIO(data))], return_tensors="pt") for data in media]
        names = [hashlib.sha256(data).hexdigest() for data in media]
        left = iter(zip(made, names, strict=True))
        full: list[int] = []
        keys: list[int | str] = []
        pictures = []
        for token in ids:
            if token != self._pad:
                full.append(token)
                keys.append(token)
                continue
            patches, name = next(left)
            count = int(patches["image_grid_thw"].prod()) // self._images.merge_size**2
            pictures.append((len(full), patches["pixel_values"], patches["image_grid_thw"]))
            full += [token] * count
            keys += [name] * count
        tensor = torch.tensor([full])
        grids = torch.cat([grid for _, _, grid in pictures])
        kinds = (tensor == self._pad).int()
        rope, _ = self._model.model.get_rope_index(tensor, image_grid_thw=grids, mm_token_type_ids=kinds)
        positions = torch.cat([torch.arange(len(full))[None], rope[:, 0]])
        return Prompt(tuple(full), tuple(keys), positions, tuple(pictures))


def load(folder: Path, dtype: str) -> Any:
    """The checkpoint's own class, told to answer at full length."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model: Any = getattr(transformers, architecture).from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None
    return model


def _parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return () if isinstance(message["content"], str) else message["content"]


def _without_media(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(message["content"], str):
        return message
    parts = [part if part["type"] == "text" else {"type": "image"} for part in message["content"]]
    return {**message, "content": parts}


def _picture(part: Mapping[str, Any]) -> bytes:
    return base64.b64decode(part["image_url"]["url"].partition(",")[2])
