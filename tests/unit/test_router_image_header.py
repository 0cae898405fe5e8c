from __future__ import annotations

import io
import struct
import time
import zlib
from collections.abc import Callable

import pytest
from PIL import Image, ImageOps

from services.router.image_header import ImageHeader, read_image_header
from triptych.core.errors import MediaInvalid, MediaUnsupported, RequestError

ORIENTATION = 0x0112
MAX_PIXELS = 1_000_000


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def oriented(kind: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return encode(Image.new("RGB", (40, 20), "red"), kind, exif=exif)


def header(data: bytes) -> ImageHeader:
    return read_image_header(data, MAX_PIXELS, "messages.0")


def shown_size(data: bytes) -> tuple[int, int]:
    with Image.open(io.BytesIO(data)) as image:
        return ImageOps.exif_transpose(image).size


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_formats(kind: str) -> None:
    assert header(encode(Image.new("RGB", (31, 17)), kind)) == ImageHeader(31, 17)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_png_modes(mode: str) -> None:
    assert header(encode(Image.new(mode, (31, 17)), "PNG")) == ImageHeader(31, 17)


@pytest.mark.parametrize("options", [{"progressive": True}, {"quality": 5}, {"optimize": True}])
def test_jpeg_kinds(options: dict[str, object]) -> None:
    assert header(encode(Image.new("CMYK", (31, 17)), "JPEG", **options)) == ImageHeader(31, 17)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_sizes_are_those_after_exif_orientation(kind: str, orientation: int) -> None:
    data = oriented(kind, orientation)
    found = header(data)
    assert (found.width_px, found.height_px) == shown_size(data)
    assert found == (ImageHeader(20, 40) if orientation >= 5 else ImageHeader(40, 20))


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_orientation_that_does_not_exist_is_none(orientation: int) -> None:
    assert header(oriented("JPEG", orientation)) == ImageHeader(40, 20)


def test_exif_behind_the_pixels_of_a_png_counts() -> None:
    data = oriented("PNG", 6)
    start = data.index(b"eXIf") - 4
    end = start + 12 + struct.unpack(">I", data[start : start + 4])[0]
    moved = data[:start] + data[end:-12] + data[start:end] + data[-12:]
    assert shown_size(moved) == (20, 40)
    assert header(moved) == ImageHeader(20, 40)


def test_the_first_frame_of_an_animation() -> None:
    frames = [Image.new("P", (30, 20), number) for number in range(3)]
    for kind in ("GIF", "WEBP", "PNG"):
        data = encode(frames[0], kind, save_all=True, append_images=frames[1:])
        assert header(data) == ImageHeader(30, 20)


def test_a_phones_jpeg_with_more_pictures_behind() -> None:
    pictures = [Image.new("RGB", (40, 20), colour) for colour in ("red", "blue")]
    data = encode(pictures[0], "MPO", save_all=True, append_images=pictures[1:])
    assert header(data) == ImageHeader(40, 20)


@pytest.mark.parametrize("size", [(1, 1), (1, 200), (200, 1), (3, 3)])
def test_small_and_thin(size: tuple[int, int]) -> None:
    assert header(encode(Image.new("RGB", size), "PNG")) == ImageHeader(*size)


@pytest.mark.parametrize("size", [(1, 201), (402, 2)])
def test_too_thin(size: tuple[int, int]) -> None:
    with pytest.raises(MediaInvalid, match=f"{size[0]}x{size[1]}"):
        header(encode(Image.new("RGB", size), "PNG"))


def png_bomb(width: int, height: int) -> bytes:
    """A PNG of a few hundred bytes that claims to be huge."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("width", "height"), [(1001, 1000), (13_000, 13_000), (2**31 - 1, 2**31 - 1), (60_000, 400)])
@pytest.mark.parametrize("pillow_limit", [None, MAX_PIXELS, 10])
def test_bombs_are_refused_by_their_header(
    width: int, height: int, pillow_limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pillow_limit)
    with pytest.raises(MediaInvalid, match=str(MAX_PIXELS)):
        header(png_bomb(width, height))


def test_exactly_the_limit_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", MAX_PIXELS)
    assert header(png_bomb(1000, 1000)) == ImageHeader(1000, 1000)


OTHERS = {
    "AVIF": b"\x00\x00\x00\x20ftypavif" + bytes(40),
    "HEIC": b"\x00\x00\x00\x20ftypheic" + bytes(40),
    "MP4": b"\x00\x00\x00\x20ftypisom" + bytes(40),
    "SVG": b'<?xml version="1.0"?>\n<!-- x --><svg xmlns="http://www.w3.org/2000/svg"/>',
    "PDF": b"%PDF-1.7\n",
    "TIFF": b"II*\x00" + bytes(40),
    "WAV": b"RIFF\x00\x00\x00\x00WAVE",
    "AVI": b"RIFF\x00\x00\x00\x00AVI LIST",
    "JPEG XL": b"\xff\x0a" + bytes(20),
    "HTML": b"<html><body>404</body></html>",
    "this file's format": b"hello, this is text",
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_formats_are_named(name: str) -> None:
    with pytest.raises(MediaUnsupported, match=name) as caught:
        header(OTHERS[name])
    assert caught.value.http_status == 415
    assert "JPEG" in caught.value.message


def test_real_pictures_of_other_formats_are_not_taken_either() -> None:
    for kind in ("TIFF", "ICO", "PPM", "TGA", "PCX", "AVIF", "JPEG2000", "QOI"):
        with pytest.raises(MediaUnsupported):
            header(encode(Image.new("RGB", (32, 32)), kind))


@pytest.mark.parametrize("size", range(1, 12))
def test_a_header_cut_before_it_says_what_it_is_gets_no_name(size: int) -> None:
    for data in (b"RIFF\x24\x00\x00\x00WEBP", b"RIFF\x24\x00\x00\x00AVI ", b"RIFF\x24\x00\x00\x00WAVE"):
        with pytest.raises(MediaUnsupported, match="this file's format is not accepted"):
            header(data[:size])


def test_zero_bytes() -> None:
    with pytest.raises(MediaInvalid, match="zero bytes"):
        header(b"")


def cut_short(data: bytes) -> list[bytes]:
    return [data[:size] for size in range(1, min(len(data), 80))]


def flipped(data: bytes) -> list[bytes]:
    return [data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :] for at in range(min(len(data), 200))]


def complaint(data: bytes) -> str:
    """What is said about it; nothing when it is taken."""
    try:
        header(data)
    except RequestError as error:
        return error.message
    return ""


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("damage", [cut_short, flipped])
def test_damage_gives_a_clean_error_or_a_size(kind: str, damage: Callable[[bytes], list[bytes]]) -> None:
    for data in damage(oriented(kind, 6) if kind not in ("GIF", "BMP") else encode(Image.new("RGB", (40, 20)), kind)):
        assert "0x" not in complaint(data)
        assert "BytesIO" not in complaint(data)


def png_chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def endless_headers() -> dict[str, bytes]:
    """A few megabytes each, of pictures of 8x8; Pillow takes seconds for each."""
    image, many = Image.new("RGB", (8, 8)), 200_000
    png, jpeg, gif = encode(image, "PNG"), encode(image, "JPEG"), encode(image.convert("P"), "GIF")
    blocks_at = gif.index(b",", 13)
    return {
        "PNG, unknown chunks": png[:33] + png_chunk(b"aaAa") * many + png[33:],
        "PNG, texts": png[:33] + png_chunk(b"tEXt", b"a\0b") * many + png[33:],
        "PNG, texts behind the pixels": png[:-12] + png_chunk(b"tEXt", b"a\0b") * 60_000 + png[-12:],
        "PNG, chunks behind the pixels": png[:-12] + png_chunk(b"aaAa") * many + png[-12:],
        "JPEG, comments": jpeg[:2] + b"\xff\xfe\x00\x02" * many + jpeg[2:],
        "JPEG, EXIF": jpeg[:2] + b"\xff\xe1\x00\x08Exif\0\0" * many + jpeg[2:],
        "JPEG, padding": jpeg[:2] + b"\xff" * many * 5 + jpeg[2:],
        "GIF, extensions": gif[:blocks_at] + b"\x21\xfe\x00" * many + gif[blocks_at:],
    }


@pytest.mark.parametrize(("name", "data"), endless_headers().items(), ids=endless_headers().keys())
def test_a_header_without_end_is_refused_soon(name: str, data: bytes) -> None:
    begun_s = time.thread_time()
    with pytest.raises(MediaInvalid, match="too many parts") as refused:
        header(data)
    assert time.thread_time() - begun_s < 0.5
    assert refused.value.param == "messages.0"


def test_a_header_may_have_many_parts() -> None:
    image = Image.new("RGB", (31, 17))
    png, jpeg = encode(image, "PNG"), encode(image, "JPEG")
    assert header(png[:33] + png_chunk(b"tEXt", b"a\0b") * 1000 + png[33:]) == ImageHeader(31, 17)
    assert header(png[:-12] + png_chunk(b"IDAT") * 60_000 + png[-12:]) == ImageHeader(31, 17)
    segments = b"\xff\xe2\xff\xff" + b"ICC_PROFILE\0".ljust(65_533, b"x")
    assert header(jpeg[:2] + segments * 255 + jpeg[2:]) == ImageHeader(31, 17)
    assert header(jpeg[:2] + b"\xff" * 4096 + jpeg[2:]) == ImageHeader(31, 17)
