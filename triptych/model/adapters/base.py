"""What a model family does differently. Importing an adapter imports no torch: the router uses its pure half.

A module in this folder that defines a subclass with an `architecture` is found by itself (`triptych.model.registry`).
"""

from __future__ import annotations

import enum
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from triptych.core.errors import StartupError
from triptych.core.expansion import IdArray, expand
from triptych.core.plan import Grid, Item, ItemFormat, Modality
from triptych.mm.identity import caller_identity, item_identity, tensor_identity
from triptych.mm.mrope import PositionArray
from triptych.mm.sentinels import SENTINEL_BASE, item_sentinels
from triptych.mm.tensor import TensorValue
from triptych.model.checkpoint_files import (
    CONFIG_FILE,
    GENERATION_FILE,
    PROCESSOR_FILE,
    Table,
    optional_json,
    read_json,
)
from triptych.model.fingerprint import checkpoint_fingerprint

if TYPE_CHECKING:
    import torch

    from triptych.model.parts import LanguagePart, VisionPart

MAX_SEQUENCE_TOKENS = 2**21
"""The most that the wire carries (`rpc/convert/limits.py`): a worker that said more would not be heard."""
DECLARED_DTYPES = ("float32", "bfloat16", "float16", "float64")


class AttentionKind(enum.Enum):
    """May a chunk or a page cut an item? Only `CAUSAL` says yes."""

    CAUSAL = "causal"
    ITEM_BIDIRECTIONAL = "item_bidirectional"
    PROMPT_BIDIRECTIONAL = "prompt_bidirectional"


class ExtraInput(enum.Enum):
    """What the language model takes besides a row of embeddings for each token."""

    EMBEDDING_LEVELS = "embedding levels"
    """More rows for each token of an item, which go into its first layers (DeepStack, arXiv:2406.04334)."""


@dataclass(frozen=True, slots=True)
class ItemLayout:
    """An item's place in a prompt, from its size alone. Each run is one placeholder in the chat template's output."""

    grid: Grid
    run_lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.run_lengths)


