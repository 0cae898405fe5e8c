"""Device memory that a receiver lets peers map, and a peer's mapping of it.

    owner                                             peer
    malloc -> export handle, create lease segment     lease: lock byte `mapping_id` -> open handle (once per process)
                                                      launch, launch, ...
                                                      close: no launch any more -> events complete -> close handle
                                                      -> unlock
    sessions over -> no byte locked any more -> free

A driver does not tell who has an allocation open, nor when a peer dies. The lease does: a read lock on one byte of a
small shared segment, which the kernel drops with the peer's process, exactly as for `shm`. What a lost peer was granted
is reused, and the allocation freed, only when its lock is gone; a peer unlocks only after its last copy has completed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from triptych.core.errors import PeerLost, StartupError, TransferRefused
from triptych.core.ids import WorkerRef
from triptych.transport.device import DeviceAddress, DeviceError, DeviceEvent, Driver
from triptych.transport.shm import SHM_DIRECTORY, SharedSegment

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

LEASE_BYTES: Final = 4096
FREE_GRACE_S: Final = 2.0
"""How long the owner waits at its end for peers to close. What is open longer ends with the process."""

SETTLE_S: Final = 0.2
"""A killed peer's lock goes with its files, and so does its context on the device. Which of them goes first is not
promised, so what the lock guarded rests a little longer."""

_POLL_S: Final = 0.01

_log = logging.getLogger(__name__)


class DeviceArena:
    """Owner of one raw allocation, of its lease segment, and of the list of those who write to it by themselves.

    Raises StartupError from `create` when the device has no room.
    """

    def __init__(self, driver: Driver, pointer: int, num_bytes: int, lease: SharedSegment) -> None:
        self._driver = driver
        self._pointer: int | None = pointer
        self._writers: set[WorkerRef] = set()
        self.num_bytes = num_bytes
        self.lease = lease
        self.tensor: torch.Tensor = driver.tensor(pointer, num_bytes)
        self.address = DeviceAddress(driver.ipc_export(pointer), driver.uuid, lease.name)

    @classmethod
    def create(cls, driver: Driver, num_bytes: int, flag: str, *, directory: Path = SHM_DIRECTORY) -> DeviceArena:
        """`flag` is the setting that the size came from. The memory is zeroed."""
        try:
            pointer = driver.malloc(num_bytes)
        except DeviceError as error:
            raise StartupError(
                f"the device has no memory for the {num_bytes} bytes of {flag} ({error}); ask for less"
            ) from error
        lease = None
        try:
            lease = SharedSegment.create(LEASE_BYTES, "lease", directory=directory)
            arena = cls(driver, pointer, num_bytes, lease)
            arena.tensor.zero_()
        except BaseException as error:
            if lease is not None:
                lease.close()
            _free(driver, pointer)
            if isinstance(error, DeviceError | RuntimeError):  # the latter is torch's word for it
                raise StartupError(
                    f"the device does not share memory between processes ({error}); use --transport shm"
                ) from error
            raise
        return arena

    def read(self, offset: int, num_bytes: int) -> memoryview:
        """A copy of those bytes on the host. Blocks until it is there: not for the event loop. Raises DeviceError."""
        import torch

        host = torch.empty(num_bytes, dtype=torch.uint8)
        self._driver.copy_async(host, self.tensor[offset : offset + num_bytes])
        self._driver.event_record().synchronize()
        array: npt.NDArray[np.uint8] = host.numpy()
        return array.data

    def is_written_by(self, peer: WorkerRef) -> bool:
        """Whether what that peer commits is in this memory already. Otherwise it is in the arena's host memory."""
        return peer in self._writers

    def opened_to(self, peer: WorkerRef) -> None:
        self._writers.add(peer)

    def closed_to(self, peer: WorkerRef) -> None:
        self._writers.discard(peer)

    async def close(self) -> None:
        """Idempotent. Nobody may use the tensor any more, and no session may begin."""
        pointer, self._pointer = self._pointer, None
        if pointer is None:
            return
        loop = asyncio.get_running_loop()
        give_up_at_s = loop.time() + FREE_GRACE_S
        while self.lease.is_mapped() and loop.time() < give_up_at_s:  # noqa: ASYNC110 - kernel locks tell nobody
            await asyncio.sleep(_POLL_S)
        if self.lease.is_mapped():
            _log.warning("a peer still has device memory of this worker open: it is freed with the process")
        else:
            _free(self._driver, pointer)
        self.lease.close()


