"""Arms taking turns: at each size one after the other, each round beginning with another arm."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.engine.budget import Budget
from benchmarks.transport.arms import Arm
from benchmarks.transport.cells import LARGE_BYTES, shown, under_way
from benchmarks.transport.others import NotMoved
from benchmarks.transport.results import Results, Turn
from triptych.core.errors import TriptychError

NO_TIME = "it did not fit into the time"
# The most that one transfer may take before its arm is given up.
STUCK_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Pace:
    """How long an arm is measured in one turn, for each of round trip and stream; there are at least so many
    transfers, however long they take, and at most so many. Sizes above `cells.LARGE_BYTES`, of which one transfer may
    take as long, come last and have rounds of their own number."""

    rounds: int
    large_rounds: int
    seconds: float
    least: int = 2
    most: int = 400


async def take_turns(
    arms: Mapping[str, Arm], sizes: Sequence[int], pace: Pace, budget: Budget, results: Results
) -> None:
    """Fills `results`; an arm that fails is missing from there on, with the reason."""
    left = dict(arms)
    small = [num_bytes for num_bytes in sizes if num_bytes <= LARGE_BYTES]
    large = [num_bytes for num_bytes in sizes if num_bytes > LARGE_BYTES]
    turns = [(number, num_bytes) for number in range(pace.rounds) for num_bytes in small]
    turns += [(number, num_bytes) for number in range(pace.large_rounds) for num_bytes in large]
    for number, num_bytes in turns:
        names = list(left)
        first = number % max(1, len(names))
        for name in names[first:] + names[:first]:
            await _turn(name, left, num_bytes, number, pace, budget, results)


async def _turn(
    name: str, left: dict[str, Arm], num_bytes: int, number: int, pace: Pace, budget: Budget, results: Results
) -> None:
    if not budget.has(2 * pace.seconds):
        results.missing.setdefault(name, f"{shown(num_bytes)}, round {number + 1}: {NO_TIME}")
        return
    try:
        async with asyncio.timeout(STUCK_SECONDS):
            turn = await measured(left[name], num_bytes, pace)
    except (NotMoved, TriptychError, OSError, RuntimeError, ExceptionGroup) as error:
        results.missing[name] = f"{shown(num_bytes)}: {type(error).__name__}: {error}"[:300]
        del left[name]
        return
    results.keep(name, num_bytes, number, turn)
    print(
        f"  {shown(num_bytes)} {name}: round trip {1e6 * turn.round_trip_s:.0f} us, {turn.bytes_per_s / 1e9:.2f} GB/s",
        flush=True,
    )


async def measured(arm: Arm, num_bytes: int, pace: Pace) -> Turn:
    """Once unmeasured: pages and connections are there then."""
    await arm.stream(num_bytes, under_way(num_bytes))
    prepares, round_trips = await _one_at_a_time(arm, num_bytes, pace)
    bytes_per_s = await _streamed(arm, num_bytes, statistics.median(round_trips), pace)
    return Turn(statistics.median(round_trips), statistics.median(prepares), bytes_per_s)


async def _one_at_a_time(arm: Arm, num_bytes: int, pace: Pace) -> tuple[list[float], list[float]]:
    prepares: list[float] = []
    round_trips: list[float] = []
    give_up_at_s = time.perf_counter() + pace.seconds
    while len(round_trips) < pace.least or (time.perf_counter() < give_up_at_s and len(round_trips) < pace.most):
        asked_s = time.perf_counter()
        move = await arm.prepare(num_bytes)
        start_s = time.perf_counter()
        await move()
        round_trips.append(time.perf_counter() - start_s)
        prepares.append(start_s - asked_s)
    return prepares, round_trips


async def _streamed(arm: Arm, num_bytes: int, expected_s: float, pace: Pace) -> float:
    """As many transfers as ought to fit into the time, whatever is under way at once."""
    wanted = round(pace.seconds / max(expected_s, 1e-9))
    count = min(pace.most, max(pace.least, under_way(num_bytes), wanted))
    start_s = time.perf_counter()
    await arm.stream(num_bytes, count)
    return count * num_bytes / (time.perf_counter() - start_s)
