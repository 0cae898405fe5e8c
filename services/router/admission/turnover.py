"""How fast room comes free for those who wait for it. Pure; times are passed in: seconds of a clock that never goes
back.

somebody waits   ├──────┬───┬──────┬───────────►        (none waits: no time passes here)
is served               x   x      x      now
gaps               3      2    4      5, which counts when it is longer than the others
"""

from __future__ import annotations

from collections import deque

NUM_GAPS = 64


class Turnover:
    """Owner of the last gaps between two that were served out of the line."""

    def __init__(self) -> None:
        self._gaps_s: deque[float] = deque(maxlen=NUM_GAPS)
        self._since_s: float | None = None

    def waiting(self, now_s: float) -> None:
        """Somebody waits. Idempotent."""
        if self._since_s is None:
            self._since_s = now_s

    def nobody_waits(self) -> None:
        self._since_s = None

    def served(self, now_s: float) -> None:
        """One of those who wait got room."""
        if self._since_s is not None:
            self._gaps_s.append(now_s - self._since_s)
            self._since_s = now_s

    def wait_s(self, num_waiting: int, now_s: float) -> float:
        """Until so many have been served, by what was measured; 0 when nothing was."""
        return num_waiting * self._mean_gap_s(now_s)

    def _mean_gap_s(self, now_s: float) -> float:
        """A line that has stopped moving is as slow as it looks by now."""
        open_s = 0.0 if self._since_s is None else now_s - self._since_s
        mean_s = sum(self._gaps_s) / len(self._gaps_s) if self._gaps_s else 0.0
        if open_s <= mean_s:
            return mean_s
        return (sum(self._gaps_s) + open_s) / (len(self._gaps_s) + 1)
