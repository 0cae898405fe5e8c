"""Qwen3-VL's halves: an embedding row carries the levels that some blocks of the tower give (DeepStack), and the
language model adds level *i* to the picture's rows after its layer *i*."""

from __future__ import annotations

from typing import Any

import torch

from triptych.model.paged import PagedBatch
from triptych.model.parts import EmbeddingLevels
from triptych.model.qwen_vl_parts import QwenLanguage, QwenVision


class Qwen3Vision(QwenVision):
    """Rows of (1 + levels) * hidden elements: what the merger gives, then each level in the order of its block."""

    def _rows(self, features: Any) -> list[torch.Tensor]:
        return [
            torch.cat(levels, dim=-1)
            for levels in zip(features.pooler_output, *features.deepstack_features, strict=True)
        ]


class Qwen3Language(QwenLanguage):
    """The stock model is told of the levels by row indices instead of a mask: selecting by a mask makes the host wait
    for the device, and the host knows the rows already."""

    def __init__(self, model: Any, head: torch.Tensor, num_embedding_levels: int) -> None:
        super().__init__(model, head, num_embedding_levels)
        model._deepstack_process = add_level

    @torch.inference_mode()
    def hidden(
        self, embeddings: torch.Tensor, positions: torch.Tensor, batch: PagedBatch, levels: EmbeddingLevels | None
    ) -> torch.Tensor:
        out = self.model(
            inputs_embeds=embeddings.unsqueeze(0),
            position_ids=self.position_ids(positions),
            use_cache=False,
            paged=batch,
            visual_pos_masks=levels.rows if levels is not None else None,
            deepstack_visual_embeds=list(levels.levels) if levels is not None else None,
        )
        last: torch.Tensor = out.last_hidden_state[0]
        return last


def add_level(hidden_states: torch.Tensor, rows: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
    """(1, tokens, hidden) with `level` (count, hidden) added at `rows` (count,), each of which is named once."""
    return hidden_states.index_add(1, rows, level.unsqueeze(0).to(hidden_states.dtype))
