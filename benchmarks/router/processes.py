"""The processes of a run, as the one that measures sees them: each says a line of JSON and ends with its input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORD = "benchmark-router "
"""Begins a line for the process that measures; libraries may print others."""
STOP_SECONDS = 10.0
TAIL_CHARS = 400


class StartFailed(RuntimeError):
    """A process that did not begin or ended too early; the message has the end of its log."""


def say(what: Mapping[str, object]) -> None:
    print(WORD + json.dumps(what), flush=True)


def cpu_s(pid: int) -> float:
    """Seconds that all threads of the process have had a core for, those that have ended included."""
    return time.clock_gettime(((~pid) << 3) | 2)  # MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED) of Linux


class Process:
    """Owner of one process; `stop` ends it: one that speaks by its input, any other by a signal."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._log = log
        self._speaks = False
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                text=True,
                start_new_session=True,  # signals to the group pass it by: it ends with its input
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    @classmethod
    def speaking(cls, log: Path, module: str, *args: str) -> tuple[Process, dict[str, Any]]:
        """`python -m MODULE`, and what it said first. Raises StartFailed."""
        process = cls([sys.executable, "-P", "-m", module, *args], log)
        try:
            said = process.listen()
            process._speaks = True
            return process, said
        except StartFailed:
            process.stop()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, what: Mapping[str, object]) -> dict[str, Any]:
        """Says one line and waits for one. Raises StartFailed when the process has ended."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
        return self.listen()

    def listen(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(WORD):
                said: dict[str, Any] = json.loads(line[len(WORD) :])
                return said
        raise StartFailed(f"it ended: {self.tail()}")

    def tail(self) -> str:
        lines = self._log.read_text(errors="replace")[-TAIL_CHARS:].splitlines()
        return " / ".join(line.strip() for line in lines if line.strip()) or "it said nothing"

    def stop(self) -> None:
        """Idempotent."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        if not self._speaks:
            self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
