"""Several processes of one router behind one port: started, watched over and ended by this one, which serves nothing.

    supervisor --listens--> one socket, which all of its processes accept from
        '--> process 0 .. N-1: `services.router --listen-fd FD`, each a whole router with its share of the limits

A signal goes on to all of them, and each drains as one alone does. One that ends by itself is started again; if one
ends before any has listened, the start was no good, and all end. Their metrics are counted in files that all share,
so whichever of them is asked answers for all. The kernel ends them when this process is gone.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Final

from services.router.listener import listen
from services.router.settings import RouterSettings
from triptych.core.ready_file import check_ready_file, write_ready_file

POLL_S: Final = 0.05
RESTART_S: Final = 1.0
# A process of the router sends it to its supervisor when it listens.
LISTENS: Final = signal.SIGUSR1
METRICS_FOLDER: Final = "PROMETHEUS_MULTIPROC_DIR"
_PR_SET_PDEATHSIG: Final = 1

_log = logging.getLogger(__name__)


def supervise(settings: RouterSettings, argv: Sequence[str]) -> int:
    """Until all processes have ended; the exit status. Raises StartupError."""
    if settings.ready_file is not None:
        check_ready_file(settings.ready_file)
    with ExitStack() as stack:
        listener = stack.enter_context(listen(settings.host, settings.port))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="triptych-router-")))
        return Supervisor(settings, argv, listener, folder).run()


class Supervisor:
    """Owner of the processes."""

    def __init__(self, settings: RouterSettings, argv: Sequence[str], listener: socket.socket, folder: Path) -> None:
        self._settings = settings
        self._argv = argv
        self._listener = listener
        self._metrics_folder = folder / "metrics"
        self._metrics_folder.mkdir()
        self._ready_files = [folder / f"ready-{index}.json" for index in range(settings.workers)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._due_s: dict[int, float] = dict.fromkeys(range(settings.workers), 0.0)
        self._is_stopping = False
        self._has_started = False
        self._is_announced = settings.ready_file is None
        self._status = 0

    def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._pass_on)
        signal.signal(LISTENS, self._note_start)
        while not (self._is_stopping and not self._processes):
            self._reap()
            if not self._is_stopping:
                self._start_those_due()
                self._announce()
            time.sleep(POLL_S)
        return self._status

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._is_stopping = True
        for process in list(self._processes.values()):
            process.send_signal(signal.SIGTERM)

    def _note_start(self, number: int, frame: FrameType | None) -> None:
        self._has_started = True

    def _start_those_due(self) -> None:
        now_s = time.monotonic()
        for index, due_s in list(self._due_s.items()):
            if now_s >= due_s:
                del self._due_s[index]
                self._processes[index] = self._start(index)

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        """The last of two flags counts."""
        safe = ["-P"] if sys.flags.safe_path else []
        command = [sys.executable, *safe, "-m", "services.router", *self._argv]
        command += ["--listen-fd", str(self._listener.fileno()), "--supervisor-pid", str(os.getpid())]
        if self._settings.ready_file is not None:
            self._ready_files[index].unlink(missing_ok=True)
            command += ["--ready-file", str(self._ready_files[index])]
        environ = {**os.environ, METRICS_FOLDER: str(self._metrics_folder)}
        return subprocess.Popen(command, env=environ, pass_fds=[self._listener.fileno()])  # noqa: S603

    def _reap(self) -> None:
        for index, process in list(self._processes.items()):
            if process.poll() is None:
                continue
            del self._processes[index]
            self._forget_gauges(process.pid)
            self._ended(index, process)

    def _ended(self, index: int, process: subprocess.Popen[bytes]) -> None:
        status = process.returncode
        if self._is_stopping:
            self._status = self._status or (status if status > 0 else 0)
        elif not self._has_started:
            self._status = status if status > 0 else 1
            self._pass_on(signal.SIGTERM, None)
        else:
            _log.warning("a process of the router has ended and is started again", extra={"status": status})
            self._due_s[index] = time.monotonic() + RESTART_S

    def _forget_gauges(self, pid: int) -> None:
        """Of a process that is gone; what it has counted stays."""
        for file in self._metrics_folder.glob(f"gauge_live*_{pid}.db"):
            file.unlink(missing_ok=True)

    def _announce(self) -> None:
        """When every process has seen all stages ready."""
        if not self._is_announced and all(file.exists() for file in self._ready_files):
            assert self._settings.ready_file is not None
            self._is_announced = True
            write_ready_file(self._settings.ready_file, self._ready_files[0].read_bytes())


def tell_of_listening(supervisor_pid: int) -> None:
    os.kill(supervisor_pid, LISTENS)


def tie_to(supervisor_pid: int) -> None:
    """This process gets SIGKILL when its supervisor is gone, even by `kill -9`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != supervisor_pid:
        raise SystemExit("the supervisor is gone")
