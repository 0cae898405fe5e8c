"""Which tokens the language model runs next: a pure function over frozen views.

Chunked prefill under a token budget, decodes first, as in Sarathi-Serve (Agrawal et al., arXiv:2403.02310): each
decoding sequence adds one token, and prompts share what is left, each up to the first embedding that it still lacks, so
early text and pictures are prefilled while later ones are being encoded. Among prompts the more urgent go first, and
among equals the shorter, by what they still have to compute; waiting makes shorter (`triptych.sched.aging`). The whole
rest of the prompt counts, not what could run now: else a prompt whose many pictures come one by one would pass for a
short one. A short partial chunk runs only when nothing else does: it would cost a pass for few tokens.

**Bounds.** G is a quarter of the budget (`StepBudget.guaranteed_tokens`). A prompt is overdue when it has waited for
`patience_s + num_prompt / units_per_s`. *Before it* are those overdue for longer, never one that arrives later.

1. In each step in which an overdue prompt could run beside others, it gets tokens, or G tokens go to those before it.
   So it stays without tokens in at most W // G such steps, where W is what those before it have left to compute when it
   becomes overdue (and those that are admitted after, though queued before), whatever arrives, short or urgent.
2. In each such step it gets all that can run of it (or its largest chunk), or G tokens go to it and those before it. So
   once all its embeddings are there, it is computed in at most (W + R) // G + R // `max_chunk_tokens` + 1 steps; R
   is what is left of itself.
3. The others keep three quarters: an overdue prompt of any length takes more only where its priority and rank give it
   more, or nobody else wants it.
4. Decodes lose nothing to prompts while they fit into three quarters of the budget. Beyond, those go first that have
   waited longest for their token: n of them have each had their turn after n // (max_tokens - G) + 1 steps.
5. The budget is used up, unless whatever could run has its largest chunk, or is a short partial chunk.

Cost: O(n log n) in the number of sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from triptych.sched.aging import Aging

# A prompt of 8,000 tokens may be passed for six seconds, one of a few dozen for two.
PROMPT_AGING = Aging(patience_s=2.0, units_per_s=2000.0)
_GUARANTEED_PART = 4


@dataclass(frozen=True, slots=True)
class SequenceView:
    """What the policy may know of a sequence.

    Attributes:
        num_computed: tokens whose KV is written.
        num_ready: prompt tokens that could be computed now (up to the first missing embedding).
        num_prompt: tokens of the whole prompt.
        is_decoding: it adds one token per step.
        waited_s: of a prompt, since it was queued; of a decoding sequence, since it last ran.
        priority: the lower, the more urgent.
    """

    num_computed: int
    num_ready: int
    num_prompt: int
    is_decoding: bool
    waited_s: float = 0.0
    priority: int = 0


@dataclass(frozen=True, slots=True)
class StepBudget:
    """Limits of one step, in tokens. `max_chunk_tokens` bounds one prompt's share; `min_partial_tokens` is the smallest
    chunk worth running beside others when it does not finish its prompt."""

    max_tokens: int
    max_chunk_tokens: int
    min_partial_tokens: int

    @property
    def guaranteed_tokens(self) -> int:
        """What the overdue prompts have to themselves: at least one token, unless a step has no more than one."""
        return max(self.max_tokens // _GUARANTEED_PART, min(1, self.max_tokens - 1))


@dataclass(frozen=True, slots=True)
class Slice:
    """Run `count` tokens of the sequence at `index` of the views."""

    index: int
    count: int


def plan_step(views: Sequence[SequenceView], budget: StepBudget, aging: Aging = PROMPT_AGING) -> list[Slice]:
    """The next step; empty when nothing can run."""
    wanted, too_short = _wanted(views, budget)
    overdue = _overdue(views, wanted, aging)
    reserved = min(budget.guaranteed_tokens, sum(wanted[index] for index in overdue))
    decoding = _decoding(views, budget.max_tokens - reserved)
    left = budget.max_tokens - len(decoding)
    counts: dict[int, int] = {}
    left -= _share(overdue, wanted, min(left, reserved), counts)
    in_order = sorted(wanted, key=lambda index: _urgency(views[index], aging, index))
    _share(in_order, wanted, left, counts)
    slices = [Slice(index, 1) for index in decoding] + [Slice(index, count) for index, count in counts.items()]
    if slices or not too_short:
        return slices
    index = min(too_short, key=lambda index: _urgency(views[index], aging, index))
    return [Slice(index, min(too_short[index], budget.max_tokens))]


def _wanted(views: Sequence[SequenceView], budget: StepBudget) -> tuple[dict[int, int], dict[int, int]]:
    """By index: the largest chunk of each prompt that can run, and of each that is too short to run beside others."""
    wanted: dict[int, int] = {}
    too_short: dict[int, int] = {}
    for index, view in enumerate(views):
        ready = view.num_ready - view.num_computed
        if view.is_decoding or ready <= 0:
            continue
        count = min(ready, budget.max_chunk_tokens)
        is_partial = view.num_ready < view.num_prompt and count == ready
        (too_short if is_partial and ready < budget.min_partial_tokens else wanted)[index] = count
    return wanted, too_short


def _overdue(views: Sequence[SequenceView], wanted: Iterable[int], aging: Aging) -> list[int]:
    """Those of `wanted` that are overdue, the longest so first."""
    late = [(-aging.lateness_s(views[index].num_prompt, views[index].waited_s), index) for index in wanted]
    return [index for earliness_s, index in sorted(late) if earliness_s <= 0]


def _decoding(views: Sequence[SequenceView], room: int) -> list[int]:
    """At most `room` of the decoding sequences: in order of the views, or if there are more, the longest waiting."""
    decoding = [index for index, view in enumerate(views) if view.is_decoding]
    if len(decoding) <= room:
        return decoding
    return sorted(decoding, key=lambda index: -views[index].waited_s)[:room]


def _urgency(view: SequenceView, aging: Aging, index: int) -> tuple[int, float, int]:
    return view.priority, aging.rank(view.num_prompt - view.num_computed, view.waited_s), index


def _share(order: Iterable[int], wanted: dict[int, int], tokens: int, counts: dict[int, int]) -> int:
    """Gives out `tokens`, to each in order what it wants beyond its count so far; returns how many it gave."""
    left = tokens
    for index in order:
        if left <= 0:
            break
        given = min(wanted[index] - counts.get(index, 0), left)
        if given > 0:
            counts[index] = counts.get(index, 0) + given
            left -= given
    return tokens - left
