"""Requests in a closed loop: as many clients as the concurrency says, each asking again when it was answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.engine.client import Question, ask
from benchmarks.engine.samples import Sample


@dataclass(frozen=True, slots=True)
class Server:
    """Where an arm answers, and by which name of the model."""

    url: str
    model: str


@dataclass(frozen=True, slots=True)
class Run:
    """All answers of a round in the order of the questions, and its wall time."""

    samples: list[Sample]
    wall_s: float


async def run(server: Server, questions: Sequence[Question], concurrency: int, timeout_s: float) -> Run:
    """Raises AskFailed as soon as one request fails: a round with holes in it is none."""
    waiting = iter(list(enumerate(questions)))
    answers: dict[int, Sample] = {}

    async def client() -> None:
        for index, question in waiting:
            left_s = timeout_s - (time.perf_counter() - start_s)
            answers[index] = await ask(server.url, server.model, question, concurrency, timeout_s=left_s)

    start_s = time.perf_counter()
    clients = [asyncio.ensure_future(client()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*clients)
    finally:
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    wall_s = time.perf_counter() - start_s
    return Run([answers[index] for index in range(len(questions))], wall_s)
