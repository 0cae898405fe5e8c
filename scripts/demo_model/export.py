"""Writes a directory that stock `transformers` loads: bf16 weights, configuration, tokenizer, template, processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import Qwen2_5_VLForConditionalGeneration

from scripts.demo_model import tokenizer as tokenizers_of_ours
from scripts.demo_model.pack import IMAGE_MEAN, IMAGE_STD
from scripts.demo_model.scenes import MAX_PIXELS, MIN_PIXELS

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] in ('image', 'image_url', 'input_image') or 'image' in part or 'image_url' in part -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

PROCESSOR: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": list(IMAGE_MEAN),
    "image_processor_type": "Qwen2VLImageProcessor",
    "image_std": list(IMAGE_STD),
    "merge_size": 2,
    "patch_size": 14,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"longest_edge": MAX_PIXELS, "shortest_edge": MIN_PIXELS},
    "temporal_patch_size": 2,
}


def export(
    model: Qwen2_5_VLForConditionalGeneration,
    weights: dict[str, torch.Tensor],
    tokenizer: Tokenizer,
    directory: Path,
) -> None:
    """Exports `weights` (named as `model.named_parameters()` names them) in bf16; `model` itself is not changed."""
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, state_dict=_bf16_state(model, weights))
    (directory / "model.safetensors").chmod(0o644)
    _write_config(directory)
    tokenizers_of_ours.save(tokenizer, directory)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    _write_json(directory / "preprocessor_config.json", PROCESSOR)
    _write_json(directory / "generation_config.json", _generation(tokenizer))


def _bf16_state(model: Qwen2_5_VLForConditionalGeneration, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    state = {name: weights.get(name, tensor) for name, tensor in model.state_dict().items()}
    state.pop("lm_head.weight", None)  # tied to the embeddings; a copy would be saved twice
    return {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in state.items()}


def _write_config(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    _set_dtype(config)
    config["dtype"] = "bfloat16"
    _write_json(directory / "config.json", config)


def _set_dtype(config: dict[str, Any]) -> None:
    """The parts' own dtype entries would name the training precision; the outer one alone is kept."""
    for part in config.values():
        if isinstance(part, dict):
            part.pop("dtype", None)


def _generation(tokenizer: Tokenizer) -> dict[str, Any]:
    end_of_text, end_of_turn = (
        tokenizers_of_ours.token_id(tokenizer, "<|endoftext|>"),
        tokenizers_of_ours.token_id(tokenizer, "<|im_end|>"),
    )
    return {
        "do_sample": False,
        "eos_token_id": [end_of_turn, end_of_text],
        "max_new_tokens": 96,
        "pad_token_id": end_of_text,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
