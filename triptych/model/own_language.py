"""The language part of the families that we know, without transformers' modules: one call for each thing that is done.

A decoder layer, with its weights fused and packed (`linear.py`):

    rows ─ norm ─ q k v ─ (norm of heads) ─ rotary ─ pages ─ attention ─ o ─(+)─ norm ─ silu(gate) * up ─ down ─(+)─
      └────────────────────────────────────────────────────────────────────┘ └───────────────────────────────┘

transformers stays the reference (tests/parity): docs/adr/0005-own-decoder-forward.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from triptych.model.linear import Linear
from triptych.model.paged import PagedBatch
from triptych.model.parts import EmbeddingLevels
from triptych.model.rotary import Rotary, turn


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer. `qkv` gives queries, keys and values of all heads, in this order; `head_norms` are of each
    head of queries, and of keys, (head_dim,), where the family has them."""

    attention_norm: torch.Tensor
    qkv: Linear
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    out: Linear
    mlp_norm: torch.Tensor
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Decoder:
    """All of a language model.

    Attributes:
        table: the embeddings, (vocabulary, hidden).
        head: gives logits; its weights may be the table's.
        epsilon: of every RMSNorm.
    """

    table: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: Linear
    rotary: Rotary
    num_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float


class OwnLanguage:
    """LanguagePart over a `Decoder`."""

    def __init__(self, decoder: Decoder, num_parameters: int, num_embedding_levels: int) -> None:
        self.decoder = decoder
        self.device, self.dtype = decoder.table.device, decoder.table.dtype
        self.num_parameters = num_parameters
        self.num_embedding_levels = num_embedding_levels

    @torch.inference_mode()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.decoder.table.index_select(0, ids)

    @torch.inference_mode()
    def hidden(
        self, embeddings: torch.Tensor, positions: torch.Tensor, batch: PagedBatch, levels: EmbeddingLevels | None
    ) -> torch.Tensor:
        decoder, rows = self.decoder, embeddings
        angles = decoder.rotary.angles(positions, self.dtype)
        further: Sequence[torch.Tensor] = levels.levels if levels is not None else ()
        for index, layer in enumerate(decoder.layers):
            rows = self._attention(index, layer, rows, angles, batch)
            rows = self._mlp(layer, rows)
            if levels is not None and index < len(further):
                rows.index_add_(0, levels.rows, further[index].to(rows.dtype))
        return self._norm(rows, decoder.norm)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.decoder.head(hidden).float()

    def _attention(
        self, index: int, layer: Layer, rows: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], batch: PagedBatch
    ) -> torch.Tensor:
        decoder = self.decoder
        heads = layer.qkv(self._norm(rows, layer.attention_norm)).view(rows.shape[0], -1, decoder.head_dim)
        rotated = heads[:, : decoder.num_heads + decoder.num_kv_heads]
        if layer.head_norms is not None:
            for part, weight in zip(rotated.tensor_split([decoder.num_heads], dim=1), layer.head_norms, strict=True):
                part.copy_(self._norm(part, weight))
        turn(rotated, angles)
        new = heads[:, decoder.num_heads :]
        batch.write(index, new)
        attended = batch.attend(index, heads[:, : decoder.num_heads], new, decoder.head_dim**-0.5)
        return layer.out.plus(attended.reshape(rows.shape[0], -1), rows)

    def _mlp(self, layer: Layer, rows: torch.Tensor) -> torch.Tensor:
        normed = self._norm(rows, layer.mlp_norm)
        return layer.down.plus(layer.up.times(normed, layer.gate.silu(normed)), rows)

    def _norm(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.rms_norm(rows, weight.shape, weight, self.decoder.epsilon)
