"""From a plan to a sequence, the same on prefill and decode."""

from __future__ import annotations

import numpy as np
import torch

from triptych.core.errors import InvalidRequest, RequestTooLarge, TransferRefused
from triptych.core.ids import AttemptRef
from triptych.core.plan import Plan
from triptych.core.timeline import Timeline
from triptych.engine.sequence import Sequence, SequenceSink
from triptych.mm.mrope import PositionArray
from triptych.model.adapters.base import Adapter


def check_plan(plan: Plan, adapter: Adapter) -> None:
    """Raises when this worker's weights are not the plan's, or the model cannot take it."""
    if plan.model_fingerprint != adapter.fingerprint:
        raise TransferRefused("the plan was made for another model than this worker serves")
    if not plan.compact_ids:
        raise InvalidRequest("the prompt is empty")
    if max(plan.compact_ids) >= adapter.vocab_size:
        raise InvalidRequest("the prompt holds a token that the model does not know")
    if max(plan.answer_ids, default=0) >= adapter.vocab_size:
        raise InvalidRequest("the answer so far holds a token that the model does not know")
    bias = plan.sampling.logit_bias
    if bias and bias[-1][0] >= adapter.vocab_size:
        raise InvalidRequest("logit_bias names a token that the model does not know", param="logit_bias")
    for item in plan.items:
        adapter.check_layout(item)
    if plan.num_total_tokens > adapter.max_sequence_tokens:
        raise RequestTooLarge(
            f"prompt ({plan.num_prompt_tokens} tokens) and answer ({plan.sampling.max_tokens}) exceed the model's "
            f"{adapter.max_sequence_tokens} tokens; shorten the prompt or lower max_tokens"
        )


def new_sequence(
    ref: AttemptRef,
    plan: Plan,
    adapter: Adapter,
    sink: SequenceSink,
    timeline: Timeline,
    decode_timeline: Timeline,
) -> Sequence:
    """A sequence in its first phase. Raises MediaMismatch when the plan's ranges do not add up."""
    prompt = adapter.expand(plan.compact_ids, plan.items)
    positions, delta = adapter.positions(len(prompt), plan.items)
    positions = with_answer(positions, delta, len(plan.answer_ids))
    ids = [*prompt.tolist(), *plan.answer_ids]
    sequence = Sequence(ref, plan, ids, positions, delta, sink, timeline, decode_timeline)
    sequence.num_prompt, sequence.num_sampled = len(prompt), len(plan.answer_ids)
    return sequence


def with_answer(positions: PositionArray, delta: int, num_tokens: int) -> PositionArray:
    """Positions of a prompt (axes, n) and of `num_tokens` of its answer: an index of the whole sequence plus the
    prompt's `delta`, on all axes, wherever the answer is taken up again."""
    axes, num_prompt = positions.shape
    answer = np.arange(num_prompt, num_prompt + num_tokens, dtype=np.int64) + delta
    return np.concatenate([positions, np.broadcast_to(answer, (axes, num_tokens))], axis=1)


def rows_view(buffer: memoryview, num_tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """(num_tokens, row_elements) over a landing slot's bytes, without a copy."""
    return torch.frombuffer(buffer, dtype=dtype).view(num_tokens, -1)
