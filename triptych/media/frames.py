"""What a worker and its media processes say to each other: length-prefixed frames of raw bytes, nothing to unpickle.

    request     0   4  magic "TPMQ"          reply    0   4  magic "TPMR"
                4   1  version (1)                    4   1  version (1)
                5   1  filter for resizing            5   1  kind: 0 picture, 1 refusal
                6   2  seconds of CPU, at most        6   2  zero
                8   4  most pixels to decode          8   4  width, upright, as it was sent
               12   4  width wanted                  12   4  height
               16   4  height wanted                 16   8  length of what follows
               20   8  length of the media
               28      the encoded media             24      pixels (height, width, 3) uint8, or code LF message

One request, one reply, in turn. Numbers are little-endian. Before the first, the process says that it has started: the
magic "TPMS", the version, and 1 if the kernel looks at its system calls, else 0.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from triptych.core.errors import MediaInvalid, MediaUnsupported, RequestError

REQUEST: Final = struct.Struct("<4sBBHIIIQ")
REPLY: Final = struct.Struct("<4sBBHIIQ")
VERSION: Final = 1
READY_BYTES: Final = 6
MAX_REFUSAL_BYTES: Final = 1024
MAX_SIDE_PX: Final = 1 << 20

_READY = b"TPMS" + bytes([VERSION])
_REQUEST_MAGIC = b"TPMQ"
_REPLY_MAGIC = b"TPMR"
_PICTURE, _REFUSAL = 0, 1
_REFUSALS: dict[str, type[RequestError]] = {error.code: error for error in (MediaInvalid, MediaUnsupported)}


class MalformedFrame(Exception):
    """The other side does not speak this protocol."""


@dataclass(frozen=True, slots=True)
class Target:
    """The size to resize to, and Pillow's number of the filter to do it with."""

    width_px: int
    height_px: int
    resample: int

    @property
    def num_bytes(self) -> int:
        return self.width_px * self.height_px * 3


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one picture: pixels as sent, and seconds of CPU."""

    max_pixels: int
    cpu_s: int


@dataclass(frozen=True, slots=True)
class Head:
    """A reply without what follows: a picture of that size as it was sent, or a refusal (None)."""

    size_px: tuple[int, int] | None
    num_bytes: int


def pack_ready(is_filtered: bool) -> bytes:
    return _READY + bytes([is_filtered])


def unpack_ready(said: bytes) -> bool:
    """Whether the kernel looks at its system calls. Raises MalformedFrame."""
    if said[:-1] != _READY or said[-1] > 1:
        raise MalformedFrame("not a media process of this version")
    return bool(said[-1])


def pack_request(target: Target, limits: Limits, media_bytes: int) -> bytes:
    return REQUEST.pack(
        _REQUEST_MAGIC,
        VERSION,
        target.resample,
        limits.cpu_s,
        min(limits.max_pixels, 0xFFFF_FFFF),
        target.width_px,
        target.height_px,
        media_bytes,
    )


def unpack_request(head: bytes) -> tuple[Target, Limits, int]:
    """Target, limits and the length of the media. Raises MalformedFrame."""
    magic, version, resample, cpu_s, max_pixels, width, height, media_bytes = REQUEST.unpack(head)
    if (magic, version) != (_REQUEST_MAGIC, VERSION):
        raise MalformedFrame("not a request of this version")
    return Target(width, height, resample), Limits(max_pixels, cpu_s), media_bytes


def pack_picture(size_px: tuple[int, int], num_bytes: int) -> bytes:
    return REPLY.pack(_REPLY_MAGIC, VERSION, _PICTURE, 0, *size_px, num_bytes)


def pack_refusal(error: RequestError) -> bytes:
    """Whole, what follows included."""
    text = f"{error.code}\n{error.message}".encode()[:MAX_REFUSAL_BYTES]
    return REPLY.pack(_REPLY_MAGIC, VERSION, _REFUSAL, 0, 0, 0, len(text)) + text


def unpack_reply(head: bytes, target: Target) -> Head:
    """Raises MalformedFrame for anything but a refusal or a picture of the size that was asked for."""
    magic, version, kind, zero, width, height, num_bytes = REPLY.unpack(head)
    if (magic, version, zero) != (_REPLY_MAGIC, VERSION, 0):
        raise MalformedFrame("not a reply of this version")
    if kind == _REFUSAL and num_bytes <= MAX_REFUSAL_BYTES:
        return Head(None, num_bytes)
    if kind == _PICTURE and num_bytes == target.num_bytes and 0 < width <= MAX_SIDE_PX and 0 < height <= MAX_SIDE_PX:
        return Head((width, height), num_bytes)
    raise MalformedFrame("a reply of another size than was asked for")


def refusal(text: bytes) -> RequestError:
    """The error that a process named; what it cannot know becomes MediaInvalid."""
    code, _, message = text.decode("utf-8", "replace").partition("\n")
    return _REFUSALS.get(code, MediaInvalid)(message)
