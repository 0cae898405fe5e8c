"""A sequence in an engine: the mutable state that only the step loop changes."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from triptych.core.errors import TriptychError
from triptych.core.expansion import IdArray
from triptych.core.ids import AttemptRef
from triptych.core.lifecycle import Phase
from triptych.core.plan import EmbeddingSource, FinishReason, Item, Plan, Token
from triptych.core.timeline import Timeline
from triptych.kv.manager import SequencePages
from triptych.mm.mrope import PositionArray
from triptych.mm.sentinels import SENTINEL_BASE
from triptych.model.sampler import SampleRow, TokenHistory
from triptych.sched.retraction import Standing


class SequenceSink(Protocol):
    """Hears of a sequence from the engine's thread; must not block. After `finished`, `retracted` (it lost its place
    and must be replayed) or `failed` it hears no more."""

    def admitted(self, cached_tokens: int) -> None: ...
    def tokens(self, tokens: SequenceOf[Token]) -> None: ...
    def handed_off(self, token: Token, num_bytes: int) -> None: ...
    def decoding(self) -> None: ...
    def finished(self, reason: FinishReason) -> None: ...
    def retracted(self) -> None: ...
    def failed(self, error: TriptychError) -> None: ...


class Handoff(Protocol):
    """Where a prompt's KV goes: a decode worker's pool. Never blocks."""

    @property
    def is_congested(self) -> bool:
        """So much is on its way there that no more should be computed for this sequence now."""
        ...

    def copy(self, pages: SequenceOf[int], first: int) -> int:
        """Copies local `pages` to the grant's pages from its `first` on; returns the bytes moved."""
        ...


@dataclass(slots=True, eq=False)
class PendingItem:
    """An item of the prompt: `rows` is (num_tokens, row_elements) once the embedding has landed."""

    item: Item
    source: EmbeddingSource | None = None
    rows: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """One attempt at one choice.

    Attributes:
        ids: prompt (sentinels at embedding rows), then what was sampled.
        positions: int64 (axes, num_known), of what was known at the beginning; `position_delta` extends it.
        timeline, decode_timeline: what was done for the prompt, and for the answer.
        needs_handoff: its KV goes to another worker after the first token.
        handoff: where to, once the pages are bound. Nothing runs before.
        num_held_pages: leading pages that the worker there has and is not sent.
        num_computed: tokens whose KV is written here; the first `num_pushed_pages` are there, held or written.
        num_launched: those, and the tokens of the steps under way.
        num_sampled: tokens of the answer so far, wherever they were sampled.
        num_parked: how often its KV had to wait on the host.
        arrival: counts the sequences of this engine.
        queued_ns, ran_ns: when it was submitted, and when the last step that it was in began.
        prompt_vocabulary: the ids that the prompt holds, once each, without sentinels; made when penalties first ask.
    """

    ref: AttemptRef
    plan: Plan
    ids: list[int]
    positions: PositionArray
    position_delta: int
    sink: SequenceSink
    timeline: Timeline
    decode_timeline: Timeline
    needs_handoff: bool = False
    phase: Phase = Phase.QUEUED
    items: list[PendingItem] = field(default_factory=list)
    pages: SequencePages | None = None
    handoff: Handoff | None = None
    num_prompt: int = 0
    num_computed: int = 0
    num_launched: int = 0
    num_sampled: int = 0
    num_held_pages: int = 0
    num_pushed_pages: int = 0
    num_pushed_bytes: int = 0
    num_parked: int = 0
    arrival: int = 0
    queued_ns: int = 0
    ran_ns: int = 0
    prompt_vocabulary: IdArray | None = None

    @property
    def num_known(self) -> int:
        """What is to be prefilled: the prompt, and of a replay the answer so far."""
        return self.num_prompt + len(self.plan.answer_ids)

    @property
    def num_ready(self) -> int:
        """Tokens of it computable now: up to the first embedding that is missing, none before the pages are bound or
        while the way to them is congested."""
        if self.phase is Phase.DECODING or (self.needs_handoff and (self.handoff is None or self.handoff.is_congested)):
            return self.num_launched
        for pending in self.items:
            if pending.rows is None and pending.item.end > self.num_launched:
                return max(pending.item.offset, self.num_launched)
        return self.num_known

    @property
    def standing(self) -> Standing:
        """Its place among those that decode."""
        replays = self.plan.num_retractions
        return Standing(self.plan.priority, replays + self.num_parked, replays, self.arrival)

    @property
    def is_awaiting_sample(self) -> bool:
        """The step under way chooses the token that comes next."""
        return self.num_launched >= len(self.ids)

    @property
    def can_run_ahead(self) -> bool:
        """Whether the token after the one that is awaited can be computed before that is known: not when penalties
        look at it, when it ends the answer for certain, or when another worker goes on."""
        is_last = self.num_sampled + 1 >= self.plan.sampling.max_tokens
        return not (is_last or self.needs_handoff or self.plan.sampling.has_penalties)

    @property
    def may_decode(self) -> bool:
        """It adds one token to the next step, if it has room."""
        if self.phase is not Phase.DECODING and not self.is_awaiting_sample:
            return False
        return not self.is_awaiting_sample or self.can_run_ahead

    def has_room(self, page_tokens: int) -> bool:
        """For its next token."""
        return self.pages is not None and self.num_launched < len(self.pages.pages) * page_tokens

    def slice_ids(self, count: int) -> IdArray:
        """The next `count` ids to launch, int64; 0 where a sample is awaited."""
        if self.is_awaiting_sample:
            return np.zeros(count, dtype=np.int64)
        return np.array(self.ids[self.num_launched : self.num_launched + count], dtype=np.int64)

    def slice_positions(self, count: int) -> PositionArray:
        """Their positions, int64 (axes, count)."""
        if self.num_launched < self.num_known:
            return self.positions[:, self.num_launched : self.num_launched + count]
        position = self.num_launched + self.position_delta
        return np.full((self.positions.shape[0], count), position, dtype=np.int64)

    def sample_row(self) -> SampleRow:
        """How the next token is sampled, wherever the ones before it were."""
        history = self._history() if self.plan.sampling.has_penalties else None
        index = self.num_sampled + self.is_awaiting_sample
        return SampleRow(self.plan.sampling, self.ref.choice, self.num_prompt + index, index, history)

    def _history(self) -> TokenHistory:
        if self.prompt_vocabulary is None:
            prompt = np.array(self.ids[: self.num_prompt], dtype=np.int64)
            self.prompt_vocabulary = np.unique(prompt[prompt < SENTINEL_BASE])
        return TokenHistory(self.prompt_vocabulary, np.array(self.ids[self.num_prompt :], dtype=np.int64))

    def take(self, token: Token) -> None:
        """Appends a sampled token."""
        self.ids.append(token.id)
        self.num_sampled += 1

    def finish_reason(self, token: Token) -> FinishReason | None:
        """Set when this token ends the answer."""
        if token.id in self.plan.sampling.stop_token_ids:
            return FinishReason.STOP
        if token.index + 1 >= self.plan.sampling.max_tokens:
            return FinishReason.LENGTH
        return None
