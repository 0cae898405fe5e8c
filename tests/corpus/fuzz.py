"""Pictures with something changed, by a seed: what becomes of each is what Pillow alone makes of it."""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Iterator

from PIL import Image

from tests.corpus.sample import Sample
from tests.corpus.taken import taken

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 100_000_000
MAX_RATIO = 200


def fuzzed(seed: int, count: int) -> Iterator[Sample]:
    """Changed bytes, cuts, pieces left out, said twice, or of another picture. EXIF is left alone: where it is damaged
    we read more of it than Pillow does."""
    rng = random.Random(seed)
    good = [one.data for one in taken() if one.kind not in ("EXIF orientation", "size") and len(one.data) < 20_000]
    for number in range(count):
        data = _changed(rng, bytearray(rng.choice(good)), rng.choice(good))
        yield Sample(f"fuzz {seed}/{number}", "fuzz", data, *_outcome(data))


def _changed(rng: random.Random, data: bytearray, other: bytes) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.choice((rng.randrange(len(data)), rng.randrange(min(64, len(data)))))
        end = min(len(data), at + rng.choice((1, 4, 100)))
        match rng.randrange(6):
            case 0 | 1:
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                data[at:end] = bytes([rng.choice((0, 0x7F, 0x80, 0xFF))]) * (end - at)
            case 3:
                del data[at:end]
            case 4:
                data[at:at] = data[at:end]
            case _:
                data[at:end] = other[at:end]
        data = data or bytearray(b"x")
    return bytes(data)


def _outcome(data: bytes) -> tuple[int, Image.Image | None]:
    shown = seen(data)
    return (200, shown) if shown is not None else (400, None)


def seen(data: bytes) -> Image.Image | None:
    """What Pillow alone shows of it, in the sizes that are taken; None for what is damaged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
                if width * height > MAX_PIXELS or max(width, height) > MAX_RATIO * min(width, height):
                    return None
                image.load()
                return _flat(image)
        except Exception:
            return None


def _flat(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        return image.point(lambda value: value / 257).convert("L").convert("RGB")
    if "A" not in image.getbands() and "transparency" not in image.info:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    white = Image.new("RGBA", rgba.size, "white")
    white.alpha_composite(rgba)
    return white.convert("RGB")
