"""Stands between the launcher and a service: ties the service's life to the launcher's, then becomes the service.

    python -m triptych.cli.child LAUNCHER_PID MODULE [flags]

The kernel then kills the service when the launcher is gone, even by `kill -9`. The setting outlives `exec`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    launcher, module, flags = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != launcher:
        raise SystemExit("the launcher is gone")
    os.execv(sys.executable, [sys.executable, "-m", module, *flags])  # noqa: S606


if __name__ == "__main__":
    main()
