"""What a trusted caller does, and what a careless or a lying one may do: for the tests of items that bring tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from services.router.pipeline import Pipeline
from tests.parity.prompts import Prompt
from tests.parity.reference import ReferenceModel
from triptych.core.ids import new_request_id
from triptych.core.plan import Grid, ItemFormat, Plan, Sampling
from triptych.core.timeline import TimelineEvent
from triptych.mm.tensor import TensorValue
from triptych.mm.trusted import ItemData, TrustedRequest, trusted_request
from triptych.model.adapters.base import Adapter

TIMEOUT_S = 30.0


def prompt_of(text: str, *media: bytes) -> Prompt:
    content = [*({"type": "image"} for _ in media), {"type": "text", "text": text}]
    return Prompt(0, "tensors", ({"role": "user", "content": content},), media)


@dataclass(frozen=True)
class StockPicture:
    """A picture as stock transformers sees it: `patches` of its processor, `rows` of its tower, both float32."""

    grid: Grid
    patches: np.ndarray
    rows: np.ndarray

    @property
    def processed(self) -> ItemData:
        return ItemData(ItemFormat.PROCESSOR_OUTPUT, self.grid, TensorValue.from_array(self.patches))

    @property
    def embedded(self) -> ItemData:
        return ItemData(ItemFormat.PRECOMPUTED_EMBEDDING, self.grid, TensorValue.from_array(self.rows))


@dataclass(frozen=True)
class StockPrompt:
    """A prompt as the stock processor gives it: one placeholder for every row."""

    ids: list[int]
    pictures: list[StockPicture]

    def request(self, adapter: Adapter, data: Sequence[ItemData], max_tokens: int, salt: bytes = b"") -> TrustedRequest:
        return trusted_request(adapter, self.ids, data, Sampling(max_tokens), TIMEOUT_S, salt)


def stock_prompt(reference: ReferenceModel, prompt: Prompt) -> StockPrompt:
    inputs: dict[str, Any] = reference.inputs(prompt)
    pictures = []
    if prompt.media:
        grids = inputs["image_grid_thw"]
        with torch.inference_mode():
            rows = reference.model.model.get_image_features(inputs["pixel_values"], grids, return_dict=True)
        counts = grids.prod(-1).tolist()
        for grid, patches, row in zip(
            grids.tolist(), inputs["pixel_values"].split(counts), rows.pooler_output, strict=True
        ):
            pictures.append(StockPicture(Grid(*grid), patches.numpy(), row.numpy()))
    return StockPrompt(inputs["input_ids"][0].tolist(), pictures)


@dataclass(frozen=True)
class Answered:
    token_ids: list[int]
    timeline: tuple[TimelineEvent, ...]

    def events(self, name: str) -> list[TimelineEvent]:
        return [event for event in self.timeline if event.event == name]


async def ask(pipeline: Pipeline, plan: Plan, media: Sequence[bytes]) -> Answered:
    """The whole answer. Raises what the cluster says."""
    async with pipeline.answer(plan, media, new_request_id()) as answer:
        ids: list[int] = []
        async for event in answer.events():
            ids += [token.id for token in getattr(event, "tokens", ())]
        return Answered(ids, tuple(answer.all_events()))


def with_item(request: TrustedRequest, media: bytes, **changed: Any) -> tuple[Plan, list[bytes]]:
    """The request with other bytes for its one item, and the item changed to announce them."""
    changed.setdefault("media_bytes", len(media))
    item = dataclasses.replace(request.plan.items[0], **changed)
    return dataclasses.replace(request.plan, items=(item,)), [media]
