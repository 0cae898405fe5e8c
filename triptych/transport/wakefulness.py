"""Waiting awake for what comes at once. To wake a core that sleeps takes about as long as an answer within the host."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Final

AWAKE_S: Final = 100e-6
RESTS: Final = 100
"""After a time awake in vain that often it is slept: others need the cores, or the answer takes long."""


class Wakefulness:
    """Keeps the event loop turning instead of sleeping, for AWAKE_S at most each time. Where there is one core only,
    never: the one that is waited for needs it."""

    def __init__(self) -> None:
        self._until_s = 0.0
        self._is_turning = False
        self._rests = 0 if len(os.sched_getaffinity(0)) > 1 else sys.maxsize

    def expect(self) -> None:
        """Something ought to come at once."""
        if self._rests:
            self._rests -= 1
            return
        self._until_s = time.perf_counter() + AWAKE_S
        if not self._is_turning:
            self._is_turning = True
            asyncio.get_running_loop().call_soon(self._turn)

    def heard(self) -> None:
        """It came, or something else."""
        self._until_s = 0.0

    def _turn(self) -> None:
        self._is_turning = time.perf_counter() < self._until_s
        if self._is_turning:
            asyncio.get_running_loop().call_soon(self._turn)
        elif self._until_s:
            self._rests = RESTS
