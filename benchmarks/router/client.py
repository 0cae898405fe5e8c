"""The process that makes the load: told of one job after the other, it says what came of each.

python -m benchmarks.router.client    (ends with its standard input)
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import uvloop

from benchmarks.router.bodies import Bodies
from benchmarks.router.direct import Direct
from benchmarks.router.processes import cpu_s, say
from benchmarks.router.wire import BadAnswer, Connection

CHAT_PATH = "/v1/chat/completions"
ECHO, TEXT, PICTURE = "echo", "text", "picture"
Ask = Callable[[int], Awaitable["Sample"]]


@dataclass(frozen=True, slots=True)
class Job:
    """`kind`: what is asked. `stream`: whether the answer comes as events. With `fakes` (worker id -> address) and
    `token` the workers are asked themselves, without a router. It ends after `requests`, or after `seconds` if that is
    given."""

    kind: str
    url: str
    requests: int
    clients: int
    stream: bool = False
    seconds: float | None = None
    model: str = ""
    max_tokens: int = 32
    fakes: dict[str, str] | None = None
    token: str | None = None
    first_number: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    first_s: float
    total_s: float
    num_reads: int


class Load:
    """So many clients, each with one request after the other; the numbers of requests are never used twice."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._samples: list[Sample] = []
        self._errors: list[str] = []

    async def run(self) -> dict[str, Any]:
        asks = [await self._new_client() for _ in range(self._job.clients)]
        start_s, start_cpu_s = time.perf_counter(), cpu_s(os.getpid())
        numbers = self._numbers()
        await asyncio.gather(*(self._follow(ask, numbers) for ask in asks))
        return {
            "wall_s": time.perf_counter() - start_s,
            "cpu_s": cpu_s(os.getpid()) - start_cpu_s,
            "first_s": [sample.first_s for sample in self._samples],
            "total_s": [sample.total_s for sample in self._samples],
            "reads": sum(sample.num_reads for sample in self._samples),
            "errors": self._errors[:5],
            "num_errors": len(self._errors),
        }

    def _numbers(self) -> Iterator[int]:
        job = self._job
        if job.seconds is None:
            return iter(range(job.first_number, job.first_number + job.requests))
        end_s = time.perf_counter() + job.seconds
        return self._until(end_s)

    def _until(self, end_s: float) -> Iterator[int]:
        number = self._job.first_number
        while time.perf_counter() < end_s:
            yield number
            number += 1

    async def _follow(self, ask: Ask, numbers: Iterator[int]) -> None:
        for number in numbers:
            try:
                self._samples.append(await ask(number))
            except Exception as error:
                self._errors.append(f"{type(error).__name__}: {error}"[:300])
                if len(self._errors) > 20:
                    return

    async def _new_client(self) -> Ask:
        job = self._job
        if job.fakes is not None:
            direct = Direct(job.fakes, job.token, job.max_tokens, with_picture=job.kind == PICTURE)
            return lambda number: _directly(direct, number)
        connection = await Connection.open(job.url)
        bodies, path, mark = _asked(job)

        async def ask(number: int) -> Sample:
            reply = await connection.post(path, bodies.make(number))
            if mark not in reply.body[-1000:]:
                raise BadAnswer(f"not the answer: {reply.body[-300:]!r}")
            return Sample(reply.first_s, reply.total_s, reply.num_reads)

        return ask


async def _directly(direct: Direct, number: int) -> Sample:
    first_s, total_s = await direct.ask(number)
    return Sample(first_s, total_s, 0)


def _asked(job: Job) -> tuple[Bodies, str, bytes]:
    """Bodies, path, and what every right answer ends with."""
    if job.kind == ECHO:
        return Bodies.plain(200_000), "/", b"x"
    make = Bodies.text if job.kind == TEXT else Bodies.picture
    mark = f'"completion_tokens":{job.max_tokens}'.encode()
    return make(job.model, job.max_tokens, stream=job.stream), CHAT_PATH, mark


async def serve() -> None:
    say({"ready": True})
    while line := await asyncio.to_thread(sys.stdin.readline):
        say(await Load(Job(**json.loads(line))).run())


if __name__ == "__main__":
    uvloop.run(serve())
