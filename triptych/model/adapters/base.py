"""What a model family does differently. Importing an adapter imports no torch: the router uses its pure half."""

from __future__ import annotations

import enum
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from triptych.core.errors import StartupError
from triptych.core.expansion import IdArray, expand
from triptych.core.plan import Grid, Item, ItemFormat, Modality
from triptych.mm.identity import item_identity, tensor_identity
from triptych.mm.mrope import PositionArray
from triptych.mm.sentinels import SENTINEL_BASE, item_sentinels
from triptych.mm.tensor import TensorValue
from triptych.model.fingerprint import checkpoint_fingerprint

if TYPE_CHECKING:
    import torch

    from triptych.model.parts import LanguagePart, VisionPart


class AttentionKind(enum.Enum):
    """May a chunk or a page cut an item? Only `CAUSAL` says yes."""

    CAUSAL = "causal"
    ITEM_BIDIRECTIONAL = "item_bidirectional"
    PROMPT_BIDIRECTIONAL = "prompt_bidirectional"


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
        model_name: the name that the API shows (the folder's).
        fingerprint: 32 bytes over config and weights.
        kv_shape: of one token's K (or V).
        attention: see AttentionKind.
        processing_key: canonical bytes of everything in the processor that changes pixels.
    """

    architecture: ClassVar[str]
    attention: ClassVar[AttentionKind] = AttentionKind.CAUSAL
    processor_version: ClassVar[str] = "1"

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self.config = read_json(model_dir / "config.json")
        self.model_name = model_dir.name
        self.fingerprint = checkpoint_fingerprint(model_dir)
        self.vocab_size = required_int(self.text_config, "vocab_size", "config.json")
        self.hidden_size = required_int(self.text_config, "hidden_size", "config.json")
        self.max_sequence_tokens = required_int(self.text_config, "max_position_embeddings", "config.json")
        self.kv_shape = self._read_kv_shape()
        self.eos_token_ids = self._read_eos()
        self.processing_key = self._read_processing_key()
        if self.vocab_size > SENTINEL_BASE:
            raise StartupError(
                f"model {self.model_name!r} has a vocabulary of {self.vocab_size}; the most is {SENTINEL_BASE}"
            )

    @property
    def text_config(self) -> dict[str, Any]:
        """The language model's part of config.json."""
        nested: dict[str, Any] = self.config.get("text_config", self.config)
        return nested

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

    @property
    def declared_dtype(self) -> str:
        """The number format that config.json names. Not the one that a worker computes in, which the router cannot know
        and which the keys of a worker's caches and the layouts of its arenas hold (docs/identity.md)."""
        return str(self.config.get("dtype") or self.config.get("torch_dtype") or "float32")

    def check_layout(self, item: Item) -> None:  # noqa: B027 - a family may have nothing to check
        """Raises MediaMismatch when an item's grid and token count cannot belong together. A family that can tell them
        apart overrides this: what comes from the wire is not to be trusted before."""

    def expand(self, compact_ids: Sequence[int], items: Sequence[Item]) -> IdArray:
        """The prompt with every item's rows filled by its sentinels: int64 (prompt_tokens,). Raises MediaMismatch."""
        return expand(compact_ids, items, [item_sentinels(item.identity, item.num_tokens) for item in items])

    @abstractmethod
    def image_layout(self, width_px: int, height_px: int) -> ItemLayout:
        """From the size after EXIF orientation. Raises MediaInvalid for a shape that the family cannot take."""

    @abstractmethod
    def placeholder_id(self, modality: Modality) -> int:
        """The token that the chat template writes for an item, also looked up in place of sentinels.
        Raises ModalityUnsupported."""

    @abstractmethod
    def positions(self, num_tokens: int, items: Sequence[Item]) -> tuple[PositionArray, int]:
        """Position ids (axes, num_tokens) int64 of a prompt, and the delta of the tokens that follow it."""

    @abstractmethod
    def load_vision(self, dtype: torch.dtype, device: torch.device) -> VisionPart:
        """Only the vision tower's weights. Raises StartupError naming a missing or unexpected tensor."""

    @abstractmethod
    def load_language(self, dtype: torch.dtype, device: torch.device) -> LanguagePart:
        """Only the language model's weights. Raises StartupError naming a missing or unexpected tensor."""

    def _read_kv_shape(self) -> KvShape:
        text = self.text_config
        layers = required_int(text, "num_hidden_layers", "config.json")
        heads = required_int(text, "num_attention_heads", "config.json")
        head_dim = int(text.get("head_dim") or self.hidden_size // heads)
        return KvShape(layers, int(text.get("num_key_value_heads") or heads), head_dim)

    def _read_eos(self) -> frozenset[int]:
        generation = self.model_dir / "generation_config.json"
        found = read_json(generation).get("eos_token_id") if generation.exists() else None
        if found is None:
            found = self.text_config.get("eos_token_id", self.config.get("eos_token_id"))
        return frozenset([found] if isinstance(found, int) else found or [])

    def _read_processing_key(self) -> bytes:
        path = self.model_dir / "preprocessor_config.json"
        return json.dumps(read_json(path), sort_keys=True).encode() if path.exists() else b""


def required_int(config: Mapping[str, Any], field: str, file: str) -> int:
    """A positive number of a checkpoint's `file`, or StartupError naming both."""
    value = config.get(field)
    if not isinstance(value, int) or value < 1:
        found = repr(value) if field in config else "nothing"
        raise StartupError(f"{file} should hold a positive whole number under {field!r}; it holds {found}")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or StartupError naming the file."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise StartupError(f"{path.parent.name}/{path.name} is missing; is --model a checkpoint folder?") from None
    except ValueError as error:
        raise StartupError(f"{path.parent.name}/{path.name} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise StartupError(f"{path.parent.name}/{path.name} should hold a JSON object")
    return value
