"""`text_ttft_p99_under_images`: p99 of the time to the first token of text, while eight-picture requests flood the
cluster, over the same without them. Twice: with real workers, where the two share the cores, and with workers that are
only slow, in time that costs no core: what is left of the ratio there is the router's doing and the policies'."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from benchmarks.engine.arms import Case
from benchmarks.engine.budget import Budget
from benchmarks.engine.client import AskFailed, Question, ask
from benchmarks.engine.experiments.cluster import cluster
from benchmarks.engine.load import Server
from benchmarks.engine.prompts import flat_picture_part, only_text
from benchmarks.engine.samples import percentile

PICTURES, FLOOD_CLIENTS, TEXTS = 8, 4, 60
# The fakes: what a step of each stage is made to take.
FAKE_MS = {"encoder.before_encode": 60, "prefill.before_step": 10, "decode.before_step": 5}


def measure_real(case: Case, threads: int, budget: Budget, texts: int = TEXTS) -> float:
    """Raises StartFailed or AskFailed."""
    with cluster(case, threads, budget) as running:
        return asyncio.run(_ratio(running.server, budget, texts))


def measure_timed(case: Case, budget: Budget, texts: int = TEXTS) -> float:
    """The same cluster with stages that wait longer than they compute: the bundled model is small enough to be a fake.
    Raises StartFailed or AskFailed."""
    slow = "; ".join(f"{name}=delay({ms})" for name, ms in FAKE_MS.items())
    with cluster(case, 1, budget, variables={"TRIPTYCH_FAILPOINTS": slow}) as running:
        return asyncio.run(_ratio(running.server, budget, texts))


async def _ratio(server: Server, budget: Budget, texts: int) -> float:
    numbers = itertools.count()
    await _p99_ms(server, budget, numbers, 4)  # warms up
    alone = await _p99_ms(server, budget, numbers, texts)
    async with _flood(server, budget):
        await asyncio.sleep(1.0)
        under = await _p99_ms(server, budget, numbers, texts)
    return round(under / alone, 3)


async def _p99_ms(server: Server, budget: Budget, numbers: Iterator[int], count: int) -> float:
    """One text after the other, each another."""
    found = []
    for _ in range(count):
        question = only_text(f"What is {next(numbers)} plus 4?", 2)
        sample = await ask(server.url, server.model, question, timeout_s=max(1.0, budget.left_s()))
        found.append(1e3 * sample.first_s)
    return percentile(found, 99)


@asynccontextmanager
async def _flood(server: Server, budget: Budget) -> AsyncIterator[None]:
    """Clients that ask about new pictures as fast as they are answered."""
    dice = random.Random(3)

    async def client() -> None:
        while True:
            parts = [flat_picture_part(dice.randrange(1 << 24)) for _ in range(PICTURES)]
            question = Question([{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}], 4)
            await ask(server.url, server.model, question, timeout_s=max(1.0, budget.left_s()))

    clients = [asyncio.ensure_future(client()) for _ in range(FLOOD_CLIENTS)]
    try:
        yield
        if any(task.done() for task in clients):
            raise AskFailed("the flood ended before the texts did")
    finally:
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
