"""The language part of a checkpoint as transformers computes it, attention apart. What a family does differently is a
subclass of `StockLanguage`."""

from __future__ import annotations

from typing import Any

import torch

from triptych.model.loader import count_parameters
from triptych.model.paged import PagedBatch
from triptych.model.parts import EmbeddingLevels


class StockLanguage:
    """LanguagePart over the text model and its head."""

    def __init__(self, model: Any, head: torch.Tensor, num_embedding_levels: int) -> None:
        self.model = model
        self.head = head
        self.device, self.dtype = head.device, head.dtype
        self.num_embedding_levels = num_embedding_levels
        tied = head.data_ptr() == model.embed_tokens.weight.data_ptr()
        self.num_parameters = count_parameters(model) + (0 if tied else head.numel())

    @torch.inference_mode()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.model.embed_tokens(ids)
        return rows

    @torch.inference_mode()
    def hidden(
        self, embeddings: torch.Tensor, positions: torch.Tensor, batch: PagedBatch, levels: EmbeddingLevels | None
    ) -> torch.Tensor:
        assert levels is None, "this family takes one level"
        out = self.model(
            inputs_embeds=embeddings.unsqueeze(0),
            position_ids=self.position_ids(positions),
            use_cache=False,
            paged=batch,
        )
        last: torch.Tensor = out.last_hidden_state[0]
        return last

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, self.head).float()

    def position_ids(self, positions: torch.Tensor) -> torch.Tensor:
        """(axes, tokens) as the text model takes them; text alone has one axis, which counts as the batch."""
        return positions
