"""Token buckets: what may be used in a minute. Pure; times are passed in: seconds of a clock that never goes
back.

level
burst ┤────╮            ╭───────
      │    │take     ╭──╯ refills: burst a minute
      │    ╰─╮    ╭──╯
    0 ┤      ╰────╯
"""

from __future__ import annotations

PERIOD_S = 60.0


class Bucket:
    """Holds at most a minute's worth, which a quiet minute fills."""

    def __init__(self, per_minute: float, now_s: float) -> None:
        self._burst = per_minute
        self._level = per_minute
        self._at_s = now_s

    @property
    def burst(self) -> float:
        return self._burst

    def level(self, now_s: float) -> float:
        gained = max(0.0, now_s - self._at_s) * self._burst / PERIOD_S
        return min(self._burst, self._level + gained)

    def wait_s(self, amount: float, now_s: float) -> float:
        """Until so much is there; 0 when it is. `amount` is at most `burst`."""
        missing = amount - self.level(now_s)
        return max(0.0, missing * PERIOD_S / self._burst)

    def take(self, amount: float, now_s: float) -> None:
        """What `wait_s` lets be taken now."""
        self._level = self.level(now_s) - amount
        self._at_s = now_s

    def give_back(self, amount: float, now_s: float) -> None:
        """Of what was taken and not used."""
        self._level = min(self._burst, self.level(now_s) + amount)
        self._at_s = now_s
