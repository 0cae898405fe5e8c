"""How fast something has been of late."""

from __future__ import annotations

import math
from typing import Final

MEMORY_S: Final = 5.0
"""Of work: what was measured so much work ago counts a third."""


class RateMeter:
    """Amounts per second of work, the latest counting most. Pure."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """So much was done in so long."""
        kept = math.exp(-seconds / MEMORY_S)
        self._amount = self._amount * kept + amount
        self._seconds = self._seconds * kept + seconds

    @property
    def per_s(self) -> float | None:
        """None until something was done."""
        return self._amount / self._seconds if self._seconds > 0 and self._amount > 0 else None
