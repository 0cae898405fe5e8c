"""The time of a run. Whatever does not fit is left out, with a sentence that says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

FULL_SECONDS = 30 * 60
QUICK_SECONDS = 240
# For stopping servers and for writing the results.
CLOSING_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Budget:
    """Time until a moment of the monotonic clock. `part` cuts a piece off."""

    ends_at_s: float
    now: Callable[[], float] = field(default=time.monotonic, compare=False)

    @classmethod
    def of(cls, seconds: float) -> Budget:
        return cls(time.monotonic() + seconds)

    def left_s(self) -> float:
        return max(0.0, self.ends_at_s - self.now())

    def has(self, seconds: float) -> bool:
        return self.left_s() >= seconds

    def part(self, share: float) -> Budget:
        """The next `share` (0 to 1) of what is left."""
        return Budget(self.now() + share * self.left_s(), self.now)
