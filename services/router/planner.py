"""From a checked request and its media to the immutable plan that every stage reads."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from services.router.chat_request import ChatRequest, SamplingOptions
from services.router.media import Media
from triptych.core.errors import InvalidRequest, RequestTooLarge, StartupError
from triptych.core.plan import Grid, Item, Modality, Plan, Sampling, TokenRange
from triptych.model.adapters.base import ItemLayout
from triptych.model.checkpoint_files import GENERATION_FILE, Table, optional_json
from triptych.rpc.convert import MAX_REPETITION_PENALTY
from triptych.text.messages import ChatMessage
from triptych.text.tokenizer import EncodedChat

T = TypeVar("T")

DEFAULT_MAX_TOKENS = 1024
_INT31 = 2**31 - 1
# Below this, dividing logits by the temperature gains nothing but overflow: it is greedy.
_LEAST_TEMPERATURE = 1e-4
# No text that fits a context has more characters a token than this; what has more is not worth tokenizing.
_MAX_CHARS_PER_TOKEN = 64


class ModelFacts(Protocol):
    """The half of a model's adapter that planning needs."""

    fingerprint: bytes
    eos_token_ids: frozenset[int]
    vocab_size: int

    def image_layout(self, width_px: int, height_px: int) -> ItemLayout: ...
    def placeholder_id(self, modality: Modality) -> int: ...
    def identity(self, modality: Modality, media: bytes, tenant_salt: bytes = b"") -> bytes: ...
    def caller_identity(
        self, modality: Modality, grid: Grid, num_tokens: int, caller_hash: bytes, tenant_salt: bytes = b""
    ) -> bytes: ...


class ChatEncoder(Protocol):
    def encode_chat(self, messages: Sequence[ChatMessage]) -> EncodedChat: ...


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What the model's generation_config.json says to do when the caller says nothing."""

    temperature: float
    top_p: float
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_model(cls, model_dir: Path) -> SamplingDefaults:
        """Greedy unless the file says `do_sample: true`; the repetition penalty holds either way, as in `transformers`.

        Raises StartupError for numbers out of range.
        """
        config = optional_json(model_dir / GENERATION_FILE)
        penalty = _setting(config, "repetition_penalty", 1.0, lambda value: 0 < value <= MAX_REPETITION_PENALTY)
        if config.get("do_sample") is None or not Table(config, GENERATION_FILE).flag("do_sample"):
            return cls(0.0, 1.0, repetition_penalty=penalty)
        return cls(
            temperature=_setting(config, "temperature", 1.0, lambda value: 0 <= value <= 2),
            top_p=_setting(config, "top_p", 1.0, lambda value: 0 < value <= 1),
            top_k=int(_setting(config, "top_k", 0, lambda value: 0 <= value <= _INT31 and value == int(value))) or None,
            min_p=_setting(config, "min_p", 0.0, lambda value: 0 <= value <= 1),
            repetition_penalty=penalty,
        )


