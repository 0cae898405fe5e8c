"""Ours against each of the others over the same seeds: the same users ask the same things at the same first moments.

The test is paired, by seed: of the logarithm of (theirs / ours) the mean over seeds and its 95% confidence interval by
Student's t. Ours is better where the whole interval lies above a ratio of 1.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.routing.load import Workload
from benchmarks.routing.policies import OURS, POLICIES
from benchmarks.routing.simulation import Outcome, Simulation

NUM_SEEDS: Final = 20
LEAST_SHARE: Final = 0.98
"""Of the best of the others: what ours may fall to where there is nothing to gain."""

BUSY: Final = Workload("busy", think_s=1.0)
SATURATED: Final = (
    Workload("saturated", think_s=0.01),
    Workload("saturated, one picture", think_s=0.01, reuse=1.0),
    Workload("saturated, nothing shared", think_s=0.01, reuse=0.0, shares_nothing=True),
)
OTHERS: Final = tuple(name for name in POLICIES if name != OURS)

# Student's t, two-sided 95%, by degrees of freedom.
_T95: Final = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 14: 2.145, 19: 2.093, 29: 2.045}


@dataclass(frozen=True, slots=True)
class Ratio:
    """Theirs over ours: the geometric mean over seeds, and its 95% confidence interval."""

    mean: float
    low: float
    high: float

    @property
    def is_better(self) -> bool:
        return self.low > 1.0


Outcomes = dict[str, list[Outcome]]
"""By policy, one for each seed."""


def run_all(workload: Workload, num_seeds: int = NUM_SEEDS, first_seed: int = 0) -> Outcomes:
    seeds = range(first_seed, first_seed + num_seeds)
    return {policy: [Simulation(policy, workload, seed).run() for seed in seeds] for policy in POLICIES}


def ttft_p50(outcome: Outcome) -> float:
    return outcome.ttft_p50_s


def ttft_mean(outcome: Outcome) -> float:
    return outcome.ttft_mean_s


def encodes(outcome: Outcome) -> float:
    return outcome.encodes_per_unique_picture


def ratio(outcomes: Outcomes, other: str, figure: Callable[[Outcome], float]) -> Ratio:
    pairs = zip(outcomes[other], outcomes[OURS], strict=True)
    return paired([math.log(figure(theirs) / figure(ours)) for theirs, ours in pairs])


def paired(logs: Sequence[float]) -> Ratio:
    mean, count = statistics.fmean(logs), len(logs)
    degrees = max(known for known in _T95 if known <= count - 1)  # fewer are the more careful
    margin = _T95[degrees] * statistics.stdev(logs) / math.sqrt(count)
    return Ratio(math.exp(mean), math.exp(mean - margin), math.exp(mean + margin))


def shares_of_best(outcomes: Outcomes) -> list[float]:
    """For each seed: the mean TTFT of the best of the others over ours. At least LEAST_SHARE in the mean over seeds is
    what is asked for."""
    by_seed = zip(*(outcomes[other] for other in OTHERS), strict=True)
    bests = [min(ttft_mean(outcome) for outcome in theirs) for theirs in by_seed]
    return [best / ttft_mean(ours) for best, ours in zip(bests, outcomes[OURS], strict=True)]
