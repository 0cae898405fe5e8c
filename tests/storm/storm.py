"""One storm: everything about it is decided by its seed."""

from __future__ import annotations

import functools
import random
import time
from dataclasses import dataclass, field

import torch

from tests.storm.camp import Camp
from tests.storm.trouble import Counts
from tests.storm.truth import TruthBook
from tests.storm.wishes import draw_wishes
from tests.storm.world import FAMILIES, world_of
from tests.storm.yard import Yard

CAMP_SHARE = 0.4
"""Of the storms, those over a cluster."""


@dataclass
class Report:
    """What one storm, or many, went through."""

    storms: int = 0
    requests: int = 0
    answers: int = 0
    tokens: int = 0
    compared_rows: int = 0
    max_logit_difference: float = 0.0
    wall_s: float = 0.0
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        if isinstance(self.counts, dict):  # from JSON
            self.counts = Counts(**self.counts)

    def add(self, other: Report) -> None:
        self.storms += other.storms
        self.requests += other.requests
        self.answers += other.answers
        self.tokens += other.tokens
        self.compared_rows += other.compared_rows
        self.max_logit_difference = max(self.max_logit_difference, other.max_logit_difference)
        self.wall_s += other.wall_s
        self.counts.add(other.counts)


@functools.cache
def truths_of(family: str) -> TruthBook:
    return TruthBook(world_of(family))


def run_storm(seed: int) -> Report:
    """Raises when a promise is broken."""
    is_camp = random.Random(f"place/{seed}").random() < CAMP_SHARE
    return run_camp(seed) if is_camp else run_yard(seed)


def run_yard(seed: int) -> Report:
    return _run(seed, Yard)


def run_camp(seed: int) -> Report:
    return _run(seed, Camp)


def _run(seed: int, place: type[Yard] | type[Camp]) -> Report:
    torch.set_num_threads(1)
    start_s = time.monotonic()
    family = FAMILIES[seed % len(FAMILIES)]
    wishes = draw_wishes(random.Random(f"wishes/{seed}"), world_of(family), truths_of(family))
    storm = place(seed, world_of(family), wishes)
    storm.run()
    return Report(
        storms=1,
        requests=len(storm.replies),
        answers=sum(reply.reason is not None for reply in storm.replies),
        tokens=sum(len(reply.tokens) for reply in storm.replies),
        compared_rows=storm.witness.num_rows,
        max_logit_difference=storm.witness.max_difference,
        wall_s=time.monotonic() - start_s,
        counts=storm.counts,
    )
