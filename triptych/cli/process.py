"""One child process and its log."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from triptych.cli.layout import ProcessSpec

TAIL_LINES = 15
_TAIL_BYTES = 16 * 1024
# The router has a setting of the same name, and would write the launcher's file before the launcher does.
_OURS_ALONE = frozenset({"TRIPTYCH_READY_FILE"})


class Child:
    """Owns the process and its process group from `start` until it was reaped."""

    def __init__(self, spec: ProcessSpec, log_path: Path) -> None:
        self.spec = spec
        self.log_path = log_path
        self.started_at = 0.0
        self.restarts = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Zero before the first start."""
        return self._process.pid if self._process else 0

    def start(self) -> None:
        """In a session of its own, so that Ctrl-C reaches the launcher alone and the launcher stops in order."""
        module = f"services.{self.spec.role}"
        command = [sys.executable, "-m", "triptych.cli.child", str(os.getpid()), module, *self.spec.flags]
        _make_private_folders(self.log_path.parent)  # it may have been cleaned away since the last start
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=dict(self.spec.variables)
                | {name: value for name, value in os.environ.items() if name not in _OURS_ALONE},
            )
        self.started_at = time.monotonic()

    def exit_status(self) -> int | None:
        """None while it runs; negative for a signal. Reaps."""
        return self._process.poll() if self._process else None

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def ask_to_stop(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it and whatever it started, now."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def tail(self) -> list[str]:
        """The last lines of its log."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, self.log_path.stat().st_size - _TAIL_BYTES))
                return log.read().decode("utf-8", "replace").splitlines()[-TAIL_LINES:]
        except FileNotFoundError:
            return []

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self.is_running():
            self._process.send_signal(number)


def stop_all(children: Sequence[Child], grace_seconds: float, in_a_hurry: Callable[[], bool]) -> list[str]:
    """Asks all to stop, waits (not at all once in a hurry) and kills the rest. Returns the names of those killed."""
    started = [child for child in children if child.pid]
    for child in started:
        child.ask_to_stop()
    give_up_at = time.monotonic() + grace_seconds
    while time.monotonic() < give_up_at and not in_a_hurry() and any(child.exit_status() is None for child in started):
        time.sleep(0.02)
    stubborn = [child.spec.name for child in started if child.exit_status() is None]
    for child in started:
        child.kill()
    return stubborn


def ending(status: int) -> str:
    """How a process ended, in words."""
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _make_private_folders(path: Path) -> None:
    """Mode 0700, those above it too: `mkdir(parents=True)` would leave them open to others."""
    for folder in reversed([path, *path.parents]):
        folder.mkdir(mode=0o700, exist_ok=True)
