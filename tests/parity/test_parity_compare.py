"""The comparison itself: it passes what is equal and it can fail."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.parity.compare import Comparison, Logits, compare
from tests.parity.reference import Reference

VOCABULARY = 50


def logits_after(history: Sequence[int]) -> Logits:
    """A toy model: one row per history, far from ties."""
    rows = np.random.default_rng([len(history), *history]).normal(size=VOCABULARY) * 3
    rows[int(rows.argmax())] += 0.5
    return rows.astype(np.float32)


def greedy(count: int = 12) -> Reference:
    tokens: list[int] = []
    rows = []
    for _ in range(count):
        rows.append(logits_after(tokens))
        tokens.append(int(rows[-1].argmax()))
    return Reference(tuple(tokens), np.stack(rows))


def forced(tokens: Sequence[int]) -> Logits:
    return np.stack([logits_after(tokens[:i]) for i in range(len(tokens))])


def never(_tokens: Sequence[int]) -> Logits:
    raise AssertionError("nothing parted, so nothing is to be forced")


def with_tie(reference: Reference, position: int, gap: float) -> tuple[Reference, int]:
    """The reference with the runner-up of `position` brought within `gap` of the best; and that runner-up."""
    logits = reference.logits.copy()
    best, second = np.argsort(logits[position])[[-1, -2]]
    logits[position, second] = logits[position, best] - np.float32(gap)
    return Reference(reference.tokens, logits), int(second)


def test_parity_compare_takes_what_is_equal() -> None:
    reference = greedy()
    result = compare(reference, reference.tokens, reference.logits + np.float32(5e-5), never)
    assert result.is_exact
    assert (result.outputs, result.positions, result.ties) == (1, 12, 0)
    assert 4e-5 < result.max_logit_difference < 6e-5


def test_parity_compare_sees_one_wrong_token() -> None:
    reference = greedy()
    ours = [*reference.tokens]
    ours[5] = (ours[5] + 1) % VOCABULARY
    for i in range(6, 12):  # what the model would have said after the wrong one
        ours[i] = int(logits_after(ours[:i]).argmax())
    result = compare(reference, ours, forced(ours), forced)
    assert result.differing == [(5, reference.tokens[5], ours[5])]
    assert not result.is_exact


def test_parity_compare_sees_all_that_follows_a_lost_history() -> None:
    reference = greedy()
    ours = [(token + 1) % VOCABULARY for token in reference.tokens]
    result = compare(reference, ours, forced(ours), forced)
    assert len(result.differing) >= 11


@pytest.mark.parametrize("bad", [2e-4, float("nan"), float("inf")])
def test_parity_compare_sees_one_wrong_logit(bad: float) -> None:
    reference = greedy()
    logits = reference.logits.copy()
    logits[11, 3] += np.float32(bad)
    result = compare(reference, reference.tokens, logits, never)
    assert not result.differing
    assert result.max_logit_difference > 1e-4
    assert not result.is_exact


@pytest.mark.parametrize("count", [0, 11, 13])
def test_parity_compare_sees_a_wrong_length(count: int) -> None:
    reference, longer = greedy(), greedy(13)
    result = compare(reference, longer.tokens[:count], longer.logits[:count], never)
    assert len(result.differing) == abs(12 - count)


def test_parity_compare_sees_missing_logits() -> None:
    reference = greedy()
    assert compare(reference, reference.tokens, reference.logits[:-1], never).max_logit_difference == float("inf")
    assert compare(reference, reference.tokens, reference.logits[:, 1:], never).max_logit_difference == float("inf")


def test_parity_compare_goes_on_after_a_tie_along_our_tokens() -> None:
    reference, runner_up = with_tie(greedy(), 4, 5e-5)
    ours = [*reference.tokens[:4], runner_up]
    while len(ours) < 12:
        ours.append(int(logits_after(ours).argmax()))
    logits = forced(ours)
    logits[4] = reference.logits[4]
    result = compare(reference, ours, logits, forced)
    assert not result.differing
    assert (result.ties, result.ties_taken_otherwise) == (1, 1)
    assert result.max_logit_difference <= 1e-4


def test_parity_compare_sees_a_fault_after_a_tie() -> None:
    reference, runner_up = with_tie(greedy(), 4, 5e-5)
    ours = [*reference.tokens[:4], runner_up]
    while len(ours) < 12:
        ours.append(int(logits_after(ours).argmax()))
    logits = forced(ours)
    logits[4] = reference.logits[4]
    ours[9] = (ours[9] + 1) % VOCABULARY
    assert (9, int(logits[9].argmax()), ours[9]) in compare(reference, ours, logits, forced).differing


def test_parity_compare_excuses_no_token_beyond_the_tie() -> None:
    reference, _ = with_tie(greedy(), 4, 5e-5)
    third = int(np.argsort(reference.logits[4])[-3])
    ours = [*reference.tokens[:4], third]
    while len(ours) < 12:
        ours.append(int(logits_after(ours).argmax()))
    result = compare(reference, ours, forced(ours), forced)
    assert result.differing[0] == (4, reference.tokens[4], third)


def test_parity_compare_sees_many_ties() -> None:
    reference, _ = with_tie(greedy(), 4, 5e-5)
    result = compare(reference, reference.tokens, reference.logits, never)
    assert result.ties == 1
    assert result.is_exact
    assert not result.has_few_ties  # one of twelve positions is far more than half a percent


def test_parity_comparisons_add_up() -> None:
    total = Comparison()
    total.add(Comparison(1, 32, 1, 0, 3e-5))
    total.add(Comparison(1, 32, 2, 1, 1e-5, [(3, 1, 2)]))
    assert (total.outputs, total.positions, total.ties, total.ties_taken_otherwise) == (2, 64, 3, 1)
    assert total.max_logit_difference == 3e-5
    assert total.differing == [(3, 1, 2)]
