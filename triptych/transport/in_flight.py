"""How much of what an encoder makes may be on its way to one receiver: a bound for each pair.

    slot granted ──► parked ──► in flight: computed, written or queued, committed ──► acknowledged, or failed
                       '── first come, first served; other receivers' items pass by ──'

A receiver that acknowledges slowly keeps its own items waiting, before their bytes are even fetched: not the tower, not
the items of others, and no memory but theirs. Room comes after the slot, so that who waits here holds what its receiver
reserved for it and nothing that another waits for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from triptych.core.errors import PeerLost
from triptych.obs import metrics

DEFAULT_IN_FLIGHT_BYTES: Final = 64 << 20


@dataclass(slots=True, eq=False)
class _Parked:
    num_bytes: int
    entered: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class InFlightLimit:
    """Owner of `max_bytes` of room towards one receiver. Runs on the event loop.

    One larger than all of it goes when nothing else is on its way.
    """

    def __init__(self, max_bytes: int = DEFAULT_IN_FLIGHT_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._parked: deque[_Parked] = deque()
        self._is_closed = False

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    async def enter(self, num_bytes: int) -> bool:
        """Waits for room, which `leave` gives back; returns whether it had to. Raises PeerLost when the receiver was
        given up meanwhile."""
        if self._is_closed:
            raise PeerLost("the session to the other worker is over")
        if not self._parked and self._has_room(num_bytes):
            self._add(num_bytes)
            return False
        await self._park(_Parked(num_bytes))
        return True

    def leave(self, num_bytes: int) -> None:
        self._add(-num_bytes)
        self._let_in()

    def turn_away(self, why: str) -> None:
        """Those who wait are refused: PeerLost. The receiver takes nothing just now."""
        parked, self._parked = self._parked, deque()
        metrics.EMBEDDING_PARKED_ITEMS.dec(len(parked))
        for waiting in parked:
            if not waiting.entered.done():
                waiting.entered.set_exception(PeerLost(why))

    def close(self, why: str) -> None:
        """The link is over: nobody gets in any more. Idempotent."""
        self._is_closed = True
        self.turn_away(why)

    async def _park(self, waiting: _Parked) -> None:
        self._parked.append(waiting)
        metrics.EMBEDDING_PARKED_ITEMS.inc()
        try:
            await waiting.entered
        except asyncio.CancelledError:
            self._give_up(waiting)
            raise

    def _give_up(self, waiting: _Parked) -> None:
        if waiting in self._parked:
            self._parked.remove(waiting)
            metrics.EMBEDDING_PARKED_ITEMS.dec()
        elif not waiting.entered.cancelled() and waiting.entered.exception() is None:  # let in at the same moment
            self._add(-waiting.num_bytes)
        self._let_in()

    def _has_room(self, num_bytes: int) -> bool:
        return self.num_bytes == 0 or self.num_bytes + num_bytes <= self.max_bytes

    def _let_in(self) -> None:
        while self._parked and self._has_room(self._parked[0].num_bytes):
            waiting = self._parked.popleft()
            metrics.EMBEDDING_PARKED_ITEMS.dec()
            if not waiting.entered.done():
                self._add(waiting.num_bytes)
                waiting.entered.set_result(None)

    def _add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        metrics.EMBEDDING_IN_FLIGHT_BYTES.inc(num_bytes)
