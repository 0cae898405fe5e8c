"""The language part of a checkpoint as transformers computes it, attention apart. What a family does differently is a
subclass of `StockLanguage`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from triptych.core.errors import StartupError
from triptych.model.adapters.base import Adapter
from triptych.model.checkpoint_files import CONFIG_FILE
from triptych.model.loader import check_loaded, count_parameters, is_same_tensor, load_part
from triptych.model.paged import PagedBatch
from triptych.model.parts import EmbeddingLevels

HEAD_NAME = "lm_head.weight"
EMBEDDING_NAME = "embed_tokens.weight"


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


Language = TypeVar("Language", bound=StockLanguage)


def load_stock_language(
    adapter: Adapter,
    part: type[Language],
    whole: Any,
    model: Any,
    index: Mapping[str, Path],
    names: Mapping[str, str],
    dtype: torch.dtype,
    device: torch.device,
) -> Language:
    """The weights of the text model and of its head, in a `part`.

    Args:
        whole: the architecture's class on the meta device; `model` is the text model within.
        index: every tensor of the checkpoint; `names`: those of the text model, name within it -> in the checkpoint.

    Raises StartupError.
    """
    load_part(model, index, names, dtype, device, "language")
    model.rotary_emb = type(model.rotary_emb)(model.config).to(device)
    check_loaded(model, "language")
    head = model.embed_tokens.weight
    if not whole.config.tie_word_embeddings:
        if HEAD_NAME not in index:
            raise StartupError(f"the checkpoint lacks the tensor {HEAD_NAME!r}, and its config does not tie the head")
        load_part(whole.lm_head, index, {"weight": HEAD_NAME}, dtype, device, "language head")
        head = whole.lm_head.weight
    elif HEAD_NAME in index and not is_same_tensor(index, HEAD_NAME, names[EMBEDDING_NAME]):
        raise StartupError(f"{CONFIG_FILE} ties the head to the embeddings, but {HEAD_NAME!r} has weights of its own")
    model.train(False)
    return part(model, head.detach(), adapter.num_embedding_levels)
