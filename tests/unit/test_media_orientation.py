"""Which way up a picture is: against Pillow's own reading, and where that gives up or never ends."""

from __future__ import annotations

import io
import random
import struct
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps, PngImagePlugin

from services.router.image_header import read_image_header
from triptych.core.errors import MediaInvalid
from triptych.media.orientation import UPRIGHT, stored_orientation
from triptych.media.picture import decode_picture

ORIENTATION = 0x0112
MANY = 10**8
TIFF_SHORT, TIFF_LONG = 3, 4


def drawn() -> Image.Image:
    x, y = np.meshgrid(np.arange(24), np.arange(16))
    return Image.fromarray(np.stack([x * 10, y * 15, x * 3 + y * 7], axis=-1).astype(np.uint8))


def encoded(kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    drawn().save(buffer, kind, **options)
    return buffer.getvalue()


def exif_of(entries: list[tuple[int, int, int, bytes]], order: str = "<", count: int | None = None) -> bytes:
    """Tags of (tag, type, number of values, four bytes)."""
    head = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(f"{order}I", 8)
    told = len(entries) if count is None else count
    rows = b"".join(struct.pack(f"{order}HHI4s", *entry) for entry in entries)
    return b"Exif\0\0" + head + struct.pack(f"{order}H", told) + rows + bytes(4)


def turned(orientation: int, order: str = "<") -> tuple[int, int, int, bytes]:
    return ORIENTATION, TIFF_SHORT, 1, struct.pack(f"{order}H", orientation)


def seen(media: bytes) -> Image.Image:
    """As it is decoded; the router, which lets Pillow's warnings pass as here, must have said the same size."""
    image = decode_picture(media, MANY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        header = read_image_header(media, MANY, "messages.0")
    assert image.size == (header.width_px, header.height_px)
    return image


def as_pillow(media: bytes) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(media))).convert("RGB"))


def png_text(key: str, value: str, add: Callable[[PngImagePlugin.PngInfo], Callable[..., None]]) -> bytes:
    info = PngImagePlugin.PngInfo()
    add(info)(key, value)
    return encoded("PNG", pnginfo=info)


def xmp(orientation: int) -> str:
    return f'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="{orientation}"/></x:xmpmeta>'


@pytest.mark.parametrize("orientation", range(10))
def test_every_place_where_it_may_stand_is_read_as_pillow_reads_it(orientation: int) -> None:
    raw = exif_of([turned(orientation)])
    media = [
        *(encoded(kind, exif=exif_of([turned(orientation, order)], order)) for kind in ("JPEG", "PNG", "WEBP")
          for order in "<>"),
        encoded("JPEG", exif=exif_of([(ORIENTATION, TIFF_LONG, 1, struct.pack("<I", orientation))])),
        encoded("JPEG", exif=exif_of([turned(orientation), turned(3)])),
        encoded("JPEG", exif=b"Exif\0\0" + raw),
        encoded("JPEG", xmp=xmp(orientation).encode()),
        encoded("JPEG", xmp=xmp(3).encode(), exif=raw),
        encoded("WEBP", xmp=xmp(orientation).encode()),
        png_text("XML:com.adobe.xmp", xmp(orientation), lambda info: info.add_itxt),
        png_text("Raw profile type exif", f"\nexif\n{len(raw):8}\n{raw.hex()}\n", lambda info: info.add_text),
    ]  # fmt: skip
    for one in media:
        assert np.array_equal(np.asarray(seen(one)), as_pillow(one))


def test_whatever_the_tags_are_router_and_decoder_agree_with_pillow() -> None:
    chance, num_turned = random.Random(7), 0
    for _ in range(300):
        order = chance.choice("<>")
        entries = [
            (chance.choice([ORIENTATION, 256, 271, 34665, chance.randrange(65_536)]), chance.randrange(14),
             chance.choice([0, 1, 1, 1, 2]), chance.randbytes(3) + bytes([chance.randrange(10)]))
            for _ in range(chance.randrange(4))
        ]  # fmt: skip
        entries.insert(chance.randrange(len(entries) + 1), turned(chance.randrange(10), order))
        exif = exif_of(entries, order)
        with warnings.catch_warnings(record=True) as odd:
            warnings.simplefilter("always")
            theirs = Image.Exif()
            theirs.load(exif)
            expected = theirs.get(ExifTags.Base.Orientation, UPRIGHT)
        if odd or any(tag == ORIENTATION and kind not in (3, 4, 6, 8, 9) for tag, kind, *_ in entries):
            continue  # Pillow reads no further, or finds text or a fraction, which turn nothing here
        assert stored_orientation({"exif": exif}) == expected
        num_turned += expected in range(2, 9)
    assert num_turned > 50


DAMAGED = {
    "zeros": b"Exif\0\0" + bytes(64),
    "no directory": b"Exif\0\0II*\0\xff\xff\xff\xffgarbage",
    "cut short": exif_of([turned(6)])[:20],
    "text": b"Exif\0\0this is no directory at all",
    "another kind of TIFF": b"Exif\0\0II+\0\x08\0\0\0" + bytes(40),
    "nothing": b"Exif\0\0",
    "two values": exif_of([(ORIENTATION, TIFF_SHORT, 2, b"\6\0\6\0")]),
}


@pytest.mark.parametrize("exif", DAMAGED.values(), ids=DAMAGED.keys())
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_picture_with_damaged_exif_is_shown_as_it_is_stored(kind: str, exif: bytes) -> None:
    decoded = np.asarray(seen(encoded(kind, exif=exif)))
    assert np.array_equal(decoded, np.asarray(Image.open(io.BytesIO(encoded(kind))).convert("RGB")))


def test_a_directory_that_promises_more_than_there_is() -> None:
    assert stored_orientation({"exif": exif_of([turned(8)], count=65_535)}) == 8


def test_a_raw_profile_that_is_no_hexadecimal_turns_nothing() -> None:
    seen(png_text("Raw profile type exif", "\nexif\n 4\nzz\n", lambda info: info.add_text))
    assert stored_orientation({"Raw profile type exif": "\nexif\n 4\nzz\n"}) == UPRIGHT


def test_very_many_tags_cost_little_and_no_word() -> None:
    """Pillow warns of each; warnings are errors here."""
    entries = [(1000 + index % 60_000, 7, 0xFFFF_0000 + index, b"\0\0\0\1") for index in range(65_000)]
    media = encoded("PNG", exif=exif_of([*entries, turned(6)]))
    begun_s = time.thread_time()
    header = read_image_header(media, MANY, "messages.0")
    assert time.thread_time() - begun_s < 0.3
    assert (header.width_px, header.height_px) == (16, 24)
    assert decode_picture(media, MANY).size == (16, 24)


def test_damaged_pixels_are_still_refused() -> None:
    with pytest.raises(MediaInvalid):
        decode_picture(encoded("JPEG", exif=exif_of([turned(6)]))[:-200], MANY)