class Planner:
    """Pure but for the seed it mints. CPU-bound (tokenizing, hashing media): call it off the event loop."""

    def __init__(self, model: ModelFacts, encoder: ChatEncoder, defaults: SamplingDefaults) -> None:
        self._model = model
        self._encoder = encoder
        self._defaults = defaults

    def plan(
        self, request: ChatRequest, media: Sequence[Media], context_tokens: int, timeout_s: float, salt: bytes = b""
    ) -> Plan:
        """`media` belongs to the request's pictures, in order; `context_tokens` is what every worker can hold; `salt`
        keeps what is cached for it from others.

        Raises:
            RequestTooLarge: the prompt leaves no room for a token.
            InvalidRequest: the chat template refuses the conversation, or a token id is not in the vocabulary.
            MediaInvalid: the model cannot take a picture of this shape.
        """
        _refuse_endless_text(request, context_tokens)
        self._check_token_ids(request.options)
        encoded = self._encoder.encode_chat(request.messages)
        compact_ids, items = self._place(encoded, media, salt)
        prompt_tokens = len(compact_ids) + sum(item.num_tokens - len(item.ranges) for item in items)
        return Plan(
            compact_ids=tuple(compact_ids),
            items=tuple(items),
            sampling=self._sampling(request, _answer_room(prompt_tokens, request, context_tokens)),
            timeout_s=timeout_s,
            cache_salt=salt,
            model_fingerprint=self._model.fingerprint,
            priority=request.priority,
        )

    def _place(self, encoded: EncodedChat, media: Sequence[Media], salt: bytes) -> tuple[list[int], list[Item]]:
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
            items.append(self._item(one, layout, ranges, salt))
        return compact_ids + encoded.compact_ids[copied:], items

    def _item(self, media: Media, layout: ItemLayout, ranges: list[TokenRange], salt: bytes) -> Item:
        return Item(
            modality=Modality.IMAGE,
            identity=self._identity(media, layout, salt),
            num_tokens=layout.num_tokens,
            ranges=tuple(ranges),
            grid=layout.grid,
            media_bytes=len(media.data),
            width_px=media.header.width_px,
            height_px=media.header.height_px,
            caller_hash=media.caller_hash,
        )

    def _identity(self, media: Media, layout: ItemLayout, salt: bytes) -> bytes:
        if not media.caller_hash:
            return self._model.identity(Modality.IMAGE, media.data, salt)
        return self._model.caller_identity(Modality.IMAGE, layout.grid, layout.num_tokens, media.caller_hash, salt)

    def _sampling(self, request: ChatRequest, max_tokens: int) -> Sampling:
        options, defaults, eos = request.options, self._defaults, self._model.eos_token_ids
        temperature = _or(request.temperature, defaults.temperature)
        top_k = _or(options.top_k, defaults.top_k)
        return Sampling(
            max_tokens=max_tokens,
            temperature=temperature if temperature >= _LEAST_TEMPERATURE else 0.0,
            top_p=_or(request.top_p, defaults.top_p),
            seed=secrets.randbits(63) if request.seed is None else request.seed % 2**64,
            stop_token_ids=frozenset(options.stop_token_ids) | (frozenset() if options.ignore_eos else eos),
            # A limit beyond the vocabulary is none.
            top_k=top_k if top_k and top_k < self._model.vocab_size else None,
            min_p=_or(options.min_p, defaults.min_p),
            repetition_penalty=_or(options.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            logit_bias=options.logit_bias,
            min_tokens=min(options.min_tokens, max_tokens),
            eos_token_ids=eos,
            num_logprobs=options.num_logprobs,
        )

    def _check_token_ids(self, options: SamplingOptions) -> None:
        biased = [token_id for token_id, _ in options.logit_bias]
        last = self._model.vocab_size - 1
        for param, ids in (("logit_bias", biased), ("stop_token_ids", options.stop_token_ids)):
            if max(ids, default=0) > last:
                raise InvalidRequest(f"{param} names a token beyond the model's last, {last}", param=param)


def _or(asked: T | None, default: T) -> T:
    return default if asked is None else asked


def _setting(config: Mapping[str, Any], name: str, default: float, is_valid: Callable[[float], bool]) -> float:
    value = config.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not is_valid(value):
        raise StartupError(f"the model's generation_config.json has a {name} that is no number or out of range")
    return float(value)


def _answer_room(prompt_tokens: int, request: ChatRequest, context_tokens: int) -> int:
    """Tokens that the answer may have: what was asked for, as far as the context leaves it."""
    left = context_tokens - prompt_tokens
    if left < 1:
        raise RequestTooLarge(
            f"the prompt has {prompt_tokens} tokens; with one token of answer it must fit into {context_tokens}",
            param="messages",
        )
    return min(left, _or(request.max_tokens, max(DEFAULT_MAX_TOKENS, request.options.min_tokens)))


def _refuse_endless_text(request: ChatRequest, context_tokens: int) -> None:
    chars = sum(len(text) for message in request.messages for text in message.texts)
    if chars > context_tokens * _MAX_CHARS_PER_TOKEN:
        raise RequestTooLarge(
            f"the texts have {chars} characters, which cannot fit into {context_tokens} tokens", param="messages"
        )
