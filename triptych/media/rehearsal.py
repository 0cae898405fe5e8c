"""Decodes one small picture of every kind, so that all that Pillow loads when it is first needed has been loaded."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from PIL import Image, MpoImagePlugin, TiffImagePlugin

from triptych.media.frames import Target
from triptych.media.picture import decode_picture, fit

# Loaded by the JPEG plugin for pictures of some phones only.
LATE_PLUGINS = (MpoImagePlugin, TiffImagePlugin)

_SIDE_PX = 8
_ORIENTATION = 0x0112
_MODES = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "JPEG": ("L", "RGB", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("L", "P"),
    "BMP": ("1", "P", "RGB"),
}


def rehearse() -> None:
    target = Target(4, 4, int(Image.Resampling.BICUBIC))
    for media in _pictures():
        fit(decode_picture(media, _SIDE_PX * _SIDE_PX), target)


def _pictures() -> Iterator[bytes]:
    turned = Image.Exif()
    turned[_ORIENTATION] = 6
    for kind, modes in _MODES.items():
        for mode in modes:
            yield _encoded(Image.new(mode, (_SIDE_PX, _SIDE_PX)), kind)
    image = Image.new("RGB", (_SIDE_PX, _SIDE_PX))
    yield _encoded(image, "JPEG", exif=turned, progressive=True)
    yield _encoded(image, "PNG", exif=turned)
    yield _encoded(image, "MPO", save_all=True, append_images=[image])
    yield _encoded(image.convert("P"), "PNG", transparency=0)
    for kind in ("GIF", "PNG", "WEBP"):
        yield _encoded(image, kind, save_all=True, append_images=[Image.new("RGB", image.size, "red")])


def _encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()
