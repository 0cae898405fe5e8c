"""Sizes of the demo model. Everything is stock Qwen2.5-VL, only smaller.

`rope_theta` is 100 and not a million: at a head size of 40 a large base leaves the width section of the M-RoPE
with angles too slow to tell neighbouring columns apart.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer
from transformers import Qwen2_5_VLConfig

from scripts.demo_model.tokenizer import token_id

TEXT_SIZES: dict[str, Any] = {
    "hidden_size": 160,
    "intermediate_size": 432,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [6, 7, 7]},
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": None,
}
VISION_SIZES: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 96,
    "num_heads": 4,
    "intermediate_size": 256,
    "hidden_act": "silu",
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [1, 3],
    "out_hidden_size": 160,
    "tokens_per_second": 2,
}


def build(tokenizer: Tokenizer) -> Qwen2_5_VLConfig:
    """The configuration for the vocabulary of `tokenizer`."""
    end_of_text, end_of_turn = token_id(tokenizer, "<|endoftext|>"), token_id(tokenizer, "<|im_end|>")
    text = {
        **TEXT_SIZES,
        "vocab_size": tokenizer.get_vocab_size(),
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_turn,
        "pad_token_id": end_of_text,
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=dict(VISION_SIZES),
        image_token_id=token_id(tokenizer, "<|image_pad|>"),
        video_token_id=token_id(tokenizer, "<|video_pad|>"),
        vision_start_token_id=token_id(tokenizer, "<|vision_start|>"),
        vision_end_token_id=token_id(tokenizer, "<|vision_end|>"),
        tie_word_embeddings=True,
    )
