"""The real driver of `cuda_ipc`: memory, handles and identity by libcuda, copies by torch on a stream of its own.

Unverified on hardware until `tests/gpu` has run there. By libcuda and not the runtime, since every machine with a GPU
has exactly one of it, whatever torch was built with; both work in the device's primary context, and so on the same
memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from triptych.transport.device import HANDLE_BYTES, UUID_BYTES, DeviceError

LIBRARY: Final = "libcuda.so.1"
# The driver exports whole blocks of this size: a smaller allocation could share one with other data of this process.
GRANULARITY_BYTES: Final = 2 << 20
_LAZY_PEER_ACCESS: Final = 1


class _Handle(ctypes.Structure):
    """CUipcMemHandle, passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * UUID_BYTES),)


class _Allocation:
    """What torch needs to make a tensor over memory that is not its own."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


class CudaEvent:
    """Implements `DeviceEvent`."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def query(self) -> bool:
        with _torch_errors():
            return bool(self._event.query())

    def synchronize(self) -> None:
        with _torch_errors():
            self._event.synchronize()


class CudaDriver:
    """Implements `Driver` for one device of this process. Owns a reference to its primary context, and a stream.

    Raises DeviceError when there is no driver or no such device.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = _load()
        self._call("cuInit", 0)
        ordinal = torch.cuda.current_device() if device.index is None else device.index
        self._torch_device = torch.device("cuda", ordinal)
        self._device = self._device_at(ordinal)
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self._uuid = self._uuid_of(self._device)
        self._stream = torch.cuda.Stream(self._torch_device)  # type: ignore[no-untyped-call]

    # -- memory ------------------------------------------------------------------------------------------------------

    def malloc(self, num_bytes: int) -> int:
        """Rounded up to whole blocks of GRANULARITY_BYTES."""
        pointer, size = ctypes.c_uint64(), -(-num_bytes // GRANULARITY_BYTES) * GRANULARITY_BYTES
        with self._current():
            self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer.value

    def free(self, pointer: int) -> None:
        with self._current():
            self._call("cuMemFree_v2", ctypes.c_uint64(pointer))

    def tensor(self, pointer: int, num_bytes: int) -> torch.Tensor:
        with _torch_errors():
            return torch.as_tensor(_Allocation(pointer, num_bytes))

    def ipc_export(self, pointer: int) -> bytes:
        handle = _Handle()
        with self._current():
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(pointer))
        return bytes(handle)

    def ipc_open(self, handle: bytes, num_bytes: int) -> int:
        pointer = ctypes.c_uint64()
        with self._current():
            given = _Handle.from_buffer_copy(handle)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
            try:
                self._check_size(pointer.value, num_bytes)
            except DeviceError:
                self._call("cuIpcCloseMemHandle", pointer)
                raise
        return pointer.value

    def ipc_close(self, pointer: int) -> None:
        with self._current():
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))

    # -- copies ------------------------------------------------------------------------------------------------------

    def copy_async(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with self._on_side_stream(source):
            target.copy_(source, non_blocking=True)

    def scatter_async(self, target: torch.Tensor, pages: Sequence[int], source: torch.Tensor) -> None:
        with self._on_side_stream(source):
            cells = source.to(self._torch_device, non_blocking=True).transpose(0, 1)
            if target.device == self._torch_device:
                index = torch.tensor(list(pages)).pin_memory().to(self._torch_device, non_blocking=True)
                target[:, index] = cells
                return
            for n, page in enumerate(pages):  # a kernel of one device takes no tensor of another
                for plane in range(target.shape[0]):
                    target[plane, page].copy_(cells[plane, n], non_blocking=True)

    def event_record(self) -> CudaEvent:
        with _torch_errors():
            return CudaEvent(self._stream)

    # -- identity ----------------------------------------------------------------------------------------------------

    @property
    def uuid(self) -> bytes:
        return self._uuid

    def can_access(self, uuid: bytes) -> bool:
        if uuid == self._uuid:
            return True
        try:
            return any(self._reaches(device) for device in self._visible() if self._uuid_of(device) == uuid)
        except DeviceError:
            return False

    # -- inside ------------------------------------------------------------------------------------------------------

    def _reaches(self, other: int) -> bool:
        answer = ctypes.c_int()
        self._call("cuDeviceCanAccessPeer", ctypes.byref(answer), self._device, other)
        return bool(answer.value)

    def _visible(self) -> Iterator[int]:
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return (self._device_at(ordinal) for ordinal in range(count.value))

    def _device_at(self, ordinal: int) -> int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        return device.value

    def _uuid_of(self, device: int) -> bytes:
        """The second version names a slice of a GPU (MIG), too."""
        uuid = _Uuid()
        name = "cuDeviceGetUuid_v2" if hasattr(self._cuda, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        self._call(name, ctypes.byref(uuid), device)
        return bytes(uuid)

    def _check_size(self, pointer: int, num_bytes: int) -> None:
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer))
        if base.value != pointer or size.value < num_bytes:
            raise DeviceError("the allocation is smaller than promised")

    @contextmanager
    def _current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    @contextmanager
    def _on_side_stream(self, source: torch.Tensor) -> Iterator[None]:
        """What was enqueued on the caller's stream comes first, and the allocator does not reuse `source` before this
        is done."""
        with _torch_errors():
            self._stream.wait_stream(torch.cuda.current_stream(self._torch_device))
            with torch.cuda.stream(self._stream):
                yield
            if source.is_cuda:
                source.record_stream(self._stream)

    def _call(self, name: str, *arguments: Any) -> None:
        function: Callable[..., int] = getattr(self._cuda, name)
        status = function(*arguments)
        if status:
            raise DeviceError(f"{name}: {self._name_of(status)}")

    def _name_of(self, status: int) -> str:
        text = ctypes.c_char_p()
        found = self._cuda.cuGetErrorName(status, ctypes.byref(text)) == 0 and text.value
        return text.value.decode() if found and text.value else f"error {status}"


def _load() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise DeviceError(f"{LIBRARY} is not there: no NVIDIA driver") from error


@contextmanager
def _torch_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise DeviceError(f"{type(error).__name__} of torch") from error
