"""Rotary positions (RoFormer, arXiv:2104.09864), on one axis or on several (M-RoPE, Qwen2-VL, arXiv:2409.12191)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosine, and sine with the sign of its half: (rows, 1, head_dim) each."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """Turns pairs (i, i + head_dim / 2) of a head.

    Attributes:
        frequencies: of each pair, float32 (head_dim / 2,).
        axes: which axis of the positions turns it, int64 (head_dim / 2,); None where there is one axis.
        scaling: of cosine and sine, for stretched contexts.
    """

    frequencies: torch.Tensor
    axes: torch.Tensor | None
    scaling: float

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> Angles:
        """For (axes, rows) int64 positions."""
        of_pairs = positions[0, :, None] if self.axes is None else positions.T[:, self.axes]
        turned = of_pairs.to(torch.float32) * self.frequencies
        cos, sin = turned.cos() * self.scaling, turned.sin() * self.scaling
        return (
            torch.cat((cos, cos), dim=-1).to(dtype).unsqueeze(1),
            torch.cat((-sin, sin), dim=-1).to(dtype).unsqueeze(1),
        )


def turn(heads: torch.Tensor, angles: Angles) -> None:
    """Rotates (rows, heads, head_dim) in place."""
    cos, sin = angles
    half = heads.shape[-1] // 2
    other = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
    heads.mul_(cos).addcmul_(other, sin)


def rotary_of(module: Any, num_axes: int) -> Rotary:
    """What one of transformers' rotary modules does to positions on that many axes: asked of itself, axis by axis, by
    turning that one alone."""
    frequencies = module.inv_freq.to(torch.float32)
    axes = None
    if num_axes > 1:
        positions = torch.eye(num_axes, dtype=torch.int64, device=frequencies.device)[:, None]
        _, sin = module(frequencies.view(1, 1, -1), positions.expand(num_axes, 1, num_axes))
        axes = (sin[0, :, : len(frequencies)] != 0).to(torch.int64).argmax(dim=0)
    return Rotary(frequencies, axes, float(module.attention_scaling))
