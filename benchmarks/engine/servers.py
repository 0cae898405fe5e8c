"""Starting, waiting for and stopping the processes of an arm, each by its own id."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from benchmarks.engine.arms import Launch
from benchmarks.engine.load import Server
from benchmarks.engine.memory import tree

STOP_SECONDS = 10.0
TAIL_CHARS = 600


class StartFailed(RuntimeError):
    """A server that did not come up; the message ends with its last words."""


class Running:
    """A started server. `stop` ends it and whatever it started."""

    def __init__(self, launch: Launch, log: Path) -> None:
        self.launch = launch
        self._log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                launch.command,
                env={**os.environ, **launch.variables},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def server(self) -> Server:
        return Server(self.launch.url, self.launch.model)

    def wait_until_ready(self, timeout_s: float) -> None:
        """Raises StartFailed."""
        give_up_at = time.monotonic() + timeout_s
        while not self._answers():
            if self._process.poll() is not None:
                raise StartFailed(f"it ended with status {self._process.returncode}: {self._tail()}")
            if time.monotonic() > give_up_at:
                raise StartFailed(f"it was not ready after {timeout_s:.0f} s: {self._tail()}")
            time.sleep(0.1)

    def stop(self) -> None:
        descendants = tree(self.pid) if self._process.poll() is None else []
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        for pid in descendants if self._process.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.launch.url + self.launch.ready_path, timeout=2) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def _tail(self) -> str:
        text = self._log.read_text(errors="replace")[-TAIL_CHARS:]
        return " / ".join(line.strip() for line in text.splitlines() if line.strip())


@contextlib.contextmanager
def running(launch: Launch, folder: Path, timeout_s: float) -> Iterator[Running]:
    """One server for the length of a block. Raises StartFailed."""
    server = Running(launch, folder / f"{launch.arm}.log")
    try:
        server.wait_until_ready(timeout_s)
        yield server
    finally:
        server.stop()
