"""A GPU without a GPU: implements `Driver` over files that processes share, so that `cuda_ipc` runs as it is.

    malloc: a file in `folder`, mapped                 ipc_open: the same file, mapped by a peer
    copy_async, scatter_async: into a queue            a thread runs them in order, each as late as it may

What a real driver leaves undefined is an error here, and remembered in `violations`: memory that is freed while a peer
has it open (each open one holds a flock), and a mapping that is closed while something enqueued writes to it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from triptych.transport.device import HANDLE_BYTES, UUID_BYTES, DeviceError

_MAGIC = b"FAKE"
_NAME_BYTES = 8


@dataclass(slots=True, eq=False)
class _Mapped:
    """An allocation in this process's address space, its own or a peer's."""

    array: npt.NDArray[np.uint8]
    fd: int
    path: Path
    is_own: bool


@dataclass(frozen=True, slots=True)
class _Job:
    pointer: int
    run: Callable[[], object]


class FakeEvent:
    """Done when the device has run the first `mark` jobs."""

    def __init__(self, device: FakeDevice, mark: int) -> None:
        self._device = device
        self._mark = mark

    def query(self) -> bool:
        return self._device.has_run(self._mark)

    def synchronize(self) -> None:
        while not self.query():
            time.sleep(0.001)


class FakeDevice:
    """One device as one process sees it. Those with one folder and one `uuid` are the same card.

    Args:
        reaches: UUIDs of other cards that this one has peer access to.
        capacity_bytes: what `malloc` gives at most.
        delay_s: how long each copy takes.
        opens: whether handles can be opened here (False: as in a container that may not).
    """

    def __init__(
        self,
        folder: Path,
        uuid: bytes = b"u" * UUID_BYTES,
        *,
        reaches: Collection[bytes] = (),
        capacity_bytes: int = 1 << 30,
        delay_s: float = 0.0,
        opens: bool = True,
    ) -> None:
        self.violations: list[str] = []
        self.num_opened = 0
        self.num_copies = 0
        self._folder = folder
        self._uuid = uuid
        self._reaches = frozenset(reaches)
        self._capacity_bytes = capacity_bytes
        self._delay_s = delay_s
        self._opens = opens
        self._mapped: dict[int, _Mapped] = {}
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._num_enqueued = 0
        self._num_run = 0
        self._is_held = False
        self._is_broken = False
        self._is_closed = False
        threading.Thread(target=self._work, name="fake-device", daemon=True).start()

    # -- what a test does --------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Copies wait from now on."""
        with self._changed:
            self._is_held = True

    def release(self) -> None:
        with self._changed:
            self._is_held = False
            self._changed.notify_all()

    def break_down(self) -> None:
        """As a card that has fallen off the bus: nothing completes, every call fails."""
        with self._changed:
            self._is_broken = True

    def close(self) -> None:
        """Ends the thread. What is enqueued never runs."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @property
    def num_waiting(self) -> int:
        with self._changed:
            return self._num_enqueued - self._num_run

    @property
    def num_allocations(self) -> int:
        return sum(mapped.is_own for mapped in self._mapped.values())

    @property
    def num_open(self) -> int:
        """Of peers' allocations."""
        return len(self._mapped) - self.num_allocations

    # -- Driver ------------------------------------------------------------------------------------------------------

    @property
    def uuid(self) -> bytes:
        return self._uuid

    def can_access(self, uuid: bytes) -> bool:
        return uuid == self._uuid or uuid in self._reaches

    def malloc(self, num_bytes: int) -> int:
        self._check()
        used = sum(mapped.array.size for mapped in self._mapped.values() if mapped.is_own)
        if used + num_bytes > self._capacity_bytes:
            raise DeviceError("out of memory")
        path = self._folder / f"{secrets.token_hex(_NAME_BYTES)}.device"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(fd, 0, num_bytes)
        return self._map(fd, path, is_own=True)

    def free(self, pointer: int) -> None:
        self._check()
        mapped = self._mapped[pointer]
        try:
            fcntl.flock(mapped.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._violated("memory was freed while a peer had it open") from None
        mapped.path.unlink()
        self._unmap(pointer)

    def tensor(self, pointer: int, num_bytes: int) -> torch.Tensor:
        return torch.from_numpy(self._mapped[pointer].array[:num_bytes])

    def ipc_export(self, pointer: int) -> bytes:
        self._check()
        name = bytes.fromhex(self._mapped[pointer].path.stem)
        return (_MAGIC + self._uuid + name).ljust(HANDLE_BYTES, b"\0")

    def ipc_open(self, handle: bytes, num_bytes: int) -> int:
        self._check()
        uuid, name = handle[4 : 4 + UUID_BYTES], handle[4 + UUID_BYTES :][:_NAME_BYTES]
        path = self._folder / f"{name.hex()}.device"
        if not self._opens or not handle.startswith(_MAGIC) or not self.can_access(uuid):
            raise DeviceError("this handle cannot be opened here")
        if any(mapped.path == path and not mapped.is_own for mapped in self._mapped.values()):
            raise DeviceError("this handle is open already")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise DeviceError("no such allocation") from error
        if os.fstat(fd).st_size < num_bytes:
            os.close(fd)
            raise DeviceError("the allocation is smaller than promised")
        fcntl.flock(fd, fcntl.LOCK_SH)
        self.num_opened += 1
        return self._map(fd, path, is_own=False)

    def ipc_close(self, pointer: int) -> None:
        self._check()
        start, end = pointer, pointer + self._mapped[pointer].array.size
        with self._changed:
            waiting = [job for job in self._queue if start <= job.pointer < end]
        if waiting:
            raise self._violated("a mapping was closed while a copy was under way")
        self._unmap(pointer)

    def copy_async(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._enqueue(target, lambda: target.copy_(source))

    def scatter_async(self, target: torch.Tensor, pages: Sequence[int], source: torch.Tensor) -> None:
        def run() -> None:
            target[:, torch.tensor(list(pages))] = source.transpose(0, 1)

        self._enqueue(target, run)

    def event_record(self) -> FakeEvent:
        with self._changed:
            return FakeEvent(self, self._num_enqueued)

    def has_run(self, mark: int) -> bool:
        with self._changed:
            self._check()
            return self._num_run >= mark

    # -- inside ------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._is_broken:
            raise DeviceError("the device has failed")

    def _violated(self, what: str) -> DeviceError:
        self.violations.append(what)
        return DeviceError(what)

    def _map(self, fd: int, path: Path, *, is_own: bool) -> int:
        array = np.frombuffer(mmap.mmap(fd, 0, flags=mmap.MAP_SHARED), dtype=np.uint8)
        self._mapped[array.ctypes.data] = _Mapped(array, fd, path, is_own)
        return int(array.ctypes.data)

    def _unmap(self, pointer: int) -> None:
        fd = self._mapped.pop(pointer).fd
        fcntl.flock(fd, fcntl.LOCK_UN)  # the mapping, which tensors may keep, has the file open too
        os.close(fd)

    def _enqueue(self, target: torch.Tensor, run: Callable[[], object]) -> None:
        with self._changed:
            self._check()
            self._queue.append(_Job(target.data_ptr(), run))
            self._num_enqueued += 1
            self.num_copies += 1
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or (self._queue and not self._is_held))
                if self._is_closed:
                    return
                job = self._queue[0]
            time.sleep(self._delay_s)
            with self._changed:
                if self._is_broken:
                    return
                if self._is_held:
                    continue
                job.run()
                self._queue.popleft()
                self._num_run += 1
