"""How often an answer may be tried again, and why not once more. Pure: whoever asks says the time.

a try is lost to        it is tried again                                        unless
-----------------       -----------------------------------------------------    ---------------------------------
memory pressure         at once, at the same workers                             MAX_RETRACTIONS were before
a worker or its link    elsewhere, a moment later, with the tokens that are out  MAX_FAILURES - 1 were before, or
                                                                                 the router's budget is used up, or
                                                                                 it has cost two workers their lives
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from triptych.core.errors import RequestRefused, TriptychError, Unavailable
from triptych.core.plan import MAX_RETRACTIONS, FinishReason, Plan

MAX_FAILURES: Final = 3
FIRST_PAUSE_S: Final = 0.025
"""Most that the first try again waits, twice that for the next: those that one dead worker has left do not come back
in one moment."""


class RetryBudget:
    """Of one router: tries again may add only so much to the load of a cluster that fails already.

    A bucket of `capacity` tries, full at first; each answer that begins puts `share` of one into it.
    """

    def __init__(self, capacity: float = 256.0, share: float = 0.2) -> None:
        self._capacity = capacity
        self._share = share
        self._left = capacity

    def answer_begins(self) -> None:
        self._left = min(self._capacity, self._left + self._share)

    def try_take(self) -> bool:
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


@dataclass(slots=True)
class Tries:
    """What one answer has used up so far."""

    budget: RetryBudget
    num_failures: int = 0
    num_retractions: int = 0
    lost_workers: set[str] = field(default_factory=set)

    def retracted(self) -> None:
        """Raises Unavailable when that was once too often."""
        self.num_retractions += 1
        if self.num_retractions > MAX_RETRACTIONS:
            raise Unavailable("there was too little memory for the answer to go on; try again later")

    def failed(self, error: TriptychError, failed_workers: set[str], lost_workers: set[str]) -> None:
        """`failed_workers` are those to avoid, `lost_workers` those of them whose process or host went while it worked
        on this. Raises `error` when there is nobody to blame or nothing left to spend, RequestRefused when others were
        lost in an earlier try: then it may be the request. (Several in one try are a host, or a plug.)"""
        self.num_failures += 1
        is_second = bool(self.lost_workers and lost_workers - self.lost_workers)
        self.lost_workers |= lost_workers
        if is_second:
            raise RequestRefused(
                "two workers were lost while they worked on this request, so it is not given to a third. If they were"
                " stopped for another reason, send it again"
            ) from error
        if self.num_failures >= MAX_FAILURES or not failed_workers or not self.budget.try_take():
            raise error

    def pause_s(self, chance: float) -> float:
        """How long to wait before the next try; `chance` is between 0 and 1."""
        return chance * FIRST_PAUSE_S * 2.0 ** (self.num_failures - 1)


def end_of(plan: Plan, ids: list[int]) -> FinishReason | None:
    """Why an answer of those tokens has ended; None when it has not. A worker that is lost after its last token has
    left nothing to be repeated."""
    if ids and ids[-1] in plan.sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(ids) >= plan.sampling.max_tokens else None