@dataclass(frozen=True, slots=True)
class KvShape:
    """Shape of one token's K (or V) over the whole model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


class Adapter(ABC):
    """One checkpoint of one family. Read once at start; immutable afterwards.

    Attributes:
        architecture: the name that config.json gives it.
        family: its name in words.
        modalities: what may stand in a prompt besides text; empty for a model of text alone, which has no tower.
        attention: see AttentionKind.
        extra_inputs: what the language model takes besides embeddings, positions and pages.
        processor_version: changes whenever our own processing of the media does.
        model_name: the name that the API shows (the folder's).
        fingerprint: 32 bytes over config and weights.
        kv_shape: of one token's K (or V).
        declared_dtype: the number format that config.json names. Not the one that a worker computes in, which the
            router cannot know and which the keys of a worker's caches and the layouts of its arenas hold
            (docs/identity.md).
        num_embedding_levels: further levels of an embedding row, besides the first.
        processing_key: canonical bytes of everything in the processor that changes pixels.
    """

    architecture: ClassVar[str]
    family: ClassVar[str]
    modalities: ClassVar[tuple[Modality, ...]] = (Modality.IMAGE,)
    attention: ClassVar[AttentionKind] = AttentionKind.CAUSAL
    extra_inputs: ClassVar[tuple[ExtraInput, ...]] = ()
    processor_version: ClassVar[str] = "1"

    def __init__(self, model_dir: Path) -> None:
        """Raises StartupError that names the field or file that cannot be."""
        self.model_dir = model_dir
        self.config = read_json(model_dir / CONFIG_FILE)
        self.model_name = model_dir.name
        self.text_config = self._read_text_config()
        self.vocab_size = self.text_config.positive("vocab_size")
        self.hidden_size = self.text_config.positive("hidden_size")
        self.max_sequence_tokens = self.text_config.positive("max_position_embeddings")
        self.kv_shape = self._read_kv_shape()
        self.num_embedding_levels = 0
        self.eos_token_ids = self._read_eos()
        self.declared_dtype = self._read_declared_dtype()
        self.processing_key = self._read_processing_key()
        if self.max_sequence_tokens > MAX_SEQUENCE_TOKENS:
            self.text_config.refuse("max_position_embeddings", f"and at most {MAX_SEQUENCE_TOKENS} can be served")
        if self.vocab_size > SENTINEL_BASE:
            self.text_config.refuse("vocab_size", f"and at most {SENTINEL_BASE} can be served")
        if self.config.get("quantization_config") is not None:
            raise StartupError(
                f"{CONFIG_FILE}: quantization_config asks for quantized weights, which are not served yet"
            )
        self.fingerprint = checkpoint_fingerprint(model_dir)

    @property
    def row_elements(self) -> int:
        """Width of an embedding row as it moves between stages: the first level, then the others in order."""
        return (1 + self.num_embedding_levels) * self.hidden_size

    @property
    def lookup_id(self) -> int:
        """What is looked up in the embedding table in place of a sentinel; its row is overwritten."""
        return self.placeholder_id(self.modalities[0]) if self.modalities else 0

    @property
    def image_placeholder_id(self) -> int | None:
        """The token that the chat template writes for a picture; None for a model that takes none."""
        return self.placeholder_id(Modality.IMAGE) if Modality.IMAGE in self.modalities else None

    def identity(self, modality: Modality, media: bytes, tenant_salt: bytes = b"") -> bytes:
        """The item's identity for this checkpoint (32 bytes)."""
        return item_identity(
            model_fingerprint=self.fingerprint,
            vision_dtype=self.declared_dtype,
            processor_version=f"{self.architecture}/{self.processor_version}",
            modality=modality,
            processing_key=self.processing_key,
            tenant_salt=tenant_salt,
            media=media,
        )

    def tensor_identity(
        self,
        modality: Modality,
        format: ItemFormat,  # noqa: A002 - the field's name everywhere
        grid: Grid,
        tensor: TensorValue,
        tenant_salt: bytes = b"",
    ) -> bytes:
        """The same for a processor's output or an embedding."""
        return tensor_identity(
            model_fingerprint=self.fingerprint,
            vision_dtype=self.declared_dtype,
            processor_version=f"{self.architecture}/{self.processor_version}",
            modality=modality,
            processing_key=self.processing_key,
            tenant_salt=tenant_salt,
            format=format,
            grid=grid,
            tensor=tensor,
        )

    def caller_identity(
        self, modality: Modality, grid: Grid, num_tokens: int, caller_hash: bytes, tenant_salt: bytes = b""
    ) -> bytes:
        """The same for media that a trusted caller names by a hash of its own."""
        return caller_identity(
            model_fingerprint=self.fingerprint,
            vision_dtype=self.declared_dtype,
            processor_version=f"{self.architecture}/{self.processor_version}",
            modality=modality,
            processing_key=self.processing_key,
            tenant_salt=tenant_salt,
            grid=grid,
            num_tokens=num_tokens,
            caller_hash=caller_hash,
        )

    def check_layout(self, item: Item) -> None:  # noqa: B027 - a family may have nothing to check
        """Raises MediaMismatch when an item's grid and token count cannot belong together. A family that can tell them
        apart overrides this: what comes from the wire is not to be trusted before."""

    def expand(self, compact_ids: Sequence[int], items: Sequence[Item]) -> IdArray:
        """The prompt with every item's rows filled by its sentinels: int64 (prompt_tokens,). Raises MediaMismatch."""
        return expand(compact_ids, items, [item_sentinels(item.identity, item.num_tokens) for item in items])

    def check_depths(self, num_tensors: int) -> None:  # noqa: B027 - a family may have nothing to check
        """Raises StartupError when config.json has more layers than `num_tensors`, all that the checkpoint has."""

    @abstractmethod
    def image_layout(self, width_px: int, height_px: int) -> ItemLayout:
        """From the size after EXIF orientation. Raises MediaInvalid for a shape that the family cannot take."""

    @abstractmethod
    def placeholder_id(self, modality: Modality) -> int:
        """The token that the chat template writes for an item. Raises ModalityUnsupported."""

    @abstractmethod
    def positions(self, num_tokens: int, items: Sequence[Item]) -> tuple[PositionArray, int]:
        """Position ids (axes, num_tokens) int64 of a prompt, and the delta of the tokens that follow it."""

    @abstractmethod
    def load_vision(self, dtype: torch.dtype, device: torch.device) -> VisionPart:
        """Only the vision tower's weights. Raises StartupError naming a missing or unexpected tensor."""

    @abstractmethod
    def load_language(self, dtype: torch.dtype, device: torch.device) -> LanguagePart:
        """Only the language model's weights. Raises StartupError naming a missing or unexpected tensor."""

    def _read_text_config(self) -> Table:
        """The language model's part of config.json; older checkpoints have it at the top."""
        whole = Table(self.config, CONFIG_FILE)
        return whole.table("text_config") if "text_config" in whole else whole

    def _read_kv_shape(self) -> KvShape:
        text = self.text_config
        layers, heads = text.positive("num_hidden_layers"), text.positive("num_attention_heads")
        kv_heads = text.positive("num_key_value_heads")
        if heads % kv_heads:
            text.refuse("num_key_value_heads", f"which does not divide the {heads} attention heads")
        return KvShape(layers, kv_heads, self._read_head_dim(heads))

    def _read_head_dim(self, heads: int) -> int:
        if self.hidden_size % heads:
            self.text_config.refuse("num_attention_heads", f"which does not divide the hidden size {self.hidden_size}")
        return self.hidden_size // heads

    def _read_eos(self) -> frozenset[int]:
        generation = Table(optional_json(self.model_dir / GENERATION_FILE), GENERATION_FILE)
        for table in (generation, self.text_config, Table(self.config, CONFIG_FILE)):
            if "eos_token_id" in table:
                return self._token_ids(table, "eos_token_id")
        return frozenset()

    def _token_ids(self, table: Table, field: str) -> frozenset[int]:
        """One id or several."""
        value = table.values[field]
        ids = value if isinstance(value, list) else [value]
        if not ids:
            table.refuse(field, "but an answer needs a token to end with")
        return frozenset(
            Table({field: each}, table.file, table.prefix).token_id(field, self.vocab_size) for each in ids
        )

    def _read_declared_dtype(self) -> str:
        whole = Table(self.config, CONFIG_FILE)
        field = next((field for field in ("dtype", "torch_dtype") if field in whole), None)
        if field is None:
            return "float32"
        named = whole.values[field]
        if not isinstance(named, str) or named not in DECLARED_DTYPES:
            whole.refuse(field, f"and it should be one of {', '.join(DECLARED_DTYPES)}")
        return named

    def _read_processing_key(self) -> bytes:
        settings = optional_json(self.model_dir / PROCESSOR_FILE)
        return json.dumps(settings, sort_keys=True).encode() if settings else b""
