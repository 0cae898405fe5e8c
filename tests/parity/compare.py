"""Are our tokens and logits those of the reference? Exact, but for ties of the reference itself.

Where the reference's two best logits lie within `TIE` of each other, float32 rounding may decide either way. If we
took the other one, the histories part: from there on we are compared with what the reference says after *our* tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tests.parity.reference import Reference

TIE = 1e-4
LOGITS_WITHIN = 1e-4
TIES_AT_MOST = 0.005

Logits = npt.NDArray[np.float32]
Forced = Callable[[Sequence[int]], Logits]


@dataclass(slots=True)
class Comparison:
    """Counts over one or many outputs. `differing` holds (position, reference's token, ours) of what no tie excuses."""

    outputs: int = 0
    positions: int = 0
    ties: int = 0
    ties_taken_otherwise: int = 0
    max_logit_difference: float = 0.0
    differing: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def tie_share(self) -> float:
        return self.ties / self.positions if self.positions else 0.0

    @property
    def is_exact(self) -> bool:
        return not self.differing and self.max_logit_difference <= LOGITS_WITHIN

    @property
    def has_few_ties(self) -> bool:
        """Ties belong to the reference alone and come in clusters (turns of one conversation): ask this of whole sets.

        A small sample may hold most of the ties of its set.
        """
        return self.tie_share <= TIES_AT_MOST

    def add(self, other: Comparison) -> None:
        self.outputs += other.outputs
        self.positions += other.positions
        self.ties += other.ties
        self.ties_taken_otherwise += other.ties_taken_otherwise
        self.max_logit_difference = max(self.max_logit_difference, other.max_logit_difference)
        self.differing += other.differing


def compare(reference: Reference, tokens: Sequence[int], logits: Logits, forced: Forced) -> Comparison:
    """Compares one output.

    Args:
        tokens: ours, as many as the reference's, or it is a difference.
        logits: ours, (len(tokens), vocabulary), float32.
        forced: gives the reference's logits (n, vocabulary) along a given list of n tokens.

    After a token that differs, the comparison goes on along our tokens too, so that the count says whether one step
    was wrong or all that followed.
    """
    result = Comparison(outputs=1, positions=len(reference.tokens))
    result.differing += _missing(reference.tokens, tokens)
    truth = reference.logits
    for position, token in enumerate(tokens[: len(reference.tokens)]):
        row = truth[position]
        best = int(row.argmax())
        is_tie = _is_tie(row)
        result.ties += is_tie
        result.max_logit_difference = max(result.max_logit_difference, _distance(row, logits, position))
        if token == best:
            continue
        if is_tie and row[best] - row[token] <= TIE:
            result.ties_taken_otherwise += 1
        else:
            result.differing.append((position, best, token))
        truth = forced(list(tokens))
    return result


def _missing(expected: Sequence[int], tokens: Sequence[int]) -> list[tuple[int, int, int]]:
    """Positions that only one side has; -1 stands for no token."""
    short, long = sorted((len(expected), len(tokens)))
    return [
        (i, expected[i] if i < len(expected) else -1, tokens[i] if i < len(tokens) else -1) for i in range(short, long)
    ]


def _is_tie(row: Logits) -> bool:
    second, best = np.partition(row, -2)[-2:]
    return bool(best - second <= TIE)


def _distance(row: Logits, logits: Logits, position: int) -> float:
    """Infinite where ours is missing, of another width, or not a number."""
    if position >= len(logits) or logits.shape[1:] != row.shape:
        return float("inf")
    distance = float(np.abs(logits[position].astype(np.float64) - row).max())
    return distance if np.isfinite(distance) else float("inf")
