"""A longer time slice for a thread that computes without a pause.

Linux gives a thread that wakes up the core of one with a longer slice at once, and lets it wait for the end of a slice
of the same length (EEVDF; slices can be asked for since 6.12). The threads that move bytes, and the prefill worker that
waits for them, sleep and wake all the time; a pass of the vision tower does not. Shares of the core stay as they are.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from typing import Final

_SET_ATTRIBUTES: Final = {"x86_64": 314, "aarch64": 274}
"""Numbers of the system call `sched_setattr`."""

_ATTRIBUTES: Final = struct.Struct("IIQiIQQQ")
"""struct sched_attr, first version: size, policy, flags, nice, priority, runtime (the slice, ns), deadline, period."""


def lengthen_time_slice(slice_s: float) -> bool:
    """Asks for slices of that length for the calling thread; its nice value stays. False where the system has none to
    give: nothing has changed then."""
    number = _SET_ATTRIBUTES.get(platform.machine()) if platform.system() == "Linux" else None
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    wanted = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, round(slice_s * 1e9), 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, 0, wanted, 0) == 0)