def _free(driver: Driver, pointer: int) -> None:
    try:
        driver.free(pointer)
    except DeviceError as error:
        _log.error("device memory could not be freed", extra={"reason": str(error)})


class DeviceImports:
    """Owner of the allocations of peers that this process has open: each once, however many sessions use it."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._lock = threading.Lock()
        self._pointers: dict[bytes, int] = {}
        self._users: dict[bytes, int] = {}

    def open(self, handle: bytes, num_bytes: int) -> int:
        """Raises DeviceError."""
        with self._lock:
            if handle not in self._pointers:
                self._pointers[handle] = self.driver.ipc_open(handle, num_bytes)
            self._users[handle] = self._users.get(handle, 0) + 1
            return self._pointers[handle]

    def close(self, handle: bytes) -> None:
        """The last user closes it. Raises DeviceError, and then it stays open."""
        with self._lock:
            if self._users[handle] == 1:
                self.driver.ipc_close(self._pointers[handle])
                del self._pointers[handle], self._users[handle]
            else:
                self._users[handle] -= 1


class ImportedArena:
    """One session's use of a peer's arena. Owns the lock on the lease and what was launched; thread-safe."""

    def __init__(
        self, imports: DeviceImports, address: DeviceAddress, pointer: int, num_bytes: int, lease: SharedSegment
    ) -> None:
        self.driver = imports.driver
        self.num_bytes = num_bytes
        self._imports = imports
        self._handle = address.handle
        self._lease = lease
        self._lock = threading.Lock()
        self._memory: torch.Tensor | None = imports.driver.tensor(pointer, num_bytes)
        self._running: list[DeviceEvent] = []

    @classmethod
    def open(
        cls,
        imports: DeviceImports,
        address: DeviceAddress,
        num_bytes: int,
        mapping_id: int,
        *,
        directory: Path = SHM_DIRECTORY,
    ) -> ImportedArena:
        """Raises TransferRefused when the device is another one, or the driver cannot map it."""
        if not imports.driver.can_access(address.uuid):
            raise TransferRefused("this worker's GPU cannot write to the memory of the receiver's GPU")
        lease = SharedSegment.open(address.lease_name, LEASE_BYTES, mapping_id=mapping_id, directory=directory)
        pointer = None
        try:
            pointer = imports.open(address.handle, num_bytes)
            return cls(imports, address, pointer, num_bytes, lease)
        except BaseException as error:
            _let_go(imports, address.handle if pointer is not None else None, lease)
            if isinstance(error, DeviceError):
                raise TransferRefused(f"the receiver's device memory cannot be mapped here ({error})") from error
            raise

    def launch(self, work: Callable[[torch.Tensor], None]) -> DeviceEvent:
        """Calls `work` with the arena's bytes, uint8 (num_bytes,), to enqueue copies; returns the event after them.

        Raises PeerLost when the session is over, DeviceError when the device failed.
        """
        with self._lock:
            if self._memory is None:
                raise PeerLost("the session to the other worker is over")
            try:
                work(self._memory)
            finally:  # whatever it enqueued before it failed must be waited for
                event = self.driver.event_record()
                self._running = [running for running in self._running if not is_done(running)]
                self._running.append(event)
            return event

    def close(self) -> None:
        """Nothing is launched any more; when all that was has completed, the mapping goes, and then the lock. Never
        blocks. Idempotent."""
        with self._lock:
            if self._memory is None:
                return
            self._memory = None
            running, self._running = self._running, []
        threading.Thread(target=self._release_after, args=(running,), name="device-close", daemon=True).start()

    def _release_after(self, running: list[DeviceEvent]) -> None:
        try:
            for event in running:
                event.synchronize()
        except DeviceError as error:
            _stays_open(error)
        else:
            _let_go(self._imports, self._handle, self._lease)


def _let_go(imports: DeviceImports, handle: bytes | None, lease: SharedSegment) -> None:
    """The mapping first, where there is one, and then its lock."""
    try:
        if handle is not None:
            imports.close(handle)
    except DeviceError as error:
        _stays_open(error)
    else:
        lease.close()


def _stays_open(error: DeviceError) -> None:
    """The lock stays with the mapping: nobody may believe that it is gone before the process is."""
    _log.error("device memory of a peer cannot be closed", extra={"reason": str(error)})


def is_done(event: DeviceEvent) -> bool:
    """A device that fails has not said so."""
    try:
        return event.query()
    except DeviceError:
        return False
