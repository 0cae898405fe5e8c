"""Signals as facts to ask about, so that no start or stop is cut in the middle."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

# Who wraps a command, like timeout(1), may pass a signal on both to it and to its group: that is one wish, told twice.
ECHO_SECONDS = 0.5


class StopSignals:
    """From its making on, SIGINT, SIGTERM and SIGHUP only count: the first asks to stop, a later one to hurry.

    `now_s`: a clock that never goes back.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._stop_at: float | None = None
        self._hurry_wanted = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup asked to ignore it
            signal.signal(signal.SIGHUP, self._on_signal)

    @property
    def stop_wanted(self) -> bool:
        return self._stop_at is not None

    @property
    def hurry_wanted(self) -> bool:
        return self._hurry_wanted

    def _on_signal(self, _number: int, _frame: object) -> None:
        if self._stop_at is None:
            self._stop_at = self._now_s()
        elif self._now_s() - self._stop_at >= ECHO_SECONDS:
            self._hurry_wanted = True
