"""One media process, from its worker's side: start, ask, kill. Blocking; for a thread of its own."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

import triptych
from triptych.media.frames import (
    READY_BYTES,
    REPLY,
    Head,
    Limits,
    MalformedFrame,
    Target,
    pack_request,
    refusal,
    unpack_ready,
    unpack_reply,
)
from triptych.media.streams import read_exactly, write_all
from triptych.obs import metrics

log = logging.getLogger(__name__)

END_GRACE_S = 1.0
# A decoder needs no more of the worker's environment: no keys, no settings.
_KEPT = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "TZ", "VIRTUAL_ENV")
_CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS}
)
_ROOT = Path(triptych.__path__[0]).parent


@dataclass(frozen=True, slots=True)
class Decoded:
    """A picture of the size that was asked for: (height, width, 3); and the size that it was sent in, upright."""

    pixels: npt.NDArray[np.uint8]
    width_px: int
    height_px: int


@dataclass(frozen=True, slots=True)
class Confinement:
    """What a process may take besides what it has at its start, and how far it stands back for others (as `nice`)."""

    memory_bytes: int
    nice: int


class ProcessLost(Exception):
    """It died in the middle, or (`has_started` is False) before it could do anything. `status` is that of `subprocess`:
    negative for a signal."""

    def __init__(self, status: int, *, has_started: bool = True) -> None:
        super().__init__(f"a media process ended with status {status}")
        self.status = status
        self.has_started = has_started

    @property
    def is_out_of_time(self) -> bool:
        return self.status == -signal.SIGXCPU

    @property
    def has_crashed(self) -> bool:
        """By what a decoder did. Whatever else ends it (somebody who kills it, want of memory on the machine, a start
        that fails) is no fault of the picture."""
        return -self.status in _CRASHES


class MediaProcess:
    """Owner of the process and of the socket to it, from its start until `end`.

    Start it on a thread that lives as long: the kernel ends the process with the thread that started it. Raises OSError
    when the machine has no process to give.
    """

    def __init__(self, confinement: Confinement) -> None:
        self._stream, theirs = socket.socketpair()
        command = [sys.executable, "-m", "triptych.media", "--parent", str(os.getpid())]
        command += ["--memory-bytes", str(confinement.memory_bytes), "--nice", str(confinement.nice)]
        with theirs:
            try:
                self._process = subprocess.Popen(  # noqa: S603
                    command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=_environment()
                )
            except BaseException:
                self._stream.close()
                raise
        self.pid = self._process.pid
        self._has_started = False
        self._is_filtered = False

    def decode(self, media: bytes, target: Target, limits: Limits, give_up_at: float) -> Decoded:
        """Raises what the process refused the picture with, ProcessLost, or TimeoutError after `give_up_at`; after all
        but the first it must be ended, for the rest of a reply may still be under way."""
        try:
            self.await_start(give_up_at)
            write_all(self._stream, pack_request(target, limits, len(media)), give_up_at)
            write_all(self._stream, media, give_up_at)
            head = unpack_reply(bytes(read_exactly(self._stream, REPLY.size, give_up_at)), target)
            data = read_exactly(self._stream, head.num_bytes, give_up_at)
        except (EOFError, ConnectionError, MalformedFrame):
            raise ProcessLost(self.end(), has_started=self._has_started) from None
        return _decoded(head, data, target)

    def await_start(self, give_up_at: float) -> bool:
        """Whether the kernel looks at its system calls; a fallback when not. Raises what is raised for a stream that
        ends, TimeoutError, or MalformedFrame."""
        if not self._has_started:
            self._is_filtered = unpack_ready(bytes(read_exactly(self._stream, READY_BYTES, give_up_at)))
            self._has_started = True
            if not self._is_filtered:
                metrics.FALLBACKS.labels("media_process_unfiltered").inc()
                log.warning("the kernel filters no system calls of a media process", extra={"pid": self.pid})
        return self._is_filtered

    def interrupt(self) -> None:
        """Ends it now, from any thread; whoever waits for it hears of its loss."""
        self._process.kill()

    def end(self) -> int:
        """Lets it end by itself for a moment, then kills it. Its exit status. Idempotent."""
        self._stream.close()
        try:
            return self._process.wait(END_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def seconds_from_now(seconds: float) -> float:
    return time.monotonic() + seconds


def _decoded(head: Head, data: bytearray, target: Target) -> Decoded:
    if head.size_px is None:
        raise refusal(bytes(data))
    pixels = np.frombuffer(data, dtype=np.uint8).reshape(target.height_px, target.width_px, 3)
    return Decoded(pixels, *head.size_px)


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # One thread: arrays here are small, and a thread's stack counts as memory.
    return {**kept, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
