"""`overlap_ratio`: time to the first token with six pictures, the last of which comes 300 ms late to the tower, over
the longest chain of work that waited for nothing but what it needs. One means that all else ran meanwhile.

The chain is read from the timeline: the router's own work up to the dispatch; then what the late picture took, from the
first of its own events to its rows in prefill's memory, the delay included; then the work of prefill that needs it,
which is what its chunks did after it had landed.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.engine.arms import Case
from benchmarks.engine.budget import Budget
from benchmarks.engine.client import ask
from benchmarks.engine.experiments.cluster import cluster
from benchmarks.engine.prompts import with_pictures
from benchmarks.engine.samples import Sample

PICTURES, DELAY_MS, TRIES = 6, 300, 7
FAILPOINT = f"encoder.encode_item=delay({DELAY_MS}, item={PICTURES - 1})"
Row = dict[str, Any]


def measure(case: Case, threads: int, budget: Budget, tries: int = TRIES) -> float:
    """The median over requests. Raises StartFailed or AskFailed."""
    dice = random.Random(2)
    with cluster(case, threads, budget, variables={"TRIPTYCH_FAILPOINTS": FAILPOINT}) as running:
        ratios = []
        for number in range(1 + tries):
            question = with_pictures([dice.randrange(1 << 24) for _ in range(PICTURES)], str(number), 2)
            server = running.server
            answer = ask(server.url, server.model, question, timeout_s=max(1.0, budget.left_s()), timeline="1")
            ratios.append(ratio(asyncio.run(answer)))
    return round(statistics.median(ratios[1:]), 3)  # the first warms up


def ratio(sample: Sample) -> float:
    return sample.first_s / chain_s(sample.timeline, PICTURES - 1)


def chain_s(rows: Sequence[Row], late: int) -> float:
    """Seconds of the chain through the item `late`."""
    before = [row for row in rows if row["stage"] == "router" and row["event"] in ("parse", "plan")]
    own = [row for row in rows if row["stage"] == "encoder" and row["item"] == late and row["event"] != "slot_wait"]
    landed_ns = max(row["end_ns"] for row in own)
    waited_ns = landed_ns - min(row["start_ns"] for row in own)
    needing = [
        row for row in rows if row["stage"] == "prefill" and row["event"] == "chunk" and row["end_ns"] > landed_ns
    ]
    after_ns = sum(row["end_ns"] - max(row["start_ns"], landed_ns) for row in needing)
    total_ns: int = sum(row["end_ns"] - row["start_ns"] for row in before) + waited_ns + after_ns
    return total_ns / 1e9
