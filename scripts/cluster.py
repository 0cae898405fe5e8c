"""A cluster for the length of a `with` block, in a folder of its own, so that it meets no other on this machine."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

# Longer than the launcher's own patience, so that its sentence is the one that is seen.
START_SECONDS = 200.0
STOP_SECONDS = 30.0


class ClusterFailed(RuntimeError):
    """It did not start; the message holds what it said."""


@contextlib.contextmanager
def running_cluster(*flags: str) -> Iterator[str]:
    """The address of `triptych up FLAGS` on a free port. Raises ClusterFailed."""
    with tempfile.TemporaryDirectory(prefix="triptych-") as name:
        folder = Path(name)
        output, ready_file = folder / "output", folder / "ready.json"
        command = [sys.executable, "-m", "triptych.cli", "up", "--port", "0", "--runtime-dir", str(folder / "run")]
        with output.open("wb") as out:
            process = subprocess.Popen(
                [*command, "--ready-file", str(ready_file), *flags],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield _wait_until_ready(process, ready_file, output)
        finally:
            _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], ready_file: Path, output: Path) -> str:
    give_up_at = time.monotonic() + START_SECONDS
    while not ready_file.exists():
        if process.poll() is not None or time.monotonic() > give_up_at:
            raise ClusterFailed(f"the cluster did not start; it said:\n{output.read_text(errors='replace')}")
        time.sleep(0.05)
    return str(json.loads(ready_file.read_text())["url"])


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()  # the kernel then ends the services
        process.wait()
