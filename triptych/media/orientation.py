"""How a picture is to be turned, from its metadata: the router's and the media processes' one reading of it.

Not Pillow's: that takes every tag out of the EXIF, warns of each that is odd (a picture of 20 MB can have a million),
and fails for a picture whose EXIF is damaged, which every browser shows as it is stored.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from typing import Any, Final

from PIL import Image

UPRIGHT: Final = 1

_TAG: Final = 0x0112
_ORDERS: Final = {b"II": "<", b"MM": ">"}
# Kinds of whole numbers, and struct's letter for each. Single bytes are no numbers to Pillow, and turn nothing.
_NUMBERS: Final = {3: "H", 4: "I", 6: "b", 8: "h", 9: "i"}
_PREFIX: Final = re.compile(rb"^(Exif\x00\x00){1,2}")
_XMP: Final = re.compile(r'tiff:Orientation(?:="|>)([0-9])')

_TURNS: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def upright(image: Image.Image) -> Image.Image:
    """The picture as it is to be seen. It must have been loaded: metadata may stand behind the pixels."""
    turn = _TURNS.get(stored_orientation(image.info))
    return image if turn is None else image.transpose(turn)


def stored_orientation(info: Mapping[Any, Any]) -> int:
    """EXIF's number for it: of the EXIF itself, else of the XMP. What cannot be read, or is not there, is UPRIGHT.

    `info` is what Pillow found beside the pixels.
    """
    found = _from_exif(_exif_of(info))
    if found is None:
        found = _from_xmp(info.get("XML:com.adobe.xmp") or info.get("xmp"))
    return UPRIGHT if found is None else found


def _exif_of(info: Mapping[Any, Any]) -> bytes:
    exif = info.get("exif")
    if exif is None and "Raw profile type exif" in info:  # as ImageMagick writes it: three lines, then hexadecimal
        try:
            return bytes.fromhex("".join(str(info["Raw profile type exif"]).split("\n")[3:]))
        except ValueError:
            return b""
    return exif if isinstance(exif, bytes) else b""


def _from_exif(exif: bytes) -> int | None:
    """The first such tag of the first directory. None when there is none, or what should be there is damaged."""
    data = _PREFIX.sub(b"", exif)
    order = _ORDERS.get(data[:2])
    if order is None or len(data) < 8:
        return None
    (start,) = struct.unpack_from(f"{order}I", data, 4)
    if start + 2 > len(data):
        return None
    (count,) = struct.unpack_from(f"{order}H", data, start)
    entries = data[start + 2 : start + 2 + 12 * count]
    for tag, kind, num_values, value in struct.iter_unpack(f"{order}HHI4s", entries[: len(entries) // 12 * 12]):
        if tag == _TAG and num_values == 1 and kind in _NUMBERS:
            return int(struct.unpack_from(f"{order}{_NUMBERS[kind]}", value)[0])
    return None


def _from_xmp(xmp: object) -> int | None:
    text = xmp.decode("latin-1") if isinstance(xmp, bytes) else xmp
    match = _XMP.search(text) if isinstance(text, str) else None
    return int(match[1]) if match else None
