"""The stock modules' mathematics for training batches, without their per-window and per-picture Python loops.

Weights stay in the stock `Qwen2_5_VLForConditionalGeneration`; only the order of computation differs: all pictures
of a call share one grid, so a vision block is one dense attention with a window mask, and branch-packed rows need a
mask that the stock forward does not build. The unit tests compare both with the stock modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.demo_model.pack import Batch, normalised
from scripts.demo_model.scenes import Grid

Rotary = tuple[Tensor, Tensor]


def encode_pictures(visual: Any, patches: Tensor, grid: Grid) -> Tensor:
    """uint8 patches (pictures, patches, 588) of one grid -> merged tokens (pictures, tokens, out_hidden_size)."""
    rotary, windows = _vision_rotary(visual, grid), _window_mask(grid, _window_tokens(visual.config))
    weight = visual.patch_embed.proj.weight
    # A still picture fills both temporal frames, so the two kernels act as their sum.
    x = F.linear(normalised(patches), weight.sum(2).flatten(1))
    for index, block in enumerate(visual.blocks):
        mask = None if index in visual.config.fullatt_block_indexes else windows
        x = x + _vision_attention(block.attn, _norm(block.norm1, x), rotary, mask)
        x = x + _mlp(block.mlp, _norm(block.norm2, x))
    merged: Tensor = visual.merger.mlp(_norm(visual.merger.ln_q, x).reshape(x.shape[0], x.shape[1] // 4, -1))
    return merged


def _vision_attention(attention: Any, x: Tensor, rotary: Rotary, mask: Tensor | None) -> Tensor:
    pictures, patches, width = x.shape
    qkv = attention.qkv(x).view(pictures, patches, 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
    q, k = _rotated(qkv[0], rotary), _rotated(qkv[1], rotary)
    mixed = F.scaled_dot_product_attention(q, k, qkv[2], attn_mask=mask)
    out: Tensor = attention.proj(mixed.transpose(1, 2).reshape(pictures, patches, width))
    return out


def _vision_rotary(visual: Any, grid: Grid) -> Rotary:
    rows, columns = grid
    h, w = torch.meshgrid(torch.arange(2 * rows), torch.arange(2 * columns), indexing="ij")
    order = [p.view(rows, 2, columns, 2).transpose(1, 2).flatten() for p in (h, w)]
    angles = torch.cat([p[:, None].float() * visual.rotary_pos_emb.inv_freq for p in order], dim=-1)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def _window_tokens(config: Any) -> int:
    return int(config.window_size // config.patch_size // config.spatial_merge_size)


@lru_cache(maxsize=256)
def _window_mask(grid: Grid, side: int) -> Tensor:
    """(patches, patches) bool: true where both patches lie in the same window of `side` x `side` tokens."""
    rows, columns = grid
    window = (torch.arange(rows) // side)[:, None] * columns + (torch.arange(columns) // side)[None, :]
    owner = window.flatten().repeat_interleave(4)
    return owner[:, None] == owner[None, :]


def run_language(model: Any, embeds: Tensor, batch: Batch, tap_layer: int) -> tuple[Tensor, Tensor]:
    """Hidden states (rows, L, width) after the last norm, and those after layer `tap_layer` for the helper heads."""
    rotary = _language_rotary(model, batch.positions)
    mask = branch_mask(batch.segments)[:, None]
    x = tapped = embeds
    for index, layer in enumerate(model.layers):
        x = x + _attention(layer.self_attn, _norm(layer.input_layernorm, x), rotary, mask)
        x = x + _mlp(layer.mlp, _norm(layer.post_attention_layernorm, x))
        if index == tap_layer:
            tapped = x
    return _norm(model.norm, x), tapped


def branch_mask(segments: Tensor) -> Tensor:
    """(rows, L, L) bool: a token sees earlier tokens of the prefix and of its own branch (and always itself)."""
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    same = segments[:, :, None] == segments[:, None, :]
    return causal & (same | (segments == 0)[:, None, :])


def _language_rotary(model: Any, positions: Tensor) -> Rotary:
    cos, sin = model.rotary_emb(torch.empty(0), positions)
    return cos[:, None], sin[:, None]


def _attention(attention: Any, x: Tensor, rotary: Rotary, mask: Tensor) -> Tensor:
    rows, length, width = x.shape
    size = attention.head_dim
    q, k, v = (
        projection(x).view(rows, length, -1, size).transpose(1, 2)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    groups = attention.num_key_value_groups
    k, v = _rotated(k, rotary).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    mixed = F.scaled_dot_product_attention(_rotated(q, rotary), k, v, attn_mask=mask)
    out: Tensor = attention.o_proj(mixed.transpose(1, 2).reshape(rows, length, width))
    return out


def _rotated(x: Tensor, rotary: Rotary) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * rotary[0] + torch.cat((-second, first), dim=-1) * rotary[1]


def _norm(norm: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)


def _mlp(mlp: Any, x: Tensor) -> Tensor:
    out: Tensor = mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    return out


def embed(language: Any, batch: Batch, tokens: Sequence[Tensor]) -> Tensor:
    """Text embeddings with each row's picture tokens put in their places."""
    embeds: Tensor = language.embed_tokens(batch.ids)
    if not tokens:
        return embeds
    pictures = torch.cat(list(tokens), dim=1).flatten(0, 1)
    return embeds.masked_scatter(batch.is_picture[..., None], pictures)
