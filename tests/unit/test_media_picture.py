"""Encoded pictures to upright RGB, against Pillow's own conversions where they are right."""

from __future__ import annotations

import io
import re
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from triptych.core.errors import MediaInvalid
from triptych.media.picture import decode_picture

MANY = 10**8
ORIENTATION = 0x0112


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:  # noqa: A002 - Pillow's word
    out = io.BytesIO()
    image.save(out, format=format, **options)
    return out.getvalue()


def drawn(width: int = 24, height: int = 16) -> Image.Image:
    """No two pixels alike, no symmetry."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    return Image.fromarray(np.stack([x * 10, y * 15, x * 3 + y * 7], axis=-1).astype(np.uint8))


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image)


def decode(media: bytes) -> Image.Image:
    image = decode_picture(media, MANY)
    assert image.mode == "RGB"
    return image


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_every_orientation_is_turned_upright(orientation: int, format: str) -> None:  # noqa: A002
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    media = encoded(drawn(), format, exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(media)))
    assert np.array_equal(pixels(decode(media)), pixels(expected.convert("RGB")))
    assert decode(media).size == ((24, 16) if orientation < 5 else (16, 24))


def test_the_orientations_are_all_different() -> None:
    turned = []
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        turned.append(decode(encoded(drawn(), exif=exif)).tobytes())
    assert len(set(turned)) == 8


@pytest.mark.parametrize("orientation", [0, 9, 255])
def test_an_orientation_that_does_not_exist_changes_nothing(orientation: int) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    assert np.array_equal(pixels(decode(encoded(drawn(), exif=exif))), pixels(drawn()))


def test_damaged_exif_is_no_crash() -> None:
    media = encoded(drawn(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xffgarbage")
    assert np.array_equal(pixels(decode(media)), pixels(Image.open(io.BytesIO(encoded(drawn(), "JPEG")))))


@pytest.mark.parametrize("mode", ["1", "L", "CMYK", "YCbCr"])
def test_other_colour_spaces_become_rgb(mode: str) -> None:
    media = encoded(drawn().convert(mode), "JPEG" if mode in ("CMYK", "YCbCr") else "PNG")
    assert np.array_equal(pixels(decode(media)), pixels(Image.open(io.BytesIO(media)).convert("RGB")))


def test_cmyk_black_is_black_and_no_ink_is_white() -> None:
    image = Image.new("CMYK", (16, 8), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (8, 0, 16, 8))
    decoded = pixels(decode(encoded(image, "JPEG", quality=100)))
    assert decoded[4, 2].min() > 245
    assert decoded[4, 13].max() < 10


def test_transparency_is_flattened_on_white() -> None:
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 255, 0))
    assert pixels(decode(encoded(image))).tolist() == [[[255, 0, 0], [255, 255, 255]]]


def test_half_transparency_is_blended() -> None:
    decoded = pixels(decode(encoded(Image.new("RGBA", (1, 1), (0, 0, 0, 128)))))
    assert decoded.tolist() == [[[127, 127, 127]]]


def test_grey_with_alpha_is_flattened_on_white() -> None:
    image = Image.new("LA", (2, 1), (40, 255))
    image.putpixel((1, 0), (40, 0))
    assert pixels(decode(encoded(image))).tolist() == [[[40, 40, 40], [255, 255, 255]]]


@pytest.mark.parametrize("format", ["PNG", "GIF"])
def test_a_palettes_transparent_colour_is_white(format: str) -> None:  # noqa: A002
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putpixel((1, 0), 1)
    decoded = pixels(decode(encoded(image, format, transparency=1)))
    assert decoded.tolist() == [[[10, 20, 30], [255, 255, 255]]]


def test_a_transparent_colour_of_an_rgb_picture_is_white() -> None:
    image = Image.new("RGB", (2, 1), (1, 2, 3))
    image.putpixel((1, 0), (9, 9, 9))
    decoded = pixels(decode(encoded(image, transparency=(9, 9, 9))))
    assert decoded.tolist() == [[[255, 255, 255] if spot else [1, 2, 3] for spot in (0, 1)]]


def test_16_bit_grey_is_scaled_and_not_clipped() -> None:
    values = np.array([[0, 257, 32_768, 65_535], [256, 514, 1_000, 60_000]], dtype="<u2")
    decoded = pixels(decode(encoded(Image.frombytes("I;16", (4, 2), values.tobytes()))))
    expected = (values.astype(np.uint32) // 257).astype(np.uint8)
    assert np.array_equal(decoded, np.repeat(expected[..., None], 3, axis=-1))
    assert expected.max() == 255


@pytest.mark.parametrize("format", ["TIFF", "ICO", "TGA", "PPM"])
def test_what_the_router_never_lets_through_is_not_tried(format: str) -> None:  # noqa: A002
    with pytest.raises(MediaInvalid):
        decode(encoded(drawn(), format))


def test_an_animation_is_its_first_frame() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    media = encoded(frames[0], "PNG", save_all=True, append_images=frames[1:])
    assert pixels(decode(media))[0, 0].tolist() == [255, 0, 0]


DAMAGED = {
    "nothing": b"",
    "text": b"this is no picture",
    "a header alone": encoded(drawn(), "PNG")[:40],
    "half a JPEG": encoded(drawn(200, 200), "JPEG")[:1_500],
    "a JPEG without its last kilobyte": encoded(drawn(200, 200), "JPEG")[:-1_000],
    "half a progressive JPEG": encoded(drawn(200, 200), "JPEG", progressive=True)[:1_500],
    "half a PNG": encoded(drawn(200, 200), "PNG")[:300],
    "half a WebP": encoded(drawn(200, 200), "WEBP")[:300],
    "half a GIF": encoded(drawn(200, 200), "GIF")[:300],
    "half a TIFF": encoded(drawn(200, 200), "TIFF")[:300],
    "a damaged PNG": encoded(drawn(200, 200), "PNG").replace(b"IDAT", b"IDAT\0", 1),
}


@pytest.mark.parametrize("media", DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_media_are_refused_and_the_decoder_is_not_quoted(media: bytes) -> None:
    with pytest.raises(MediaInvalid) as caught:
        decode_picture(media, MANY)
    assert not re.search(r"0x|object at|BytesIO|/|\bPIL\b", caught.value.message)


def test_a_picture_larger_than_allowed_is_refused_before_its_pixels_are_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    media = encoded(Image.new("1", (3_000, 3_000)))
    monkeypatch.setattr(Image.Image, "load", lambda _: pytest.fail("the pixels were decoded"))
    with pytest.raises(MediaInvalid, match="pixels"):
        decode_picture(media, 8_999_999)
