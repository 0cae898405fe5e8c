"""What is not taken, and with which status."""

from __future__ import annotations

import base64
import gzip
import io
import struct
import zipfile
import zlib
from collections.abc import Iterator

import numpy as np

from tests.corpus import png
from tests.corpus.drawing import SIZE, drawn, noise
from tests.corpus.sample import Sample, encoded


def refused() -> Iterator[Sample]:
    yield Sample("no bytes", "nothing", b"", 400)
    yield from _cut_short()
    yield from _damaged()
    yield from _too_large()
    yield from _without_pixels()
    yield from _too_thin()
    yield from _endless()
    yield from _other_formats()
    yield Sample("21 MiB", "too many bytes", encoded(drawn(), "PNG") + bytes(21 << 20), 413)


def _cut_short() -> Iterator[Sample]:
    options = {"PNG": {}, "JPEG": {}, "WEBP": {"lossless": True}, "GIF": {}, "BMP": {}}
    for format, more in options.items():  # noqa: A001 - Pillow's word
        data = encoded(noise(SIZE, 1), format, **more)
        for name, size in {"half": len(data) // 2, "nine tenths": len(data) * 9 // 10, "a head": 40}.items():
            yield Sample(f"{format}, {name}", "cut short", data[:size], 400)
    data = encoded(noise(SIZE, 2), "JPEG", progressive=True)
    yield Sample("JPEG progressive, half", "cut short", data[: len(data) // 2], 400)


def _damaged() -> Iterator[Sample]:
    kind, values = "damaged", np.asarray(drawn())
    good = png.plain(values, png.RGB)
    at = good.index(b"IDAT") + 20
    yield Sample("PNG, a bit of its pixels", kind, good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :], 400)
    head, body = png.header(*SIZE), png.pixels(values)
    yield Sample("PNG, size without its checksum", kind, good[:19] + b"\x99" + good[20:], 400)
    yield Sample("PNG that is no deflate", kind, png.file(head, png.chunk(b"IDAT", b"\x78\x9c" + bytes(900))), 400)
    yield Sample("PNG without pixels", kind, png.file(head), 400)
    yield Sample("PNG without a head", kind, png.file(png.chunk(b"IDAT", body)), 400)
    yield Sample("PNG of an unknown kind", kind, png.file(png.header(84, 60, 8, 5), png.chunk(b"IDAT", body)), 400)
    yield Sample("PNG of three bits", kind, png.file(png.header(84, 60, 3, 0), png.chunk(b"IDAT", body)), 400)
    jpeg = encoded(noise(SIZE, 3), "JPEG")
    tables = jpeg.index(b"\xff\xdb")
    yield Sample("JPEG without tables", kind, jpeg[:tables] + jpeg[jpeg.index(b"\xff\xc0") :], 400)
    yield Sample("JPEG, only a start", kind, b"\xff\xd8\xff\xe0" + bytes(100), 400)
    yield Sample("JPEG of five channels", kind, _with_channels(jpeg, 5), 400)
    yield Sample("WebP that is nonsense", kind, b"RIFF\x40\0\0\0WEBPVP8 \x34\0\0\0" + b"\x55" * 52, 400)
    gif = encoded(drawn().quantize(8), "GIF")
    start = gif.index(b",", 13 + 24)
    yield Sample("GIF without pixels", kind, gif[:start] + b";", 400)
    bmp = bytearray(encoded(drawn(), "BMP"))
    bmp[28] = 7
    yield Sample("BMP of seven bits", kind, bytes(bmp), 400)


def _with_channels(jpeg: bytes, number: int) -> bytes:
    at = jpeg.index(b"\xff\xc0") + 9
    return jpeg[:at] + bytes([number]) + jpeg[at + 1 :]


def _too_large() -> Iterator[Sample]:
    kind = "too many pixels"
    for side in (10_001, 12_000, 65_535):
        rows = zlib.compress(bytes(1000))
        yield Sample(f"PNG {side}x{side}", kind, png.file(png.header(side, side), png.chunk(b"IDAT", rows)), 400)
    huge = png.file(png.header(2**31 - 1, 2**31 - 1), png.chunk(b"IDAT", b""))
    yield Sample("PNG of 2^31 squared", kind, huge, 400)
    gif = encoded(drawn().quantize(8), "GIF")
    yield Sample("GIF 65535x65535", kind, gif[:6] + struct.pack("<HH", 65_535, 65_535) + gif[10:], 400)
    bmp = encoded(drawn(), "BMP")
    yield Sample("BMP 2^31 wide", kind, bmp[:18] + struct.pack("<ii", 2**31 - 1, 2**31 - 1) + bmp[26:], 400)
    jpeg = encoded(drawn(), "JPEG")
    at = jpeg.index(b"\xff\xc0") + 5
    yield Sample("JPEG 65500x65500", kind, jpeg[:at] + struct.pack(">HH", 65_500, 65_500) + jpeg[at + 4 :], 400)


def _without_pixels() -> Iterator[Sample]:
    kind, body = "no pixels", png.chunk(b"IDAT", png.pixels(np.asarray(drawn())))
    yield Sample("PNG 0x60", kind, png.file(png.header(0, 60), body), 400)
    yield Sample("PNG 84x0", kind, png.file(png.header(84, 0), body), 400)
    bmp = encoded(drawn(), "BMP")
    yield Sample("BMP 0x0", kind, bmp[:18] + bytes(8) + bmp[26:], 400)


def _too_thin() -> Iterator[Sample]:
    for size in ((1, 201), (201, 1), (3, 4000)):
        yield Sample(f"{size[0]}x{size[1]}", "too thin", encoded(drawn(size), "PNG"), 400)


def _endless() -> Iterator[Sample]:
    kind, body = "a header of too many parts", png.chunk(b"IDAT", png.pixels(np.asarray(drawn())))
    parts = png.chunk(b"tEXt", b"a\0b") * 70_000
    yield Sample("PNG of 70,000 texts", kind, png.file(png.header(*SIZE), parts, body), 400)
    jpeg = encoded(drawn(), "JPEG")
    yield Sample("JPEG of 70,000 comments", kind, jpeg[:2] + b"\xff\xfe\x00\x02" * 70_000 + jpeg[2:], 400)
    bomb = zlib.compress(bytes(20 << 20), 6)
    for name, chunk in {"zTXt": b"a\0\0" + bomb, "iTXt": b"a\0\1\0\0\0" + bomb, "iCCP": b"a\0\0" + bomb}.items():
        data = png.file(png.header(*SIZE), png.chunk(name.encode(), chunk), body)
        yield Sample(f"PNG, {name} of 20 MiB", "metadata that swells", data, 400)


def _other_formats() -> Iterator[Sample]:
    kind, image = "another format", drawn()
    for format in ("TIFF", "ICO", "PPM", "TGA", "JPEG2000", "EPS", "ICNS", "DDS", "SGI", "PCX", "AVIF"):  # noqa: A001
        yield Sample(format, kind, encoded(image, format), 415)
    ftyp = b"\0\0\0\x18ftyp"
    for name, brand in {"HEIC": b"heic", "HEIF": b"mif1", "MP4": b"isom", "MOV": b"qt  "}.items():
        yield Sample(name, kind, ftyp + brand + bytes(4) + brand + b"mif1" + bytes(200), 415)
    svg = '<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
    yield Sample("SVG", kind, svg.encode(), 415, media_type="image/svg+xml")
    entity = f'<?xml version="1.0"?><!DOCTYPE svg [<!ENTITY x SYSTEM "file:///etc/passwd">]>{svg}'
    yield Sample("SVG with an entity", kind, entity.encode(), 415, media_type="image/svg+xml")
    texts = {
        "HTML": b"<!doctype html><html><body>404</body></html>",
        "plain text": b"this is no picture at all",
        "JSON": b'{"error": "not found"}',
        "a shell script": b"#!/bin/sh\nrm -rf /tmp/canary\n",
        "PostScript that runs": b"%!PS\n(%pipe%touch /tmp/canary) (w) file\n",
        "ImageMagick's own": b"push graphic-context\nfill 'url(https://x/\"|touch \"/tmp/canary)'\n",
        "a pickle": b"cos\nsystem\n(S'touch /tmp/canary'\ntR.",
        "XPM": b'/* XPM */\nstatic char *a[] = {"1 1 1 1", "a c #fff", "a"};',
        "JPEG XL": b"\xff\x0a" + bytes(60),
        "Photoshop": b"8BPS\0\1" + bytes(60),
        "WAV": b"RIFF\x24\0\0\0WAVEfmt " + bytes(60),
        "Matroska": b"\x1aE\xdf\xa3" + bytes(60),
        "MP3": b"ID3\4" + bytes(60),
        "ELF": b"\x7fELF\2\1\1" + bytes(60),
        "zeros": bytes(1000),
        "one byte": b"\x89",
        "a PNG's first half of a name": b"\x89PNG",
        "a PNG with a byte before it": b"\0" + encoded(image, "PNG"),
        "a PNG whose line ends were changed": encoded(image, "PNG").replace(b"\r\n", b"\n"),
        "random bytes": np.random.default_rng(5).bytes(5000),
        "PDF": b"%PDF-1.4\n1 0 obj\n<< /Type /Catalog >>\nendobj\n%%EOF",
        "a packed PNG": gzip.compress(encoded(image, "PNG"), mtime=0),
        "a PDF with a PNG in it": b"%PDF-1.7\n" + encoded(image, "PNG"),
        "a ZIP with a PNG in it": _zip(encoded(image, "PNG")),
        "a PNG in base64": base64.b64encode(encoded(image, "PNG")),
    }
    for name, data in texts.items():
        yield Sample(name, kind, data, 415)
    mng = b"\x8aMNG\r\n\x1a\n" + bytes(60)
    yield Sample("MNG", kind, mng, 415)


def _zip(data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(zipfile.ZipInfo("picture.png"), data)
    return out.getvalue()
