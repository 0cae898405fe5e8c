"""What goes by a line, as `FrameWire` cuts it: calls with one request and a stream of answers, many at once.

    router --> worker    OPEN     u8 kind | u64 call | u8 method | u64 timeout_ms | request
                         CANCEL   u8 kind | u64 call
    worker --> router    MESSAGE  u8 kind | u64 call | answer
                         END      u8 kind | u64 call | u8 status | ErrorDetail

Numbers are little-endian. Requests, answers and details are protobuf messages; `status` is gRPC's, and a detail is
there only where the worker has something to say. The caller numbers its calls and uses no number twice.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Final

from triptych.core.errors import TransferRefused

HEAD: Final = struct.Struct("<BQ")
_REQUEST: Final = struct.Struct("<BQ")
_STATUS: Final = struct.Struct("<B")
# Of an OPEN, the longest head.
MAX_HEAD_BYTES: Final = HEAD.size + _REQUEST.size


class Kind(enum.IntEnum):
    OPEN = 1
    CANCEL = 2
    MESSAGE = 3
    END = 4


class Method(enum.IntEnum):
    GENERATE = 1
    PREFILL = 2


@dataclass(frozen=True, slots=True)
class Open:
    call: int
    method: int
    timeout_s: float
    request: bytes


def open_frame(call: int, method: Method, timeout_s: float, request: bytes) -> bytes:
    timeout_ms = max(1, round(1000 * timeout_s))
    return HEAD.pack(Kind.OPEN, call) + _REQUEST.pack(method, timeout_ms) + request


def cancel_frame(call: int) -> bytes:
    return HEAD.pack(Kind.CANCEL, call)


def message_frame(call: int, message: bytes) -> bytes:
    return HEAD.pack(Kind.MESSAGE, call) + message


def end_frame(call: int, status: int, detail: bytes = b"") -> bytes:
    return HEAD.pack(Kind.END, call) + _STATUS.pack(status) + detail


def head_of(frame: bytes) -> tuple[int, int]:
    """Kind and call. Raises TransferRefused for what is no frame."""
    if len(frame) < HEAD.size:
        raise TransferRefused("a line's frame is too short")
    kind, call = HEAD.unpack_from(frame)
    return kind, call


def read_open(call: int, frame: bytes) -> Open:
    """Raises TransferRefused."""
    if len(frame) < MAX_HEAD_BYTES:
        raise TransferRefused("a line's frame is too short")
    method, timeout_ms = _REQUEST.unpack_from(frame, HEAD.size)
    return Open(call, method, timeout_ms / 1000, frame[MAX_HEAD_BYTES:])


def read_message(frame: bytes) -> bytes:
    return frame[HEAD.size :]


def read_end(frame: bytes) -> tuple[int, bytes]:
    """Status and detail. Raises TransferRefused."""
    if len(frame) < HEAD.size + _STATUS.size:
        raise TransferRefused("a line's frame is too short")
    (status,) = _STATUS.unpack_from(frame, HEAD.size)
    return status, frame[HEAD.size + _STATUS.size :]
