"""Time as a parameter, so that decisions can run under a simulated clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def monotonic_ns(self) -> int:
        """CLOCK_MONOTONIC in nanoseconds: comparable between processes of one host."""
        ...


class SystemClock:
    def monotonic_ns(self) -> int:
        return time.monotonic_ns()


class ManualClock:
    """Moves only when told to."""

    def __init__(self, now_ns: int = 0) -> None:
        self.now_ns = now_ns

    def monotonic_ns(self) -> int:
        return self.now_ns

    def advance_s(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)
