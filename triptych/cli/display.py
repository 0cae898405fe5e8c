"""How a start looks: a line that changes for each process on a terminal, a line for each change elsewhere."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Mapping
from typing import Protocol, TextIO

_MARKS = {"starting": "·", "loading": "◐", "ready": "●", "failed": "✗"}


class Display(Protocol):
    def update(self, states: Mapping[str, str]) -> None:
        """`states` maps each process to starting, loading, ready or failed."""

    def say(self, text: str) -> None: ...


class _Clocked:
    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._since = time.monotonic()
        self._settled: dict[str, float] = {}

    def _row(self, name: str, state: str) -> str:
        elapsed = time.monotonic() - self._since
        if state in ("ready", "failed"):
            elapsed = self._settled.setdefault(name, elapsed)
        else:
            self._settled.pop(name, None)
        return f"{_MARKS[state]} {name:<12} {state:<9} {elapsed:5.1f} s"


class PlainDisplay(_Clocked):
    def __init__(self, out: TextIO) -> None:
        super().__init__(out)
        self._shown: dict[str, str] = {}

    def update(self, states: Mapping[str, str]) -> None:
        for name, state in states.items():
            if self._shown.get(name) != state:
                self._shown[name] = state
                self.say(self._row(name, state))

    def say(self, text: str) -> None:
        print(text, file=self._out, flush=True)


class LiveDisplay(_Clocked):
    def __init__(self, out: TextIO) -> None:
        super().__init__(out)
        self._rows = 0

    def update(self, states: Mapping[str, str]) -> None:
        up = f"\x1b[{self._rows}F" if self._rows else ""
        self._rows = len(states)
        self._out.write(up + "".join(f"\x1b[2K{self._row(name, state)}\n" for name, state in states.items()))
        self._out.flush()

    def say(self, text: str) -> None:
        """Below the rows, which from now on stay as they are."""
        self._rows = 0
        print(text, file=self._out, flush=True)


def write_what_the_terminal_can() -> None:
    """From here on a character that standard output's encoding has not is written as an escape, and ends nothing."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def make_display(out: TextIO | None = None) -> Display:
    out = out or sys.stdout
    return LiveDisplay(out) if out.isatty() else PlainDisplay(out)
