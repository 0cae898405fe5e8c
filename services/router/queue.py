"""Where requests wait for room in the cluster: bounded, and fair between tenants (`admission/fair_line.py`). Those that
had room and lost it stand before all others."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from services.router.admission.fair_line import FairLine, Ticket
from services.router.admission.turnover import Turnover
from triptych.core.errors import Saturated
from triptych.obs import metrics

T = TypeVar("T")

# Room also appears without this router noticing (another router's request ends, a worker comes up).
RETRY_SECONDS = 0.05
_ANY = Ticket()


class _Turn(asyncio.Event):
    """Set when there is something to look at: it may be the first now, or have lost its place."""

    is_displaced = False


class AdmissionQueue:
    """Only the first in line asks for room; whoever comes while others wait takes a place among them."""

    def __init__(self, max_waiting: int, now_s: Callable[[], float] = time.monotonic) -> None:
        self._line: FairLine[_Turn] = FairLine(max_waiting)
        self._again: deque[_Turn] = deque()
        self._room = asyncio.Event()
        self._turnover = Turnover()
        self._now_s = now_s

    @property
    def waiting(self) -> int:
        return len(self._again) + len(self._line)

    async def admit(self, ask: Callable[[], Awaitable[T | None]], ticket: Ticket = _ANY) -> T:
        """What `ask` answers as soon as that is not None. Its errors are passed on.

        Bound the wait with a timeout around this. Raises Saturated when the line is full, or has become so and others
        have a better claim to its places.
        """
        answer = await self._ask_at_once(ask, ticket)
        if answer is not None:
            return answer
        turn = _Turn()
        displaced = self._offer(turn, ticket)
        if displaced is not None:
            displaced.is_displaced = True
            displaced.set()
        return await self._wait(ask, turn, ticket)

    async def admit_further(self, ask: Callable[[], Awaitable[T | None]], ticket: Ticket = _ANY) -> T:
        """As `admit`, for another choice of a request that has been admitted: it takes its turn in the line, but a full
        line does not refuse it, for that would fail what already runs. Few can come: each running request has at most
        its `n`."""
        answer = await self._ask_at_once(ask, ticket)
        if answer is not None:
            return answer
        turn = _Turn()
        self._line.join(turn, ticket, self._now_s())
        return await self._wait(ask, turn, ticket)

    async def admit_again(self, ask: Callable[[], Awaitable[T | None]]) -> T:
        """As `admit`, for one that had room and lost it: it goes before all that never had any, and a full line does
        not refuse it. Each running request has at most one of these a choice."""
        turn = _Turn()
        self._again.append(turn)
        return await self._wait(ask, turn, None)

    def retry_after_s(self) -> float:
        """Until those who wait now have been served, as fast as it went of late."""
        return self._turnover.wait_s(self.waiting, self._now_s())

    def room_may_be_free(self) -> None:
        """Lets the first in line ask again at once. Called when a request has ended."""
        self._room.set()

    def _offer(self, turn: _Turn, ticket: Ticket) -> _Turn | None:
        try:
            return self._line.offer(turn, ticket, self._now_s())
        except Saturated as error:
            raise Saturated(error.message, retry_after_s=self.retry_after_s()) from None

    async def _ask_at_once(self, ask: Callable[[], Awaitable[T | None]], ticket: Ticket) -> T | None:
        """Unless others wait."""
        answer = None if self.waiting else await ask()
        if answer is not None:
            self._line.served(ticket)
        return answer

    async def _wait(self, ask: Callable[[], Awaitable[T | None]], turn: _Turn, ticket: Ticket | None) -> T:
        self._look()
        try:
            answer = await self._ask_in_turn(ask, turn)
            self._turnover.served(self._now_s())
            if ticket is not None:
                self._line.served(ticket)
            return answer
        finally:
            if turn in self._again:
                self._again.remove(turn)
            else:
                self._line.remove(turn)
            self._look()

    async def _ask_in_turn(self, ask: Callable[[], Awaitable[T | None]], turn: _Turn) -> T:
        while True:
            while self._first() is not turn:  # also when somebody came who goes first
                turn.clear()
                await turn.wait()
                if turn.is_displaced:
                    raise Saturated(
                        "requests of tenants that wait less had to be let in; try again later",
                        retry_after_s=self.retry_after_s(),
                    )
            self._room.clear()
            answer = await ask()
            if answer is not None:
                return answer
            await self._room_or_time()

    def _first(self) -> _Turn | None:
        if self._again:
            return self._again[0]
        return self._line.head() if len(self._line) else None

    def _look(self) -> None:
        metrics.ROUTER_QUEUE_DEPTH.set(self.waiting)
        first = self._first()
        if first is None:
            self._turnover.nobody_waits()
        else:
            self._turnover.waiting(self._now_s())
            first.set()

    async def _room_or_time(self) -> None:
        try:
            async with asyncio.timeout(RETRY_SECONDS):
                await self._room.wait()
        except TimeoutError:
            return
