"""PNG written by hand: kinds that Pillow reads and does not write, and kinds that nobody should write."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

SIGNATURE = b"\x89PNG\r\n\x1a\n"
GREY, RGB, PALETTE, GREY_ALPHA, RGBA = 0, 2, 3, 4, 6
# Adam7: first column, first row, step between columns, step between rows.
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def chunk(kind: bytes, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def header(width: int, height: int, depth: int = 8, colour: int = RGB, interlaced: int = 0) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced))


def file(*chunks: bytes) -> bytes:
    return b"".join([SIGNATURE, *chunks, chunk(b"IEND")])


def pixels(values: npt.NDArray[np.uint8] | npt.NDArray[np.uint16]) -> bytes:
    """(height, width, channels), 8 or 16 bits each, rows without a filter."""
    big = values.astype(values.dtype.newbyteorder(">"))
    return zlib.compress(b"".join(b"\0" + row.tobytes() for row in big), 6)


def plain(values: npt.NDArray[np.uint8] | npt.NDArray[np.uint16], colour: int, *before: bytes) -> bytes:
    height, width = values.shape[:2]
    return file(header(width, height, 8 * values.itemsize, colour), *before, chunk(b"IDAT", pixels(values)))


def interlaced(values: npt.NDArray[np.uint8], colour: int) -> bytes:
    height, width = values.shape[:2]
    rows: Iterable[npt.NDArray[np.uint8]] = (
        row for left, top, right, down in _PASSES for row in values[top::down, left::right] if row.size
    )
    body = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    return file(header(width, height, 8, colour, 1), chunk(b"IDAT", body))
