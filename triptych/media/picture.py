"""Encoded picture bytes -> an upright RGB picture of the size that the tower takes, the same on every encoder.

Runs in a media process: what decodes here was sent by anybody.
"""

from __future__ import annotations

import io
import warnings

import numpy as np
import numpy.typing as npt
from PIL import Image

from triptych.core.errors import MediaInvalid
from triptych.media.formats import PILLOW_FORMATS
from triptych.media.frames import Target
from triptych.media.orientation import upright

WHITE = (255, 255, 255, 255)


def decode_picture(media: bytes | bytearray, max_pixels: int) -> Image.Image:
    """Decodes the first frame fully, applies the EXIF orientation, flattens transparency on white.

    Raises MediaInvalid for anything truncated, damaged or larger than `max_pixels`; the message never quotes the
    decoder, whose texts may hold addresses.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(media), formats=PILLOW_FORMATS)
            if image.width * image.height > max_pixels:
                raise MediaInvalid(f"the picture has more than {max_pixels} pixels; send a smaller one")
            image.load()
            return _to_rgb(upright(image))
    except MediaInvalid:
        raise
    except MemoryError as error:
        raise MediaInvalid("the picture takes too much memory to decode; send a smaller one") from error
    except Exception as error:
        raise MediaInvalid("the picture is damaged or cut short and cannot be decoded") from error


def fit(image: Image.Image, target: Target) -> npt.NDArray[np.uint8]:
    """(height, width, 3) of the target's size, as the processor's own first step makes it."""
    try:
        return np.asarray(image.resize((target.width_px, target.height_px), resample=target.resample))
    except MemoryError as error:
        raise MediaInvalid("the picture takes too much memory to resize; send a smaller one") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode in ("I;16", "I;16L", "I;16B", "I;16N", "I"):
        return _scale_deep_grey(image)
    if "A" in image.getbands() or "transparency" in image.info:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, WHITE), rgba).convert("RGB")
    return image.convert("RGB")


def _scale_deep_grey(image: Image.Image) -> Image.Image:
    """16-bit grey, scaled to 8 bits; Pillow's own conversion clips."""
    values = np.asarray(image, dtype=np.uint32)
    return Image.fromarray((values // 257).clip(0, 255).astype(np.uint8), mode="L").convert("RGB")
