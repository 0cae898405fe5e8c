"""The two halves of a loaded model, as the engines use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from PIL import Image

from triptych.core.plan import Grid
from triptych.model.paged import PagedBatch


class VisionPart(Protocol):
    """The tower alone.

    `row_elements` is the width of an embedding row, `patch_elements` that of a patch; `num_parameters` counts what was
    loaded.
    """

    dtype: torch.dtype
    device: torch.device
    row_elements: int
    patch_elements: int
    num_parameters: int

    def preprocess(self, image: Image.Image) -> tuple[torch.Tensor, Grid]:
        """Pixels of an upright RGB picture: (patches, patch_elements) float32 on the host, and their grid."""
        ...

    def encode(self, pixels: Sequence[torch.Tensor], grids: Sequence[Grid]) -> list[torch.Tensor]:
        """One forward pass over all pictures; for each (num_tokens, row_elements) in the part's dtype."""
        ...


class LanguagePart(Protocol):
    """The language model alone; attention goes through the paged pool given with each batch."""

    dtype: torch.dtype
    device: torch.device
    num_parameters: int

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """(tokens,) int64 vocabulary ids -> (tokens, hidden)."""
        ...

    def hidden(self, embeddings: torch.Tensor, positions: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """(tokens, hidden) rows of all sequences packed, (axes, tokens) positions -> (tokens, hidden). Writes K and V
        of every row into the batch's pages."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, hidden) -> (rows, vocabulary) float32."""
        ...
