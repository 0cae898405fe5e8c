"""Bytes that decoding one token has to read, from a checkpoint's files alone."""

from __future__ import annotations

import json
import math
from pathlib import Path

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def weight_bytes(folder: Path, dtype: str) -> int:
    """Of the language model, without a table of embeddings that is not also the head: one row of it is read."""
    config = json.loads((folder / "config.json").read_text())
    tied = config.get("tie_word_embeddings", True)
    total = 0
    for name, shape in _shapes(folder).items():
        if "visual" in name or (not tied and "embed_tokens" in name):
            continue
        total += math.prod(shape)
    return total * ITEM_BYTES[dtype]


def kv_bytes_per_token(folder: Path, dtype: str) -> int:
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    head = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    return int(2 * text["num_hidden_layers"] * text["num_key_value_heads"] * head * ITEM_BYTES[dtype])


def _shapes(folder: Path) -> dict[str, list[int]]:
    """From the headers of the safetensors files."""
    shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes.update({name: entry["shape"] for name, entry in header.items() if name != "__metadata__"})
    return shapes
