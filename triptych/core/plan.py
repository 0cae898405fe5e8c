"""The plan: what the router freezes once and every stage reads.

A plan holds the prompt as *compact* ids, in which each run of embedding rows is one placeholder token, and the items
whose embeddings go there. `triptych.core.expansion` turns it into the full sequence, on every stage alike.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

IDENTITY_BYTES = 32
CALLER_HASH_BYTES = 32

MAX_RETRACTIONS = 3
"""How often an answer may lose its place under memory pressure."""


class Modality(enum.Enum):
    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


class ItemFormat(enum.Enum):
    """What an item's data are: the media as they came, what the family's processor made of them, or the embedding
    itself. The latter two come from trusted callers only (docs/items.md)."""

    NORMAL = "normal"
    PROCESSOR_OUTPUT = "processor_output"
    PRECOMPUTED_EMBEDDING = "precomputed_embedding"


class EmbeddingSource(enum.Enum):
    """Where the consumer of an embedding got it from (the label of `triptych_embedding_source_total`)."""

    REMOTE = "remote"
    CACHE = "cache"
    RADIX = "radix"
    LOCAL = "local"


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class TokenRange:
    """A run of consecutive embedding rows; ONE placeholder in the compact ids.

    Attributes:
        compact_index: index of the placeholder in the compact ids.
        offset: index of the run's first token in the expanded prompt.
        length: tokens in the run, at least 1.
    """

    compact_index: int
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class Grid:
    """Patches before merging: frames (or temporal groups), rows, columns."""

    t: int
    h: int
    w: int


@dataclass(frozen=True, slots=True)
class Item:
    """One picture, video or audio clip, as every stage knows it; `triptych.mm.item` adds its data.

    `ranges` ascend and do not overlap; their lengths sum to `num_tokens`. `media_bytes` is the size of the data as they
    cross the wire: the encoded media, or a tensor frame when `format` says so. `caller_hash` is what a trusted caller
    names the media by, of which the identity is then made (docs/identity.md); empty for all others.
    """

    modality: Modality
    identity: bytes
    num_tokens: int
    ranges: tuple[TokenRange, ...]
    grid: Grid
    media_bytes: int = 0
    width_px: int = 0
    height_px: int = 0
    format: ItemFormat = ItemFormat.NORMAL
    caller_hash: bytes = b""

    @property
    def offset(self) -> int:
        return self.ranges[0].offset

    @property
    def end(self) -> int:
        return self.ranges[-1].end


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen; `triptych.model.sampler` says in what order the options act.

    Attributes:
        temperature: 0 is greedy.
        seed: of choice 0; choice k samples as choice 0 of seed + k (mod 2^64) would.
        stop_token_ids: the tokens that end the answer: the caller's, and the model's own unless they are ignored.
        top_k: None is no limit.
        logit_bias: (token id, what is added to its logit), by ascending id.
        min_tokens: until the answer has that many, neither `stop_token_ids` nor `eos_token_ids` can be sampled.
        eos_token_ids: the model's own end tokens, whether or not they end this answer.
        num_logprobs: None is no log probabilities; else how many alternatives come with each token.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    num_logprobs: int | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether what stands in the prompt or the answer changes the odds."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """An immutable request. `timeout_s` is what was left of its time when it was sent to this stage. The lower its
    `priority`, the more urgent it is (`triptych.sched`).

    A replay, of an answer that was retracted or whose worker was lost, says how often the former was, and which
    `answer_ids` are out already: they are prefilled after the prompt, and the next token has the index after theirs.
    """

    compact_ids: tuple[int, ...]
    items: tuple[Item, ...]
    sampling: Sampling
    timeout_s: float
    cache_salt: bytes = b""
    model_fingerprint: bytes = b""
    priority: int = 0
    answer_ids: tuple[int, ...] = ()
    num_retractions: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        placeholders = sum(len(item.ranges) for item in self.items)
        return len(self.compact_ids) - placeholders + sum(item.num_tokens for item in self.items)

    @property
    def is_replay(self) -> bool:
        """Whether the answer was under way before."""
        return bool(self.answer_ids or self.num_retractions)

    @property
    def num_known_tokens(self) -> int:
        """What is to be prefilled: the prompt, and of a replay the answer so far."""
        return self.num_prompt_tokens + len(self.answer_ids)

    @property
    def num_total_tokens(self) -> int:
        """Prompt and longest possible answer."""
        return self.num_prompt_tokens + self.sampling.max_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of a token's probability and of the likeliest alternatives', under the model alone: before
    bias, penalties, temperature and truncation. `top` holds (token id, logprob), likeliest first, ties by id."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Token:
    """A sampled token; `index` counts from 0 at the first token of the answer. `logprobs` when the plan asks for it."""

    index: int
    id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
