"""The comparison of answers excuses ties and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from tests.integration.answers import assert_same_answers
from triptych.core.plan import FinishReason
from triptych.testing.cluster import ChatResult


def answer(ids: list[int], runner_up: int, gap: float) -> ChatResult:
    """In its second token the best is `gap` above `runner_up`."""
    logits = np.zeros((len(ids), 10), np.float32)
    logits[range(len(ids)), ids] = 1.0
    logits[1, runner_up] = 1.0 - gap
    return ChatResult(ids, logits, 0, FinishReason.LENGTH, ())


def test_only_ties_are_excused() -> None:
    tie = answer([1, 2, 3], 7, 5e-5)
    assert_same_answers([tie], [[1, 2, 3]])
    assert_same_answers([tie], [[1, 7, 9]])
    for found in ([1, 2, 4], [1, 8, 3], [7, 2, 3], [1, 2], [1, 2, 3, 4]):
        with pytest.raises(AssertionError):
            assert_same_answers([tie], [found])
    with pytest.raises(AssertionError):
        assert_same_answers([answer([1, 2, 3], 7, 5e-4)], [[1, 7, 9]])
