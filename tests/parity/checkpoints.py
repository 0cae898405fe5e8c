"""Tiny random checkpoints, one of each family, whose answers react to everything that may go wrong.

Random weights as a library initialises them are a bad witness: attention is nearly uniform, pictures hardly reach the
logits, and greedy output falls into a loop that hides any fault. Here every part is scaled on purpose: attention is
sharp, the rows of a picture are as loud as those of words, what attention adds to the residual outweighs the token
itself (so that outputs do not loop), and the rotary base is small enough that one row or column turns every pair of
the head. `test_parity_checkpoint_is_a_witness` shows what that buys.

The weights come from numpy's generator in float64, so that they are the same bits whatever the processor's vectors are.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import nn

DEMO_DIR = Path(__file__).resolve().parents[2] / "assets" / "demo-vl"
SIDE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "generation_config.json",
)
DEFAULT_SEED = 7

HIDDEN = 64
VISION_HIDDEN = 32

Noise = npt.NDArray[np.float64]
Gains = tuple[tuple[str, float], ...]
"""Standard deviation of each weight as a multiple of 1 / sqrt(fan-in); the first matching name wins."""

LANGUAGE_GAINS: Gains = (("o_proj", 2.0), ("", 1.5))
BIAS_STD = 0.3
NORM_STD = 0.2
# Where queries are normalised, their norm's weights alone say how sharp attention is.
NORM_MEANS = {"q_norm": 2.5}


@dataclass(frozen=True, slots=True)
class Tiny:
    """How a family's checkpoint is made; `text` and `vision` go over what all have in common."""

    architecture: str
    text: dict[str, Any]
    vision: dict[str, Any]
    gains: Gains
    processor: dict[str, Any]


FAMILIES: dict[str, Tiny] = {
    "qwen2-vl": Tiny(
        "Qwen2VLForConditionalGeneration",
        {},
        {"embed_dim": VISION_HIDDEN, "hidden_size": HIDDEN, "mlp_ratio": 2, "patch_size": 14},
        (("visual.patch_embed", 1.0), ("visual.merger.mlp.0", 1.6), ("visual.merger.mlp.2", 1.0), *LANGUAGE_GAINS),
        {},
    ),
    # Two blocks of windows, one of full attention.
    "qwen2.5-vl": Tiny(
        "Qwen2_5_VLForConditionalGeneration",
        {},
        {
            "hidden_size": VISION_HIDDEN,
            "intermediate_size": 2 * VISION_HIDDEN,
            "out_hidden_size": HIDDEN,
            "patch_size": 14,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
        (("visual.patch_embed", 1.0), ("visual.merger.mlp.0", 1.6), ("visual.merger.mlp.2", 1.0), *LANGUAGE_GAINS),
        {},
    ),
    # Heads wider than their share of the hidden size; two levels, the last block gives none.
    "qwen3-vl": Tiny(
        "Qwen3VLForConditionalGeneration",
        {"head_dim": 32, "rope_parameters": {"rope_theta": 10.0, "mrope_section": [6, 5, 5]}},
        {
            "hidden_size": VISION_HIDDEN,
            "intermediate_size": 2 * VISION_HIDDEN,
            "out_hidden_size": HIDDEN,
            "patch_size": 16,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        (
            ("visual.patch_embed", 1.0),
            ("visual.pos_embed", 2.0),
            ("visual.merger.linear_fc1", 1.6),
            ("visual.merger.linear_fc2", 1.0),
            ("deepstack_merger_list", 2.0),
            *LANGUAGE_GAINS,
        ),
        {"patch_size": 16, "size": {"shortest_edge": 4096, "longest_edge": 65536}},
    ),
}


def make_tiny(family: str, directory: Path, seed: int = DEFAULT_SEED, base: Path = DEMO_DIR) -> Path:
    """Writes the checkpoint of `seed`; tokenizer, template and processor settings are those of `base`.

    Equal seeds give equal weights (one generator, parameters in the order of their names).
    """
    directory.mkdir(parents=True, exist_ok=True)
    tiny = FAMILIES[family]
    stock: Any = getattr(transformers, tiny.architecture)
    model = stock(stock.config_class(**_config(tiny, json.loads((base / "config.json").read_text()))))
    _fill(model, np.random.default_rng(seed), tiny.gains)
    model.save_pretrained(directory)
    for name in SIDE_FILES:  # after saving, so that the generation settings are the base's
        shutil.copyfile(base / name, directory / name)
    processor = json.loads((directory / "preprocessor_config.json").read_text()) | tiny.processor
    (directory / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
    return directory


def make_tiny_llama(directory: Path, seed: int = DEFAULT_SEED, base: Path = DEMO_DIR, **text: Any) -> Path:
    """The same for a model of text alone: grouped queries, the head tied to the embeddings. `text` goes over its
    config."""
    directory.mkdir(parents=True, exist_ok=True)
    config = _text_config(json.loads((base / "config.json").read_text())) | {"tie_word_embeddings": True} | text
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    _fill(model, np.random.default_rng(seed), LANGUAGE_GAINS)
    model.save_pretrained(directory)
    for name in set(SIDE_FILES) - {"preprocessor_config.json"}:
        shutil.copyfile(base / name, directory / name)
    return directory


def make_tiny_qwen2_5_vl(directory: Path, seed: int, base: Path) -> Path:
    return make_tiny("qwen2.5-vl", directory, seed, base)


def _config(tiny: Tiny, base: dict[str, Any]) -> dict[str, Any]:
    """Three language layers with grouped queries, three vision blocks."""
    text = _text_config(base)
    text["rope_parameters"] |= {"mrope_section": [2, 3, 3]}
    text |= tiny.text
    text["rope_parameters"] = {"rope_type": "default", **text["rope_parameters"]}
    vision = {"depth": 3, "num_heads": 2, "spatial_merge_size": 2, "temporal_patch_size": 2} | tiny.vision
    special = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return {
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": False,
        **{name: base[name] for name in special},
    }


def _text_config(base: dict[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": base["text_config"]["vocab_size"],
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10.0},
        "bos_token_id": base["text_config"]["pad_token_id"],
        "eos_token_id": base["text_config"]["eos_token_id"],
        "pad_token_id": base["text_config"]["pad_token_id"],
    }


def _fill(model: nn.Module, rng: np.random.Generator, gains: Gains) -> None:
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = _scaled(name, rng.standard_normal(weight.shape), gains)
            weight.copy_(torch.from_numpy(noise.astype(np.float32)))


def _scaled(name: str, noise: Noise, gains: Gains) -> Noise:
    if name.endswith("bias"):
        return BIAS_STD * noise
    if noise.ndim == 1:
        return NORM_MEANS.get(name.split(".")[-2], 1.0) + NORM_STD * noise
    if "embed_tokens" in name:
        return noise
    gain = next(gain for part, gain in gains if part in name)
    return gain / math.sqrt(noise[0].size) * noise
