"""Where requests wait for room in the cluster: first come first served, and bounded. Those that had room and lost it
stand before all others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from triptych.core.errors import Overloaded
from triptych.obs import metrics

T = TypeVar("T")

# Room also appears without this router noticing (another router's request ends, a worker comes up).
RETRY_SECONDS = 0.05


class AdmissionQueue:
    """Only the first in line asks for room; whoever comes while others wait stands behind them."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._line: deque[asyncio.Event] = deque()
        self._num_again = 0
        self._room = asyncio.Event()

    @property
    def waiting(self) -> int:
        return len(self._line)

    async def admit(self, ask: Callable[[], Awaitable[T | None]]) -> T:
        """What `ask` answers as soon as that is not None. Its errors are passed on.

        Bound the wait with a timeout around this. Raises Overloaded when the line is full.
        """
        if not self._line:
            answer = await ask()
            if answer is not None:
                return answer
        if len(self._line) >= self._max_waiting:
            raise Overloaded(f"{len(self._line)} requests are waiting already; try again later")
        return await self._wait_in_line(ask)

    async def admit_further(self, ask: Callable[[], Awaitable[T | None]]) -> T:
        """As `admit`, for another choice of a request that has been admitted: it takes its turn in the line, but a full
        line does not refuse it, for that would fail what already runs. Few can come: each running request has at most
        its `n`."""
        if not self._line:
            answer = await ask()
            if answer is not None:
                return answer
        return await self._wait_in_line(ask)

    async def admit_again(self, ask: Callable[[], Awaitable[T | None]]) -> T:
        """As `admit`, for one that had room and lost it: it goes before all that never had any, and a full line does
        not refuse it. Each running request has at most one of these a choice."""
        return await self._wait_in_line(ask, self._num_again)

    def room_may_be_free(self) -> None:
        """Lets the first in line ask again at once. Called when a request has ended."""
        self._room.set()

    async def _wait_in_line(self, ask: Callable[[], Awaitable[T | None]], place: int | None = None) -> T:
        """`place`: before whom to stand; None is the end."""
        my_turn = asyncio.Event()
        self._num_again += place is not None
        self._line.insert(len(self._line) if place is None else place, my_turn)
        self._line[0].set()
        metrics.ROUTER_QUEUE_DEPTH.set(len(self._line))
        try:
            while True:
                while self._line[0] is not my_turn:  # also when somebody came who goes first
                    my_turn.clear()
                    await my_turn.wait()
                self._room.clear()
                answer = await ask()
                if answer is not None:
                    return answer
                await self._room_or_time()
        finally:
            self._num_again -= place is not None
            self._line.remove(my_turn)
            metrics.ROUTER_QUEUE_DEPTH.set(len(self._line))
            if self._line:
                self._line[0].set()

    async def _room_or_time(self) -> None:
        try:
            async with asyncio.timeout(RETRY_SECONDS):
                await self._room.wait()
        except TimeoutError:
            return
