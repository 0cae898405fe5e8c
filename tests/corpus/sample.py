"""One medium of the corpus, and what is promised for it."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

from PIL import Image


@dataclass(frozen=True, slots=True)
class Sample:
    """`kind` is its row in docs/media.md. `shown`: what a person sees in it, RGB and upright; None where there is
    nothing to see, and then `status` is an error. `media_type` is what its sender declares."""

    name: str
    kind: str
    data: bytes
    status: int = 200
    shown: Image.Image | None = None
    media_type: str = "image/png"


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:  # noqa: A002 - Pillow's word
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def stored(data: bytes) -> Image.Image:
    """What Pillow alone makes of a picture that nothing has to be done for, but for RGB: of a lossy one, too."""
    with Image.open(io.BytesIO(data)) as image:
        return image.convert("RGB")
