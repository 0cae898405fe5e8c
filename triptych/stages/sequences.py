"""From a plan to a sequence, the same on prefill and decode."""

from __future__ import annotations

import torch

from triptych.core.errors import InvalidRequest, RequestTooLarge, TransferRefused
from triptych.core.ids import AttemptRef
from triptych.core.plan import Plan
from triptych.core.timeline import Timeline
from triptych.engine.sequence import Sequence, SequenceSink
from triptych.model.adapters.base import Adapter


def check_plan(plan: Plan, adapter: Adapter) -> None:
    """Raises when this worker's weights are not the plan's, or the model cannot take it."""
    if plan.model_fingerprint != adapter.fingerprint:
        raise TransferRefused("the plan was made for another model than this worker serves")
    if not plan.compact_ids:
        raise InvalidRequest("the prompt is empty")
    if max(plan.compact_ids) >= adapter.vocab_size:
        raise InvalidRequest("the prompt holds a token that the model does not know")
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
    ids = adapter.expand(plan.compact_ids, plan.items)
    positions, delta = adapter.positions(len(ids), plan.items)
    sequence = Sequence(ref, plan, ids.tolist(), positions, delta, sink, timeline, decode_timeline)
    sequence.num_prompt = len(ids)
    return sequence


def rows_view(buffer: memoryview, num_tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """(num_tokens, row_elements) over a landing slot's bytes, without a copy."""
    return torch.frombuffer(buffer, dtype=dtype).view(num_tokens, -1)
