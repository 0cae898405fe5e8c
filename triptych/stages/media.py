"""How many media processes an encoder has, and what they may take."""

from __future__ import annotations

import os
from typing import Final

from triptych.media.count import num_processes
from triptych.media.frames import Limits
from triptych.media.pool import MediaLimits
from triptych.media.process import Confinement
from triptych.stages.settings import VisionSettings

# More requests than any worker takes at once; each waits with the bytes of its pictures.
MAX_WAITING_PICTURES: Final = 4096


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
