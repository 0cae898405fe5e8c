"""Room at an encoder for pictures between their request and the end of their pass: what bounds its memory.

A picture is fetched only when it has room, so under a flood the bytes stay with the router, and what is decoded here
never outgrows a few passes of the tower. Who goes next is decided as for the passes themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from triptych.core.clock import Clock
from triptych.obs import metrics
from triptych.sched.encode import PictureView, plan_entry


@dataclass(slots=True, eq=False)
class _Waiting:
    num_patches: int
    since_ns: int
    entered: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class EncodeRoom:
    """Owner of `max_patches` patches of room. Runs on the event loop.

    One larger than all of it goes in when nobody else is there.
    """

    def __init__(self, max_patches: int, clock: Clock) -> None:
        self._left_patches = max_patches
        self._clock = clock
        self._waiting: list[_Waiting] = []
        self._num_inside = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_empty(self) -> bool:
        return not self._num_inside

    async def enter(self, num_patches: int) -> Callable[[], None]:
        """Waits for room; what is returned gives it back, and must be called once."""
        waiting = _Waiting(num_patches, self._clock.monotonic_ns())
        self._waiting.append(waiting)
        self._let_in()
        try:
            await waiting.entered
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self._show()
            else:  # it was let in at the same moment
                self._leave(num_patches)
            raise
        return partial(self._leave, num_patches)

    def _leave(self, num_patches: int) -> None:
        self._left_patches += num_patches
        self._num_inside -= 1
        self._let_in()

    def _let_in(self) -> None:
        now_ns = self._clock.monotonic_ns()
        asking = [one for one in self._waiting if not one.entered.cancelled()]
        views = [PictureView(one.num_patches, (now_ns - one.since_ns) / 1e9) for one in asking]
        chosen = {asking[index] for index in plan_entry(views, self._left_patches, self.is_empty)}
        for one in chosen:
            self._left_patches -= one.num_patches
            self._num_inside += 1
            one.entered.set_result(None)
        self._waiting = [one for one in self._waiting if one not in chosen]
        self._show()

    def _show(self) -> None:
        metrics.ENCODER_QUEUE_DEPTH.set(len(self._waiting) + self._num_inside)
