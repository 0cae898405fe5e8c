"""How many bytes of requests the router holds at once: each is bounded by itself, and this bounds them all together."""

from __future__ import annotations

from triptych.core.errors import Overloaded
from triptych.obs import metrics


class ByteBudget:
    """Owner of the count. A request holds its bytes until it has ended: a replay needs its pictures again."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_held = 0

    @property
    def num_held(self) -> int:
        return self._num_held

    def lease(self) -> ByteLease:
        """For one request; whoever takes it releases it."""
        return ByteLease(self)

    def reserve(self, num_bytes: int) -> None:
        """Raises Overloaded, and holds nothing more, when they would be too many."""
        if self._num_held + num_bytes > self._max_bytes:
            raise Overloaded("the requests under way hold all the memory there is for them; try again later")
        self._num_held += num_bytes
        metrics.HELD_BYTES.set(self._num_held)

    def give_back(self, num_bytes: int) -> None:
        assert num_bytes <= self._num_held
        self._num_held -= num_bytes
        metrics.HELD_BYTES.set(self._num_held)


class ByteLease:
    """What one request holds."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Raises Overloaded."""
        self._budget.reserve(num_bytes)
        self._num_bytes += num_bytes

    def release(self) -> None:
        """Idempotent."""
        self._budget.give_back(self._num_bytes)
        self._num_bytes = 0
