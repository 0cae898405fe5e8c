"""Starts `triptych up` as a user does: another process, stopped by its number."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.transport.shm import SHM_DIRECTORY

REPOSITORY = Path(__file__).parents[2]
STUBS = Path(__file__).parent / "stubs"
STOP_SECONDS = 20.0
POISONED = {"TRIPTYCH_POISON_FREED": "true"}
"""In clusters of tests whoever reads what was given back says so in the answer."""


@dataclass
class Launcher:
    """A running `triptych up`; `runtime` is its runtime folder."""

    process: subprocess.Popen[str]
    runtime: Path
    ready_file: Path

    def wait_ready(self, timeout_s: float) -> dict[str, Any]:
        """What the ready file says. Raises AssertionError with the output when the start failed."""
        give_up_at = time.monotonic() + timeout_s
        while not self.ready_file.exists():
            if self.process.poll() is not None or time.monotonic() > give_up_at:
                self.process.kill()
                raise AssertionError(f"triptych up did not get ready:\n{self.process.communicate()[0]}")
            time.sleep(0.05)
        ready: dict[str, Any] = json.loads(self.ready_file.read_text())
        return ready

    def signal_and_wait(self, number: signal.Signals) -> tuple[int, str]:
        """Exit status and output."""
        self.process.send_signal(number)
        output = self.process.communicate(timeout=STOP_SECONDS)[0]
        return self.process.returncode, output


@contextlib.contextmanager
def launched(
    folder: Path,
    *flags: str,
    stubs: bool = False,
    environ: Mapping[str, str] | None = None,
    port: tuple[str, ...] = ("--port", "0"),
) -> Iterator[Launcher]:
    """`triptych up` with its runtime folder and ready file in `folder`; not running any more at the end.

    `port`: how it is told where the API listens; with nothing, all ports are standard ones where those are free.
    """
    runtime, ready_file = folder / "run", folder / "ready.json"
    ready_file.unlink(missing_ok=True)
    path = f"{STUBS}{os.pathsep}{REPOSITORY}" if stubs else str(REPOSITORY)
    command = [sys.executable, "-P", "-m", "triptych.cli", "up", *port]
    command += ["--runtime-dir", str(runtime), "--ready-file", str(ready_file), *flags]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **POISONED, **(environ or {}), "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield Launcher(process, runtime, ready_file)
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=STOP_SECONDS)
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()  # the output may have been read already, for what failed


def living(pids: Mapping[str, int]) -> dict[str, int]:
    """Those that still run; a zombie does not."""
    return {name: pid for name, pid in pids.items() if _state(pid) not in ("", "Z", "X")}


def wait_gone(pids: Mapping[str, int], timeout_s: float = 10.0) -> dict[str, int]:
    """Those that still run after the timeout."""
    give_up_at = time.monotonic() + timeout_s
    while (left := living(pids)) and time.monotonic() < give_up_at:
        time.sleep(0.02)
    return left


def segments(kind: str = "*") -> set[str]:
    """Our shared segments on this machine; tests that run beside us may have some too."""
    return {path.name for path in SHM_DIRECTORY.glob(f"triptych-{kind}-*")}


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
