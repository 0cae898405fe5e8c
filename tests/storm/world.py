"""What storms over one model family share: a tiny random checkpoint, its loaded halves, plans, embeddings."""

from __future__ import annotations

import functools
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image

from tests.parity import checkpoints
from tests.storm.prompts import Piece, Prompt
from triptych.core.plan import Item, Modality, Plan, Sampling, TokenRange
from triptych.media.picture import decode_picture, fit
from triptych.model.adapters.base import Adapter
from triptych.model.parts import LanguagePart, VisionPart
from triptych.model.registry import adapter_for

FAMILIES = tuple(checkpoints.FAMILIES)
TIMEOUT_S = 60.0
MAX_PIXELS = 1 << 20
KEPT_PICTURES = 64


class World:
    """Owner of a checkpoint on disk and of its weights in memory; both live as long as the process."""

    def __init__(self, family: str, directory: Path) -> None:
        self.family = family
        self.model_dir = checkpoints.make_tiny(family, directory)
        self.adapter = adapter_for(self.model_dir)
        self._rows: dict[bytes, torch.Tensor] = {}

    @functools.cached_property
    def language(self) -> LanguagePart:
        return self.adapter.load_language(torch.float32, torch.device("cpu"))

    @functools.cached_property
    def vision(self) -> VisionPart:
        return self.adapter.load_vision(torch.float32, torch.device("cpu"))

    @property
    def row_bytes(self) -> int:
        return self.adapter.row_elements * torch.float32.itemsize

    def rows(self, media: bytes) -> torch.Tensor:
        """The picture's embedding, (num_tokens, row_elements), by the tower; a copy that the caller may keep."""
        if media not in self._rows:
            grid = self.adapter.image_layout(*_size_px(media)).grid
            picture = fit(decode_picture(media, MAX_PIXELS), self.vision.target(grid))
            self._rows[media] = self.vision.encode([self.vision.patches(picture)], [grid])[0].contiguous()
        return self._rows[media].clone()

    def plan(self, prompt: Prompt, sampling: Sampling, salt: bytes = b"") -> Plan:
        compact, items = self._place(prompt.pieces, salt)
        return Plan(tuple(compact), tuple(items), sampling, TIMEOUT_S, salt, self.adapter.fingerprint)

    def expanded(self, pieces: Sequence[Piece]) -> list[int]:
        """The prompt as the stock model takes it: a placeholder for each row of a picture."""
        placeholder, ids = self.adapter.placeholder_id(Modality.IMAGE), list[int]()
        for piece in pieces:
            ids += [piece] if isinstance(piece, int) else [placeholder] * self.num_rows(piece)
        return ids

    def num_rows(self, media: bytes) -> int:
        return self.adapter.image_layout(*_size_px(media)).num_tokens

    def _place(self, pieces: Sequence[Piece], salt: bytes) -> tuple[list[int], list[Item]]:
        compact: list[int] = []
        items: list[Item] = []
        grown = 0
        for piece in pieces:
            if isinstance(piece, int):
                compact.append(piece)
                continue
            item = self._item(piece, len(compact), grown, salt)
            items.append(item)
            grown += item.num_tokens - 1
            compact.append(self.adapter.placeholder_id(Modality.IMAGE))
        return compact, items

    def _item(self, media: bytes, compact_index: int, grown: int, salt: bytes) -> Item:
        width_px, height_px = _size_px(media)
        layout = self.adapter.image_layout(width_px, height_px)
        run = TokenRange(compact_index, compact_index + grown, layout.num_tokens)
        return Item(
            modality=Modality.IMAGE,
            identity=_identity(self.adapter, media, salt),
            num_tokens=layout.num_tokens,
            ranges=(run,),
            grid=layout.grid,
            media_bytes=len(media),
            width_px=width_px,
            height_px=height_px,
        )


@functools.lru_cache(KEPT_PICTURES)
def _identity(adapter: Adapter, media: bytes, salt: bytes) -> bytes:
    return adapter.identity(Modality.IMAGE, media, salt)


@functools.lru_cache(KEPT_PICTURES)
def _size_px(media: bytes) -> tuple[int, int]:
    return Image.open(io.BytesIO(media)).size


@functools.cache
def world_of(family: str) -> World:
    folder = tempfile.TemporaryDirectory(prefix="triptych-storm-")
    world = World(family, Path(folder.name))
    _FOLDERS.append(folder)
    return world


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
