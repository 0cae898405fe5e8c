"""How many media processes an encoder has, and what they may take."""

from __future__ import annotations

import os
from typing import Final

from triptych.core.errors import StartupError
from triptych.media.count import num_processes
from triptych.media.frames import Limits, MalformedFrame
from triptych.media.pool import MediaLimits
from triptych.media.process import Confinement, MediaProcess, seconds_from_now
from triptych.stages.settings import VisionSettings

# More requests than any worker takes at once; each waits with the bytes of its pictures.
MAX_WAITING_PICTURES: Final = 4096

_START_S: Final = 60.0
_NO_FILTER: Final = (
    "the kernel filters no system calls of media processes here: it needs seccomp, on x86-64 or ARM64, and a container"
    " that allows it. Without --strict they run with their other limits (docs/adr/0015-system-calls-of-media.md)"
)


def media_limits(settings: VisionSettings) -> MediaLimits:
    """Of this machine: without a number in the settings, one process for every two cores that the worker may use."""
    cores = len(os.sched_getaffinity(0))
    return MediaLimits(
        num_processes(settings.media_processes, cores),
        Limits(settings.max_pixels, settings.media_cpu_s),
        Confinement(settings.media_memory_bytes, settings.media_nice),
        settings.media_timeout_s,
        MAX_WAITING_PICTURES,
    )


def check_filter(confinement: Confinement) -> None:
    """Starts a media process to see. Raises StartupError when the kernel does not look at its system calls. Blocking,
    on a thread that lives as long."""
    try:
        process = MediaProcess(confinement)
    except OSError as error:
        raise StartupError("a media process cannot be started") from error
    try:
        if not process.await_start(seconds_from_now(_START_S)):
            raise StartupError(_NO_FILTER)
    except (EOFError, OSError, MalformedFrame) as error:
        raise StartupError("a media process does not start; the log says why") from error
    finally:
        process.interrupt()
        process.end()
