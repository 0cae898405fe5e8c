"""Which tokens the language model runs next: a pure function over frozen views.

Decoding sequences add one token each and come first. Prompts share what is left of the token budget in order of
arrival, each up to the first embedding that it still lacks, so early text and pictures are prefilled while later ones
are being encoded. A short partial chunk runs only when nothing else does: it would cost a whole pass for few tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SequenceView:
    """What the policy may know of a sequence.

    Attributes:
        num_computed: tokens whose KV is written.
        num_ready: prompt tokens that could be computed now (up to the first missing embedding).
        num_prompt: tokens of the whole prompt.
        is_decoding: it adds one token per step.
    """

    num_computed: int
    num_ready: int
    num_prompt: int
    is_decoding: bool


@dataclass(frozen=True, slots=True)
class StepBudget:
    """Limits of one step, in tokens. `max_chunk_tokens` bounds one prompt's share; `min_partial_tokens` is the smallest
    chunk worth running beside others when it does not finish its prompt."""

    max_tokens: int
    max_chunk_tokens: int
    min_partial_tokens: int


@dataclass(frozen=True, slots=True)
class Slice:
    """Run `count` tokens of the sequence at `index` of the views."""

    index: int
    count: int


def plan_step(views: Sequence[SequenceView], budget: StepBudget) -> list[Slice]:
    """The next step; empty when nothing can run."""
    left = budget.max_tokens
    slices: list[Slice] = []
    for index, view in enumerate(views):
        if view.is_decoding and left > 0:
            slices.append(Slice(index, 1))
            left -= 1
    too_short: list[Slice] = []
    for index, view in enumerate(views):
        ready = view.num_ready - view.num_computed
        if view.is_decoding or ready <= 0 or left <= 0:
            continue
        count = min(ready, budget.max_chunk_tokens, left)
        if view.num_ready < view.num_prompt and count == ready < budget.min_partial_tokens:
            too_short.append(Slice(index, count))
            continue
        slices.append(Slice(index, count))
        left -= count
    return slices or too_short[:1]
