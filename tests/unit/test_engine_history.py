"""What the sampler is told of a sequence: the same on the worker that samples the first token and on the next."""

from __future__ import annotations

from typing import Any

import numpy as np

from triptych.core.clock import SystemClock
from triptych.core.ids import AttemptRef
from triptych.core.plan import FinishReason, Plan, Sampling, Token, TokenLogprobs
from triptych.core.timeline import Timeline
from triptych.engine.sequence import Sequence
from triptych.mm.sentinels import SENTINEL_BASE
from triptych.model.sampler import SampleRow

PROMPT = [7, 3, SENTINEL_BASE + 5, SENTINEL_BASE + 6, 7, 9, 3]


def sequence_of(sampling: Sampling, choice: int = 0) -> Sequence:
    plan, timeline = Plan(tuple(PROMPT), (), sampling, 1.0), Timeline("decode", "d", SystemClock())
    positions = np.zeros((3, len(PROMPT)), dtype=np.int64)
    sink: Any = None
    made = Sequence(AttemptRef("req-1", choice), plan, list(PROMPT), positions, 0, sink, timeline, timeline)
    made.num_prompt = len(PROMPT)
    return made


def told(row: SampleRow) -> tuple[list[int], list[int]]:
    assert row.history is not None
    return row.history.prompt_ids.tolist(), row.history.answer_ids.tolist()


def test_the_history_is_the_prompts_tokens_and_the_answer() -> None:
    sequence = sequence_of(Sampling(9, repetition_penalty=1.1))
    assert told(sequence.sample_row()) == ([3, 7, 9], [])
    for index, token in enumerate((4, 7, 4)):
        sequence.take(Token(index, token, TokenLogprobs(-1.0)))
    row = sequence.sample_row()
    assert told(row) == ([3, 7, 9], [4, 7, 4])
    assert (row.position, row.index) == (len(PROMPT) + 3, 3)


def test_a_sequence_that_another_worker_began_has_the_same_history() -> None:
    """As the decode stage adopts it: the first token comes with the KV commit."""
    began, adopted = (sequence_of(Sampling(9, presence_penalty=1.0), choice=2) for _ in range(2))
    began.take(Token(0, 4))
    adopted.num_computed, adopted.num_sampled = adopted.num_prompt, 1
    adopted.ids.append(4)
    one, other = began.sample_row(), adopted.sample_row()
    assert told(one) == told(other) == ([3, 7, 9], [4])
    assert (one.position, one.index, one.choice) == (other.position, other.index, other.choice)


def test_no_history_is_kept_where_nothing_asks_for_it() -> None:
    sequence = sequence_of(Sampling(9, temperature=1.0, top_k=5, logit_bias=((1, 1.0),)))
    assert sequence.sample_row().history is None
    assert sequence.prompt_vocabulary is None


def test_only_what_ends_the_answer_ends_it() -> None:
    """A model's end token that is ignored is one like any other."""
    sequence = sequence_of(Sampling(9, stop_token_ids=frozenset({5}), eos_token_ids=frozenset({6})))
    assert sequence.finish_reason(Token(0, 6)) is None
    assert sequence.finish_reason(Token(0, 5)) is FinishReason.STOP
    assert sequence.finish_reason(Token(8, 6)) is FinishReason.LENGTH
