"""What `cuda_ipc` needs of a GPU. Everything else about that transport is the same for a GPU and for the fake one.

Implemented by `cuda_driver.py`, and by `triptych/testing/fake_device.py` over files that processes share. A driver
belongs to one device of this process; pointers are addresses in this process. All methods may be called from any
thread, and all but `can_access` raise DeviceError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    import torch

HANDLE_BYTES: Final = 64
UUID_BYTES: Final = 16


class DeviceError(Exception):
    """The driver refused, or the device failed. The message is the driver's word for it: no address, no handle."""


class DeviceEvent(Protocol):
    """A mark on the side stream."""

    def query(self) -> bool:
        """Whether all that was enqueued before the mark has completed. Never blocks."""
        ...

    def synchronize(self) -> None:
        """Returns when it has. Blocks: not for the event loop."""
        ...


class DeviceMemory(Protocol):
    """Raw allocations: no caching allocator, since what is exported is the whole allocation."""

    def malloc(self, num_bytes: int) -> int: ...

    def free(self, pointer: int) -> None:
        """Only when no peer has it open."""
        ...

    def tensor(self, pointer: int, num_bytes: int) -> torch.Tensor:
        """uint8 (num_bytes,) over that memory, without a copy. The memory must outlive all use of it."""
        ...

    def ipc_export(self, pointer: int) -> bytes:
        """The handle, HANDLE_BYTES long, of an allocation of this process."""
        ...

    def ipc_open(self, handle: bytes, num_bytes: int) -> int:
        """Maps a peer's allocation, once per process. Refuses one that is smaller than `num_bytes`."""
        ...

    def ipc_close(self, pointer: int) -> None:
        """Only when nothing that was enqueued can still touch it."""
        ...


class DeviceCopies(Protocol):
    """A side stream. What is enqueued runs in order, after the work that was enqueued before on the caller's stream."""

    def copy_async(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """`target` and `source` are uint8 of one length, one of them on the device. Nobody changes `source` before an
        event that was recorded later has completed."""
        ...

    def scatter_async(self, target: torch.Tensor, pages: Sequence[int], source: torch.Tensor) -> None:
        """target (planes, pages, cell bytes)[:, pages] becomes source (len(pages), planes, cell bytes); as above."""
        ...

    def event_record(self) -> DeviceEvent: ...


class DeviceIdentity(Protocol):
    @property
    def uuid(self) -> bytes:
        """UUID_BYTES that name the device, whatever its index in this process."""
        ...

    def can_access(self, uuid: bytes) -> bool:
        """Whether this device can write to the memory of that one: it is the same, or is visible to this process and
        they have peer access."""
        ...


class Driver(DeviceMemory, DeviceCopies, DeviceIdentity, Protocol):
    """All of it."""


@dataclass(frozen=True, slots=True)
class DeviceAddress:
    """Where a receiver's arena lies: what a sender needs to map it.

    Attributes:
        handle: HANDLE_BYTES of the driver's.
        uuid: of the device, UUID_BYTES.
        lease_name: the shared segment whose byte `mapping_id` the sender keeps read-locked while it has the arena
            mapped.
    """

    handle: bytes = field(repr=False)
    uuid: bytes
    lease_name: str
