"""A media process, from within: decodes and resizes one picture after another, with little memory and little time.

It loads neither torch nor anything of the network, holds no secret, and ends with the worker that started it: by the
kernel's signal, and because its socket ends. Once it has started it can open no file and no connection.
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
from triptych.media.filter import forbid_system_calls
from triptych.media.frames import REQUEST, Limits, pack_picture, pack_ready, pack_refusal, unpack_request
from triptych.media.picture import decode_picture, fit
from triptych.media.rehearsal import rehearse
from triptych.media.streams import read_exactly, write_all

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m triptych.media", allow_abbrev=False)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--memory-bytes", type=int, required=True)
    parser.add_argument("--nice", type=int, required=True)
    told = parser.parse_args(argv)
    _end_with(told.parent)
    os.nice(told.nice)
    rehearse()
    with socket.socket(fileno=os.dup(0)) as stream:
        serve(stream, pack_ready(_confine(told.memory_bytes)))
    return 0


def serve(stream: socket.socket, ready: bytes) -> None:
    """Until the other side is gone."""
    try:
        write_all(stream, ready)
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


def _end_with(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit("the worker is gone")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker, which then closes the socket


def _confine(memory_bytes: int) -> bool:
    """What it may take and touch, from here on. Whether the kernel looks at its system calls."""
    resource.setrlimit(resource.RLIMIT_AS, (_address_space_bytes() + memory_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    # What is open stays so; nothing else can be opened, a socket neither.
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return forbid_system_calls()


def _address_space_bytes() -> int:
    """What is mapped already: the interpreter and its libraries."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _limit_cpu(limits: Limits) -> None:
    """The kernel ends the process when one picture takes longer (SIGXCPU)."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used_s = int(usage.ru_utime + usage.ru_stime) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (used_s + limits.cpu_s, resource.RLIM_INFINITY))
