"""Tensors from trusted callers: typed values over immutable bytes, and the frame they cross the wire in.

    0     4  magic "TPTN"
    4     1  version (1)
    5     1  number format: 1 float32, 2 bfloat16, 3 float16
    6     1  number of dimensions, 1 to 4
    7     1  zero
    8    32  four sizes, unsigned 64-bit little-endian; the unused are zero
   40        the elements, row-major, little-endian, to the last byte

A frame says all there is to know: no strides, no sparse layouts, no objects, nothing to unpickle.
"""

from __future__ import annotations

import enum
import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from triptych.core.errors import InvalidRequest

HEADER_BYTES = 40
MAX_TENSOR_BYTES = 256 << 20
"""No single tensor may be larger: more than any picture's patches or embedding needs."""

_MAGIC = b"TPTN"
_VERSION = 1
_MAX_DIMS = 4
_HEADER = struct.Struct("<4sBBBB4Q")
# Bounds the memory that a look at all elements takes.
_CHECK_ELEMENTS = 1 << 20


class TensorDtype(enum.Enum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return 4 if self is TensorDtype.FLOAT32 else 2


_CODES = {TensorDtype.FLOAT32: 1, TensorDtype.BFLOAT16: 2, TensorDtype.FLOAT16: 3}
_BY_CODE = {code: dtype for dtype, code in _CODES.items()}
# The bits that are all ones in an infinity and in every NaN.
_EXPONENT = {TensorDtype.FLOAT32: 0x7F80_0000, TensorDtype.BFLOAT16: 0x7F80, TensorDtype.FLOAT16: 0x7C00}


@dataclass(frozen=True, slots=True)
class TensorValue:
    """A dense tensor: `data` are its elements, row-major and little-endian, in memory that nobody can change.

    Raises InvalidRequest when shape and length do not belong together or are out of bounds.
    """

    dtype: TensorDtype
    shape: tuple[int, ...]
    data: memoryview

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", _immutable(self.data))
        _check_shape(self.shape)
        expected = math.prod(self.shape) * self.dtype.itemsize
        if expected > MAX_TENSOR_BYTES:
            raise InvalidRequest(f"a tensor may have at most {MAX_TENSOR_BYTES} bytes; this one would have {expected}")
        if len(self.data) < expected:
            raise InvalidRequest(f"the tensor is cut short: {len(self.data)} bytes of {expected}")
        if len(self.data) > expected:
            raise InvalidRequest(f"{len(self.data) - expected} bytes follow the tensor's {expected}")

    @classmethod
    def from_array(cls, array: npt.NDArray[Any]) -> TensorValue:
        """A copy of a float32 or float16 array (numpy has no bfloat16: give its bytes to `from_bytes`)."""
        name = array.dtype.name
        if name not in ("float32", "float16"):
            raise InvalidRequest(f"a tensor's elements must be float32, bfloat16 or float16, not {name}")
        packed = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        return cls(TensorDtype(name), array.shape, memoryview(packed.tobytes()))

    @classmethod
    def from_bytes(cls, dtype: str, shape: tuple[int, ...], data: bytes) -> TensorValue:
        """Of the elements' own bytes; `dtype` is "float32", "bfloat16" or "float16"."""
        if dtype not in {known.value for known in TensorDtype}:
            raise InvalidRequest(f"a tensor's elements must be float32, bfloat16 or float16, not {dtype}")
        return cls(TensorDtype(dtype), shape, memoryview(data))

    @classmethod
    def from_frame(cls, frame: bytes) -> TensorValue:
        """The tensor of a frame, over the frame's own memory. Raises InvalidRequest for all but one whole frame."""
        if len(frame) < HEADER_BYTES:
            raise InvalidRequest("the tensor's header is cut short")
        magic, version, code, num_dims, zero, *sizes = _HEADER.unpack_from(frame)
        if magic != _MAGIC or version != _VERSION or zero:
            raise InvalidRequest("this is no tensor frame of a version known here")
        if code not in _BY_CODE:
            raise InvalidRequest("the tensor has an unknown number format; send float32, bfloat16 or float16")
        if not 1 <= num_dims <= _MAX_DIMS or any(sizes[num_dims:]):
            raise InvalidRequest(f"a tensor has 1 to {_MAX_DIMS} dimensions")
        return cls(_BY_CODE[code], tuple(sizes[:num_dims]), memoryview(frame)[HEADER_BYTES:])

    def to_frame(self) -> bytes:
        sizes = (*self.shape, *([0] * (_MAX_DIMS - len(self.shape))))
        return _HEADER.pack(_MAGIC, _VERSION, _CODES[self.dtype], len(self.shape), 0, *sizes) + self.data

    @property
    def frame_bytes(self) -> int:
        return HEADER_BYTES + len(self.data)

    def is_finite(self) -> bool:
        """Whether no element is an infinity or a NaN. Reads all of them: not for an event loop."""
        mask = _EXPONENT[self.dtype]
        words = np.frombuffer(self.data, dtype=f"<u{self.dtype.itemsize}")
        starts = range(0, len(words), _CHECK_ELEMENTS)
        return not any(((words[start : start + _CHECK_ELEMENTS] & mask) == mask).any() for start in starts)


def _immutable(data: memoryview) -> memoryview:
    """The same bytes in memory that cannot change: those of a `bytes` object as they are, others copied."""
    flat = data if data.contiguous and data.ndim == 1 and data.format == "B" else None
    if flat is not None and isinstance(flat.obj, bytes):
        return flat
    return memoryview(data.tobytes())


def _check_shape(shape: tuple[int, ...]) -> None:
    if not 1 <= len(shape) <= _MAX_DIMS:
        raise InvalidRequest(f"a tensor has 1 to {_MAX_DIMS} dimensions")
    for size in shape:
        if not 1 <= size <= MAX_TENSOR_BYTES:
            raise InvalidRequest(f"each size of a tensor must be between 1 and {MAX_TENSOR_BYTES}, not {size}")
