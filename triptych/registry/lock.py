"""A file that its living owner keeps locked.

A lock of the kernel's (flock) ends with the process that holds it, however it ended, and is seen from any pid
namespace; a process number in a file is neither. Readers probe with a shared lock, which they hold for an instant.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

# A probe may be holding its shared lock at the very moment in which the owner wants the file.
_PATIENCE_S = 1.0
_RETRY_S = 0.01


class FileLock:
    """An exclusive lock on a file, owned by this process until `release` or its end."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    @classmethod
    def acquire(cls, path: Path) -> FileLock | None:
        """The lock, or None while another process holds it. Creates the file (mode 0600)."""
        give_up_at = time.monotonic() + _PATIENCE_S
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            if _try_exclusive(descriptor) and _is_still_at(path, descriptor):
                return cls(path, descriptor)
            os.close(descriptor)
            if time.monotonic() >= give_up_at:
                return None
            time.sleep(_RETRY_S)

    @property
    def is_in_place(self) -> bool:
        """False when the file was removed or replaced: others see no lock then."""
        return self._descriptor is not None and _is_still_at(self.path, self._descriptor)

    def forget(self) -> None:
        """Ends the lock and leaves whatever is at its path now, which is somebody else's."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def release(self) -> None:
        """Removes the file and ends the lock. May be called twice."""
        if self._descriptor is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock of `path`; False when there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _try_exclusive(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still_at(path: Path, descriptor: int) -> bool:
    """False when the file was removed or replaced since it was opened: then the lock guards nothing."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False
