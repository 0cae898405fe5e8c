"""Signals as facts to ask about, so that no start or stop is cut in the middle."""

from __future__ import annotations

import signal


class StopSignals:
    """From its making on, SIGINT, SIGTERM and SIGHUP only count: the first asks to stop, a later one to hurry."""

    def __init__(self) -> None:
        self._count = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup asked to ignore it
            signal.signal(signal.SIGHUP, self._on_signal)

    @property
    def stop_wanted(self) -> bool:
        return self._count > 0

    @property
    def hurry_wanted(self) -> bool:
        return self._count > 1

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._count += 1
