"""From a checked request and its media to the immutable plan that every stage reads."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from services.router.chat_request import ChatRequest
from services.router.media import Media
from triptych.core.errors import RequestTooLarge, StartupError
from triptych.core.plan import Item, Modality, Plan, Sampling, TokenRange
from triptych.model.adapters.base import ItemLayout
from triptych.model.checkpoint_files import read_json
from triptych.text.messages import ChatMessage
from triptych.text.tokenizer import EncodedChat

DEFAULT_MAX_TOKENS = 1024
# Below this, dividing logits by the temperature gains nothing but overflow: it is greedy.
_LEAST_TEMPERATURE = 1e-4
# No text that fits a context has more characters a token than this; what has more is not worth tokenizing.
_MAX_CHARS_PER_TOKEN = 64


class ModelFacts(Protocol):
    """The half of a model's adapter that planning needs."""

    fingerprint: bytes
    eos_token_ids: frozenset[int]

    def image_layout(self, width_px: int, height_px: int) -> ItemLayout: ...
    def placeholder_id(self, modality: Modality) -> int: ...
    def identity(self, modality: Modality, media: bytes, tenant_salt: bytes = b"") -> bytes: ...


class ChatEncoder(Protocol):
    def encode_chat(self, messages: Sequence[ChatMessage]) -> EncodedChat: ...


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What the model's generation_config.json says to do when the caller says nothing."""

    temperature: float
    top_p: float

    @classmethod
    def from_model(cls, model_dir: Path) -> SamplingDefaults:
        """Greedy unless the file says `do_sample: true`. Raises StartupError for numbers out of range."""
        file = model_dir / "generation_config.json"
        config = read_json(file) if file.exists() else {}
        if not config.get("do_sample"):
            return cls(0.0, 1.0)
        temperature, top_p = config.get("temperature", 1.0), config.get("top_p", 1.0)
        if not 0 <= temperature <= 2 or not 0 < top_p <= 1:
            raise StartupError("the model's generation_config.json has a temperature or top_p out of range")
        return cls(float(temperature), float(top_p))


class Planner:
    """Pure but for the seed it mints. CPU-bound (tokenizing, hashing media): call it off the event loop."""

    def __init__(self, model: ModelFacts, encoder: ChatEncoder, defaults: SamplingDefaults) -> None:
        self._model = model
        self._encoder = encoder
        self._defaults = defaults

    def plan(self, request: ChatRequest, media: Sequence[Media], context_tokens: int, timeout_s: float) -> Plan:
        """`media` belongs to the request's pictures, in order; `context_tokens` is what every worker can hold.

        Raises:
            RequestTooLarge: the prompt leaves no room for a token.
            InvalidRequest: the chat template refuses the conversation.
            MediaInvalid: the model cannot take a picture of this shape.
        """
        _refuse_endless_text(request, context_tokens)
        encoded = self._encoder.encode_chat(request.messages)
        compact_ids, items = self._place(encoded, media)
        prompt_tokens = len(compact_ids) + sum(item.num_tokens - len(item.ranges) for item in items)
        return Plan(
            compact_ids=tuple(compact_ids),
            items=tuple(items),
            sampling=self._sampling(request, _answer_room(prompt_tokens, request.max_tokens, context_tokens)),
            timeout_s=timeout_s,
            model_fingerprint=self._model.fingerprint,
        )

    def _place(self, encoded: EncodedChat, media: Sequence[Media]) -> tuple[list[int], list[Item]]:
        """Repeats each picture's placeholder once per run, and says where the runs lie in the expanded prompt.

        compact ids:  a b P c P P d        (the second picture has two runs)
        expanded:     a b vvvv c vv vv d
        """
        compact_ids: list[int] = []
        items: list[Item] = []
        copied = grown = 0
        for index, one in zip(encoded.placeholder_indices, media, strict=True):
            layout = self._model.image_layout(one.header.width_px, one.header.height_px)
            compact_ids += encoded.compact_ids[copied:index]
            copied = index + 1
            ranges: list[TokenRange] = []
            for length in layout.run_lengths:
                ranges.append(TokenRange(len(compact_ids), len(compact_ids) + grown, length))
                compact_ids.append(encoded.compact_ids[index])
                grown += length - 1
            items.append(self._item(one, layout, ranges))
        return compact_ids + encoded.compact_ids[copied:], items

    def _item(self, media: Media, layout: ItemLayout, ranges: list[TokenRange]) -> Item:
        return Item(
            modality=Modality.IMAGE,
            identity=self._model.identity(Modality.IMAGE, media.data),
            num_tokens=layout.num_tokens,
            ranges=tuple(ranges),
            grid=layout.grid,
            media_bytes=len(media.data),
            width_px=media.header.width_px,
            height_px=media.header.height_px,
        )

    def _sampling(self, request: ChatRequest, max_tokens: int) -> Sampling:
        temperature = self._defaults.temperature if request.temperature is None else request.temperature
        return Sampling(
            max_tokens=max_tokens,
            temperature=temperature if temperature >= _LEAST_TEMPERATURE else 0.0,
            top_p=self._defaults.top_p if request.top_p is None else request.top_p,
            seed=secrets.randbits(63) if request.seed is None else request.seed % 2**64,
            stop_token_ids=self._model.eos_token_ids,
        )


def _answer_room(prompt_tokens: int, asked: int | None, context_tokens: int) -> int:
    """Tokens that the answer may have: what was asked for, as far as the context leaves it."""
    left = context_tokens - prompt_tokens
    if left < 1:
        raise RequestTooLarge(
            f"the prompt has {prompt_tokens} tokens; with one token of answer it must fit into {context_tokens}",
            param="messages",
        )
    return min(left, DEFAULT_MAX_TOKENS if asked is None else asked)


def _refuse_endless_text(request: ChatRequest, context_tokens: int) -> None:
    chars = sum(len(text) for message in request.messages for text in message.texts)
    if chars > context_tokens * _MAX_CHARS_PER_TOKEN:
        raise RequestTooLarge(
            f"the texts have {chars} characters, which cannot fit into {context_tokens} tokens", param="messages"
        )
