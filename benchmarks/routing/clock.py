"""Virtual time: what is to happen, in order."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Timeline:
    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._numbers), action))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.now_s, _, action = heapq.heappop(self._events)
            action()
