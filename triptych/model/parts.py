"""The two halves of a loaded model, as the engines use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from triptych.core.plan import Grid
from triptych.media.frames import Target
from triptych.model.paged import PagedBatch


@dataclass(frozen=True, slots=True)
class EmbeddingLevels:
    """The further levels of the embedding rows in a step, for families that have them.

    Attributes:
        rows: which rows of the packed step they belong to, int64 (count,), ascending; counted on the host.
        levels: for each level (count, hidden).
    """

    rows: torch.Tensor
    levels: tuple[torch.Tensor, ...]


class VisionPart(Protocol):
    """The tower alone.

    `row_elements` is the width of an embedding row: all its levels, the first one first. `patch_elements` is that of a
    patch. `num_parameters` counts what was loaded.
    """

    dtype: torch.dtype
    device: torch.device
    row_elements: int
    patch_elements: int
    num_parameters: int

    def target(self, grid: Grid) -> Target:
        """What a picture is resized to before it is cut into the patches of `grid`."""
        ...

    def patches(self, picture: npt.NDArray[np.uint8]) -> torch.Tensor:
        """(height, width, 3) of a target's size -> (patches, patch_elements) float32 on the host. Any thread."""
        ...

    def encode(self, pixels: Sequence[torch.Tensor], grids: Sequence[Grid]) -> list[torch.Tensor]:
        """One forward pass over all pictures; for each (num_tokens, row_elements) in the part's dtype."""
        ...


class LanguagePart(Protocol):
    """The language model alone; attention goes through the paged pool given with each batch.

    `num_embedding_levels` is how many further levels it takes of each embedding row.
    """

    dtype: torch.dtype
    device: torch.device
    num_parameters: int
    num_embedding_levels: int

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """(tokens,) int64 vocabulary ids -> (tokens, hidden)."""
        ...

    def hidden(
        self, embeddings: torch.Tensor, positions: torch.Tensor, batch: PagedBatch, levels: EmbeddingLevels | None
    ) -> torch.Tensor:
        """(tokens, hidden) rows of all sequences packed, (axes, tokens) positions -> (tokens, hidden). Writes K and V
        of every row into the batch's pages. `levels` is None when the step has no embedding row, and for families
        without further levels."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, hidden) -> (rows, vocabulary) float32."""
        ...
