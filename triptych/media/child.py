"""A media process, from within: decodes and resizes one picture after another, with little memory and little time.

It loads neither torch nor anything of the network, holds no secret, and ends with the worker that started it: by the
kernel's signal, and because its socket ends.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import signal
import socket
from collections.abc import Sequence

from triptych.core.errors import RequestError
from triptych.media.frames import READY, REQUEST, Limits, pack_picture, pack_refusal, unpack_request
from triptych.media.picture import decode_picture, fit
from triptych.media.streams import read_exactly, write_all

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_MAX_FILES = 32


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m triptych.media", allow_abbrev=False)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--memory-bytes", type=int, required=True)
    parser.add_argument("--nice", type=int, required=True)
    told = parser.parse_args(argv)
    _confine(told.parent, told.memory_bytes, told.nice)
    with socket.socket(fileno=os.dup(0)) as stream:
        serve(stream)
    return 0


def serve(stream: socket.socket) -> None:
    """Until the other side is gone."""
    try:
        write_all(stream, READY)
        while True:
            _answer(stream)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _answer(stream: socket.socket) -> None:
    target, limits, media_bytes = unpack_request(bytes(read_exactly(stream, REQUEST.size)))
    media = read_exactly(stream, media_bytes)
    _limit_cpu(limits)
    try:
        image = decode_picture(media, limits.max_pixels)
        pixels = fit(image, target)
    except RequestError as error:
        write_all(stream, pack_refusal(error))
    else:
        write_all(stream, pack_picture(image.size, pixels.nbytes))
        write_all(stream, pixels.data)


def _confine(parent: int, memory_bytes: int, nice: int) -> None:
    """What it may take and touch, from here on."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit("the worker is gone")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker, which then closes the socket
    os.nice(nice)
    resource.setrlimit(resource.RLIMIT_AS, (_address_space_bytes() + memory_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_FILES, _MAX_FILES))


def _address_space_bytes() -> int:
    """What is mapped already: the interpreter and its libraries."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _limit_cpu(limits: Limits) -> None:
    """The kernel ends the process when one picture takes longer (SIGXCPU)."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used_s = int(usage.ru_utime + usage.ru_stime) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (used_s + limits.cpu_s, resource.RLIM_INFINITY))
