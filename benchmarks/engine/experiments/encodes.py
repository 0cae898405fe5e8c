"""`encodes_per_unique_picture`: pictures that went through the tower, for each different one that was asked about.

Two encoders; the same pictures in several requests at once, in other orders and company, and once more later. One is
the least there can be."""

from __future__ import annotations

import asyncio
import random

from benchmarks.engine.arms import Case
from benchmarks.engine.budget import Budget
from benchmarks.engine.experiments.cluster import Cluster, cluster
from benchmarks.engine.load import run
from benchmarks.engine.prompts import with_pictures

ENCODERS = 2
UNIQUE, REQUESTS, PICTURES = 12, 24, 3
COUNTER = 'triptych_encoder_items_total{source="remote"}'


def measure(case: Case, threads: int, budget: Budget, unique: int = UNIQUE, requests: int = REQUESTS) -> float:
    """Raises StartFailed or AskFailed."""
    dice = random.Random(1)
    choices = [dice.sample(range(unique), PICTURES) for _ in range(requests)]
    asked = [with_pictures(chosen, f"{index}", 2) for index, chosen in enumerate(choices)]
    with cluster(case, threads, budget, "--encoders", str(ENCODERS)) as running:
        before = _encoded(running)
        for _ in range(2):
            asyncio.run(run(running.server, asked, 8, budget.left_s()))
        return round((_encoded(running) - before) / len({picture for chosen in choices for picture in chosen}), 3)


def _encoded(running: Cluster) -> float:
    return sum(running.counter(f"encoder-{index}", COUNTER) for index in range(ENCODERS))
