"""The header of a data frame: which grant the payload belongs to, and where in it. Pure.

A message on a data socket has two parts, this header and the payload. A grant's bytes are one stream that begins at
offset 0: the slot itself, or for KV the grant's pages in sequence order (`kv/pages.py`). Its frames follow each other
without gap or overlap, so the receiver needs to remember one number.

    magic version kind reserved | session | session key | ticket | capability | generation | offset | length | checksum
      4      1     1      2         8          16          8         16           8          8        4  (4)     8
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass, field
from typing import Final

import xxhash

MAGIC: Final = b"TPZ\x00"
VERSION: Final = 1
SESSION_KEY_BYTES: Final = 16
CURVE_KEY_BYTES: Final = 32
MAX_PAYLOAD_BYTES: Final = 1 << 20
_FIELDS: Final = struct.Struct("<4sBBHQ16sQ16sQQI4x")
_CHECKSUM: Final = struct.Struct("<Q")
HEADER_BYTES: Final = _FIELDS.size + _CHECKSUM.size


class PayloadKind(enum.IntEnum):
    SLOT = 1
    PAGES = 2


@dataclass(frozen=True, slots=True)
class DataHeader:
    """What a frame says about its payload.

    Attributes:
        session, session_key: from the receiver's HelloAck.
        ticket: `sequence` of the request that was answered with the grant; unique within the session.
        capability, generation: the grant's.
        offset, length: of the payload within the grant's stream, in bytes; `length` is at most MAX_PAYLOAD_BYTES.
    """

    kind: PayloadKind
    session: int
    session_key: bytes = field(repr=False)
    ticket: int
    capability: bytes = field(repr=False)
    generation: int
    offset: int
    length: int


def pack(header: DataHeader, payload: memoryview) -> bytes:
    """The header's bytes; its checksum covers header and payload."""
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        header.kind,
        0,
        header.session,
        header.session_key,
        header.ticket,
        header.capability,
        header.generation,
        header.offset,
        header.length,
    )
    return fields + _CHECKSUM.pack(_sum(fields, payload))


class BadFrame(Exception):
    """A frame that is not taken; `reason` is one of few words, a metric's label."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def unpack(raw: memoryview, payload: memoryview) -> DataHeader:
    """Raises BadFrame unless magic, version, kind, lengths and checksum are right. Trusts nothing else yet."""
    if len(raw) != HEADER_BYTES:
        raise BadFrame("malformed")
    magic, version, kind, reserved, session, key, ticket, capability, generation, offset, length = _FIELDS.unpack(
        raw[: _FIELDS.size]
    )
    if magic != MAGIC or version != VERSION or reserved or kind not in PayloadKind.__members__.values():
        raise BadFrame("malformed")
    if length != len(payload) or not 1 <= length <= MAX_PAYLOAD_BYTES:
        raise BadFrame("malformed")
    (checksum,) = _CHECKSUM.unpack(raw[_FIELDS.size :])
    if checksum != _sum(raw[: _FIELDS.size], payload):
        raise BadFrame("checksum")
    return DataHeader(PayloadKind(kind), session, key, ticket, capability, generation, offset, length)


def _sum(fields: bytes | memoryview, payload: memoryview) -> int:
    digest = xxhash.xxh3_64(fields)
    digest.update(payload)
    return digest.intdigest()
