"""Memory that the workers of one host share: files in /dev/shm, one per arena.

    owner                                        peer                           janitor (any process)
    create O_EXCL 0600 -> flock -> still named?  open, check, lock byte `id`    open, flock without waiting
    -> posix_fallocate -> mmap                   -> mmap                        -> still named? -> unlink

*Owner alive* is an exclusive `flock` held for the owner's whole life. The kernel drops it when the process dies,
however it dies and in whatever pid namespace. A janitor may win the lock between the owner's create and flock: the
owner then finds its name gone and starts again with another, before a single byte was allocated. (O_TMPFILE + linkat
would close that window too, but needs /proc and is missing from some container sandboxes.)

*Peer can still write* is a read lock on one byte of an open file description (OFD), which dies with the peer's last
mapping. The owner asks `is_mapped_as` before it reuses what a lost peer was granted.

Every page is allocated up front and peers refuse a file with holes, so no access can raise SIGBUS.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from triptych.core.errors import StartupError, TransferRefused

SHM_DIRECTORY: Final = Path("/dev/shm")
_NAME: Final = re.compile(r"triptych-[a-z]{1,16}-[0-9a-f]{16}")
_FLOCK: Final = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux: type, whence, start, length, pid
_CREATE_TRIES: Final = 16
_MADV_POPULATE_WRITE: Final = 23
_POPULATE_BYTES: Final = 16 << 20


class SharedSegment:
    """One mapping. The owner unlinks the name at `close`; a peer only unmaps.

    Raises:
        StartupError: `create` found no room.
        TransferRefused: `open` found something that is not the segment it was promised.
    """

    def __init__(self, name: str, fd: int, mapping: mmap.mmap, path: Path | None) -> None:
        self.name = name
        self._fd: int | None = fd
        self._mapping: mmap.mmap | None = mapping
        self._buffer = memoryview(mapping)
        self._num_bytes = len(mapping)
        self._owned_path = path

    @classmethod
    def create(cls, num_bytes: int, kind: str, *, directory: Path = SHM_DIRECTORY) -> SharedSegment:
        if num_bytes < 1:
            raise StartupError(f"a shared {kind} segment needs at least one byte, {num_bytes} were asked for")
        name, fd = _create_locked(kind, directory)
        path = directory / name
        try:
            _allocate(fd, num_bytes, kind, directory)
            mapping = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise
        return cls(name, fd, mapping, path)

    @classmethod
    def open(
        cls, name: str, num_bytes: int, *, mapping_id: int | None = None, directory: Path = SHM_DIRECTORY
    ) -> SharedSegment:
        """Maps a peer's segment; with `mapping_id` the owner can tell how long this mapping lives."""
        if not _NAME.fullmatch(name):
            raise TransferRefused("the receiver named no shared segment of ours")
        fd = _open_existing(directory / name)
        try:
            _check_peer_file(fd, num_bytes)
            if mapping_id is not None:
                _lock_byte(fd, mapping_id)
            mapping = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED)
        except BaseException:
            os.close(fd)
            raise
        return cls(name, fd, mapping, None)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def buffer(self) -> memoryview:
        """The whole segment, writable. Raises ValueError after `close`."""
        return self._buffer[:]

    def populate_soon(self) -> None:
        """Enters every page into this process's page table, in a thread: the first write to a page would else be held
        up by a fault, which takes ten times as long as the write itself. Best effort; ends early at `close`."""
        threading.Thread(target=self._populate, name="populate-segment", daemon=True).start()

    def _populate(self) -> None:
        advise = ctypes.CDLL(None).madvise
        for offset in range(0, self._num_bytes, _POPULATE_BYTES):
            size = min(_POPULATE_BYTES, self._num_bytes - offset)
            try:
                part = (ctypes.c_char * size).from_buffer(self._buffer, offset)
            except ValueError:
                return  # closed
            # Not by `mmap.madvise`, which keeps the interpreter's lock.
            failed = advise(ctypes.byref(part), ctypes.c_size_t(size), _MADV_POPULATE_WRITE)
            if failed:
                return  # before Linux 5.14

    def is_mapped_as(self, mapping_id: int) -> bool:
        """Whether some process still has the segment mapped under that id."""
        if self._fd is None:
            return False
        probe = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, mapping_id, 1, 0)
        answer = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, probe))
        return bool(answer[0] != fcntl.F_UNLCK)

    def is_mapped(self) -> bool:
        """Whether some process still has the segment mapped under any id."""
        if self._fd is None:
            return False
        probe = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, probe))
        return bool(answer[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Idempotent. Views that others still hold stay valid: the pages go with the last of them."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        if self._owned_path is not None:
            self._owned_path.unlink(missing_ok=True)
        mapping, self._mapping = self._mapping, None
        with contextlib.suppress(BufferError):
            self._buffer.release()
            if mapping is not None:
                mapping.close()
        os.close(fd)


def sweep_dead_segments(*, directory: Path = SHM_DIRECTORY) -> list[str]:
    """Removes the segments of this user whose owner is dead; answers their names."""
    return [name for name in _segment_names(directory) if _remove_if_dead(directory / name)]


def find_dead_segments(*, directory: Path = SHM_DIRECTORY) -> list[str]:
    """The names of what `sweep_dead_segments` would remove."""
    found = []
    for name in _segment_names(directory):
        with _locked_if_dead(directory / name) as is_dead:
            if is_dead:
                found.append(name)
    return found


def _segment_names(directory: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(directory) if _NAME.fullmatch(name))
    except FileNotFoundError:
        return []  # no shared memory here, so nothing was left in it


def _remove_if_dead(path: Path) -> bool:
    with _locked_if_dead(path) as is_dead:
        if is_dead:
            path.unlink(missing_ok=True)
        return is_dead


@contextlib.contextmanager
def _locked_if_dead(path: Path) -> Iterator[bool]:
    """Whether the segment's owner is dead; then, until the end of the block, nobody else can take it for his."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield False  # gone meanwhile, or another user's
        return
    try:
        yield os.fstat(fd).st_uid == os.getuid() and _try_flock(fd) and _names(path, fd)
    finally:
        os.close(fd)


def _create_locked(kind: str, directory: Path) -> tuple[str, int]:
    for _ in range(_CREATE_TRIES):
        name = f"triptych-{kind}-{secrets.token_hex(8)}"
        if not _NAME.fullmatch(name):
            raise StartupError(f"{kind!r} cannot name a shared segment: use 1 to 16 lower-case letters")
        fd = _create_exclusive(directory / name)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if _names(directory / name, fd):
            return name, fd
        os.close(fd)  # a janitor took it for a dead owner's
    raise StartupError(f"another process keeps removing new files from {directory}")


def _create_exclusive(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as err:
        raise StartupError(
            f"cannot create a file in {path.parent} ({os.strerror(err.errno or 0)}): mount it as a writable tmpfs"
        ) from err


def _allocate(fd: int, num_bytes: int, kind: str, directory: Path) -> None:
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as err:
        if err.errno not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM):
            raise
        room = os.statvfs(directory)
        raise StartupError(
            f"the {kind} arena needs {_mib(num_bytes)} of shared memory, but {directory} is"
            f" {_mib(room.f_blocks * room.f_frsize)} with {_mib(room.f_bavail * room.f_frsize)} free: make it larger"
            " (docker: --shm-size; Kubernetes: an emptyDir of medium Memory with a sizeLimit), or ask for less"
        ) from err


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def _open_existing(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as err:
        raise TransferRefused("the receiver's shared segment cannot be opened here") from err


def _check_peer_file(fd: int, num_bytes: int) -> None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) != 0o600:
        raise TransferRefused("the receiver's shared segment belongs to someone else")
    if num_bytes < 1 or status.st_size != num_bytes or status.st_blocks * 512 < num_bytes:
        raise TransferRefused("the receiver's shared segment has another size than promised")


def _lock_byte(fd: int, mapping_id: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, mapping_id, 1, 0))


def _try_flock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _names(path: Path, fd: int) -> bool:
    """Whether `path` still is the file behind `fd`."""
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(fd))
