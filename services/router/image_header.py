"""What a picture says about itself, from its header alone: no pixel is decoded in the router.

The encoder decodes the same bytes later, in a sandbox; a picture that lied here ends there as MEDIA_MISMATCH.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image

from triptych.core.errors import MediaInvalid, MediaUnsupported
from triptych.media.formats import PILLOW_FORMATS
from triptych.media.orientation import stored_orientation

MAX_ASPECT_RATIO = 200
# A phone's picture takes some hundred reads; at a microsecond or two each, these take well under a tenth of a second.
MAX_HEADER_READS = 20_000
# Of 20 MB in pieces of 320 bytes; what writes PNG makes pieces of 8 KiB and more.
MAX_PNG_CHUNKS = 65_536

_ACCEPTED = "PNG, JPEG, WebP, GIF (first frame) or BMP"
_TURNED = frozenset({5, 6, 7, 8})

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_METADATA = frozenset({b"IHDR", b"eXIf", b"tEXt", b"zTXt", b"iTXt"})
_PNG_EMPTY_END = b"\x00\x00\x00\x00IEND\xaeB`\x82"

# For what cannot be told: a header that is cut short, too.
_UNKNOWN = "this file's format"
_RIFF_KINDS = {b"WAVE": "WAV audio", b"AVI ": "AVI video"}
_HEIF_BRANDS = frozenset({b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"})
_OTHER_MAGIC = (
    (b"%PDF", "PDF"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
    (b"\x00\x00\x01\x00", "ICO"),
    (b"\x00\x00\x00\x0cjP  ", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\x00\x00\x00\x0cJXL ", "JPEG XL"),
    (b"8BPS", "Photoshop"),
    (b"OggS", "Ogg"),
    (b"ID3", "MP3"),
    (b"\x1aE\xdf\xa3", "Matroska or WebM"),
    (b"PK\x03\x04", "ZIP"),
    (b"\x1f\x8b", "gzip"),
)


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """Size in pixels after EXIF orientation."""

    width_px: int
    height_px: int


def read_image_header(data: bytes, max_pixels: int, param: str) -> ImageHeader:
    """Sniffs the format by content, whatever the caller declared.

    Raises:
        MediaInvalid: empty, broken, too many pixels, or a side more than 200 times the other.
        MediaUnsupported: another format than those accepted.
    """
    if not data:
        raise MediaInvalid("the picture has zero bytes", param=param)
    if not _is_accepted(data):
        raise MediaUnsupported(f"{_name_of(data)} is not accepted; send {_ACCEPTED}", param=param)
    width, height, turned = _inspect(data, max_pixels, param)
    if width < 1 or height < 1:
        raise MediaInvalid("the picture has no pixels", param=param)
    if width * height > max_pixels:
        raise _too_many_pixels(max_pixels, param)
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise MediaInvalid(
            f"the picture is {width}x{height}; its longer side may be at most {MAX_ASPECT_RATIO} times the shorter",
            param=param,
        )
    return ImageHeader(height, width) if turned else ImageHeader(width, height)


def _inspect(data: bytes, max_pixels: int, param: str) -> tuple[int, int, bool]:
    """(width, height, whether the orientation exchanges them), both as stored."""
    try:
        with Image.open(_Bounded(data), formats=PILLOW_FORMATS) as image:
            width, height = image.size
        with Image.open(_Bounded(_metadata_only(data)), formats=PILLOW_FORMATS) as image:
            turned = stored_orientation(image.info) in _TURNED
    except _TooManyParts:
        raise MediaInvalid("the picture's header has too many parts", param=param) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_many_pixels(max_pixels, param) from None
    except Exception:  # Pillow's plugins raise nearly anything on broken input, with memory addresses in the text
        raise MediaInvalid("the picture's header cannot be read", param=param) from None
    return width, height, turned


class _TooManyParts(Exception):
    """Reading the header would take longer than any honest picture's takes."""


class _Bounded(io.BytesIO):
    """A file whose reads are counted: each part of a header costs Pillow some, and a picture of 20 MB can have millions
    of parts."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._left = MAX_HEADER_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise _TooManyParts
        return super().read(size)


def _too_many_pixels(max_pixels: int, param: str) -> MediaInvalid:
    return MediaInvalid(f"a picture may have at most {max_pixels} pixels", param=param)


def _metadata_only(data: bytes) -> bytes:
    """A PNG without its pixels, so that EXIF behind them is found too; anything else as it is."""
    if not data.startswith(_PNG_SIGNATURE):
        return data
    chunks = [chunk for kind, chunk in _png_chunks(data) if kind in _PNG_METADATA]
    return b"".join([_PNG_SIGNATURE, *chunks, _PNG_EMPTY_END])


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(type, whole chunk), up to the first that is cut off. Raises _TooManyParts."""
    start = len(_PNG_SIGNATURE)
    for _ in range(MAX_PNG_CHUNKS):
        if start + 12 > len(data):
            return
        length, kind = struct.unpack_from(">I4s", data, start)
        end = start + 12 + length
        if end > len(data):
            return
        yield kind, data[start:end] if kind in _PNG_METADATA else b""
        start = end
    raise _TooManyParts


def _is_accepted(data: bytes) -> bool:
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return True
    return data.startswith((_PNG_SIGNATURE, b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"BM"))


def _name_of(data: bytes) -> str:
    """A name for what is not accepted, for the message."""
    if data[4:8] == b"ftyp":
        brand = data[8:12]
        return "AVIF" if brand in (b"avif", b"avis") else "HEIC" if brand in _HEIF_BRANDS else "MP4 or QuickTime video"
    if data[:4] == b"RIFF":
        return _RIFF_KINDS.get(data[8:12], _UNKNOWN)
    for magic, name in _OTHER_MAGIC:
        if data.startswith(magic):
            return name
    head = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if head.startswith((b"<svg", b"<?xml", b"<!doctype", b"<!--")) and b"<svg" in head:
        return "SVG"
    return "HTML or XML" if head.startswith(b"<") else _UNKNOWN
