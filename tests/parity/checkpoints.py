"""A tiny random Qwen2.5-VL checkpoint whose answers react to everything that may go wrong.

Random weights as a library initialises them are a bad witness: attention is nearly uniform, pictures hardly reach the
logits, and greedy output falls into a loop that hides any fault. Here every part is scaled on purpose: attention is
sharp, the rows of a picture are as loud as those of words, what attention adds to the residual outweighs the token
itself (so that outputs do not loop), and the rotary base is small enough that one row or column turns every pair of
the head. `test_parity_checkpoint_is_a_witness` shows what that buys.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import torch
from torch import nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

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

# Standard deviation of each weight as a multiple of 1 / sqrt(fan-in); the first matching name wins.
GAINS: tuple[tuple[str, float], ...] = (
    ("visual.patch_embed", 1.0),
    ("visual.merger.mlp.0", 1.6),
    ("visual.merger.mlp.2", 1.0),
    ("attn.qkv", 1.5),
    ("attn.proj", 1.5),
    ("q_proj", 1.5),
    ("k_proj", 1.5),
    ("v_proj", 1.5),
    ("o_proj", 2.0),
    ("lm_head", 1.5),
    ("", 1.5),
)
BIAS_STD = 0.3
NORM_STD = 0.2


def tiny_config(vocab_size: int, special: dict[str, int]) -> Qwen2_5_VLConfig:
    """Three language layers, three vision blocks (two of windows, one of full attention), grouped queries."""
    text = {
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10.0, "mrope_section": [2, 3, 3]},
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "bos_token_id": special["pad"],
        "eos_token_id": special["eos"],
        "pad_token_id": special["pad"],
    }
    vision = {
        "depth": 3,
        "hidden_size": VISION_HIDDEN,
        "num_heads": 2,
        "intermediate_size": 2 * VISION_HIDDEN,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 56,
        "fullatt_block_indexes": [1],
        "out_hidden_size": HIDDEN,
        "tokens_per_second": 2,
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=special["image"],
        video_token_id=special["video"],
        vision_start_token_id=special["vision_start"],
        vision_end_token_id=special["vision_end"],
        tie_word_embeddings=False,
    )


def make_tiny_qwen2_5_vl(directory: Path, seed: int, base: Path) -> Path:
    """Writes the checkpoint of `seed`; tokenizer, template and processor settings are those of `base`.

    Equal seeds give equal weights (one generator, parameters in the order of their names).
    """
    directory.mkdir(parents=True, exist_ok=True)
    base_config = json.loads((base / "config.json").read_text())
    special = {
        "pad": base_config["text_config"]["pad_token_id"],
        "eos": base_config["text_config"]["eos_token_id"],
        "image": base_config["image_token_id"],
        "video": base_config["video_token_id"],
        "vision_start": base_config["vision_start_token_id"],
        "vision_end": base_config["vision_end_token_id"],
    }
    model = Qwen2_5_VLForConditionalGeneration(tiny_config(base_config["text_config"]["vocab_size"], special))
    _fill(model, torch.Generator().manual_seed(seed))
    model.save_pretrained(directory)
    for name in SIDE_FILES:  # after saving, so that the generation settings are the base's
        shutil.copyfile(base / name, directory / name)
    return directory


def _fill(model: nn.Module, generator: torch.Generator) -> None:
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(_scaled(name, noise))


def _scaled(name: str, noise: torch.Tensor) -> torch.Tensor:
    if name.endswith("bias"):
        return BIAS_STD * noise
    if noise.ndim == 1:
        return 1.0 + NORM_STD * noise
    if "embed_tokens" in name:
        return noise
    gain = next(gain for part, gain in GAINS if part in name)
    return gain / math.sqrt(noise[0].numel()) * noise
