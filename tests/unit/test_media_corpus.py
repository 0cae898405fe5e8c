"""The corpus of media against the page that promises what becomes of each, and against a media process as encoders
run them: confined, with a filter of system calls. What is right was made with the picture, or is Pillow's decoding."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
from PIL import Image, ImageFile

from services.router.data_uri import decode_data_uri
from services.router.image_header import read_image_header
from tests.corpus.fuzz import fuzzed
from tests.corpus.refused import refused
from tests.corpus.sample import Sample
from tests.corpus.taken import taken
from tests.corpus.wrappings import PICTURE, WRAPPINGS
from triptych.core.errors import TriptychError
from triptych.media import picture
from triptych.media.frames import Limits, Target
from triptych.media.process import Confinement, Decoded, MediaProcess

# As the router does: of each oddity Pillow warns.
pytestmark = pytest.mark.filterwarnings(r"ignore:::PIL\.")
PAGE = Path(__file__).parents[2] / "docs" / "media.md"
ROW = re.compile(r"^\| ([^|]+) \| (\d{3}) \| (?:`(\w+)`)? ?\| .*\|$", re.MULTILINE)
MAX_PIXELS, MAX_BYTES = 100_000_000, 20 << 20
TARGET = Target(56, 28, int(Image.Resampling.BICUBIC))
# Composing on white rounds once more here than the formula does.
ROUNDED = {"transparency": 1}
IS_FULL = os.environ.get("TRIPTYCH_VERIFY") == "full"
SEEDS = range(100) if IS_FULL else (0,)


class Decoder(Protocol):
    def decode(self, media: bytes, target: Target, limits: Limits, give_up_at: float) -> Decoded: ...


@cache
def corpus() -> tuple[Sample, ...]:
    return (*taken(), *refused())


@pytest.fixture(scope="module")
def process() -> Iterator[MediaProcess]:
    with ThreadPoolExecutor(1) as thread:  # it ends with the thread that started it
        made = thread.submit(MediaProcess, Confinement(1 << 30, 0)).result()
        assert made.await_start(time.monotonic() + 30)
        yield made
        assert made.end() == 0, "it has outlived all that was sent to it"


def become(sample: Sample, process: Decoder) -> str:
    """What the router's look at its header and a media process make of it, when it is not what was promised."""
    status, code, pixels = 200, None, None
    try:
        if len(sample.data) > MAX_BYTES:
            return ""  # its size alone decides, and where it is counted is tested there
        header = read_image_header(sample.data, MAX_PIXELS, "messages.0")
        decoded = process.decode(sample.data, TARGET, Limits(MAX_PIXELS, 20), time.monotonic() + 30)
        if (decoded.width_px, decoded.height_px) != (header.width_px, header.height_px):
            return f"is {decoded.width_px}x{decoded.height_px} and was said to be {header}"
        pixels = decoded.pixels
    except TriptychError as error:
        status, code = error.http_status, error.code
        if re.search(r"0x[0-9a-f]{4}|/tmp|/usr|PIL|Errno", error.message):
            return f"tells {error.message}"
    if status != sample.status and not (sample.kind == "fuzz" and {status, sample.status} == {400, 415}):
        return f"{status} {code}, not {sample.status}"
    return "" if pixels is None else _unlike(pixels, sample)


def _unlike(pixels: np.ndarray, sample: Sample) -> str:
    assert sample.shown is not None
    right = np.asarray(sample.shown.resize((TARGET.width_px, TARGET.height_px), TARGET.resample))
    off = int(np.abs(pixels.astype(int) - right).max())
    return "" if off <= ROUNDED.get(sample.kind, 0) else f"is off by {off}"


def wrong(samples: tuple[Sample, ...], process: Decoder) -> dict[str, str]:
    found = {sample.name: become(sample, process) for sample in samples}
    return {name: fault for name, fault in found.items() if fault}


def test_the_page_promises_what_the_corpus_expects() -> None:
    table = {kind.strip(): int(status) for kind, status, _ in ROW.findall(PAGE.read_text().partition("## From")[0])}
    expected = {(one.kind, one.status) for one in (*corpus(), *WRAPPINGS)}
    assert len(expected) == len(dict(expected)), "one status for each kind"
    assert dict(expected) == table


def test_the_corpus_is_the_same_each_time_and_names_each_sample_once() -> None:
    assert [hashlib.sha256(one.data).digest() for one in (*taken(), *refused())] == [
        hashlib.sha256(one.data).digest() for one in corpus()
    ]
    names = [one.name for one in corpus()]
    assert len(names) == len(set(names)) > 180
    assert all((one.shown is None) == (one.status != 200) for one in corpus())


def test_each_becomes_what_was_promised_within_the_filter(process: MediaProcess) -> None:
    pid = process.pid
    assert wrong(corpus(), process) == {}
    assert process.pid == pid


@pytest.mark.timeout(1800 if IS_FULL else 60)
@pytest.mark.parametrize("seed", SEEDS)
def test_changed_pictures_become_what_pillow_alone_makes_of_them(seed: int, process: MediaProcess) -> None:
    assert wrong(tuple(fuzzed(seed, 100)), process) == {}


@pytest.mark.parametrize("name", [one.name for one in WRAPPINGS if one.uri[:5].lower() == "data:"])
def test_data_uris(name: str) -> None:
    """What is cut short in the right place holds a header still, and is refused when it is decoded."""
    wrapping = next(one for one in WRAPPINGS if one.name == name)
    try:
        data = decode_data_uri(wrapping.uri, MAX_BYTES, "p")
        read_image_header(data, MAX_PIXELS, "p")
        status = 200 if data == PICTURE else 400
    except TriptychError as error:
        status = error.http_status
    assert status == wrapping.status


# --- decoders that are wrong ------------------------------------------------------------------------------------------


class Here:
    """A decoder in this process, for builds of it that are wrong."""

    def decode(self, media: bytes, target: Target, limits: Limits, give_up_at: float) -> Decoded:
        image = picture.decode_picture(media, limits.max_pixels)
        return Decoded(picture.fit(image, target), *image.size)


def _second_frame(image: Image.Image) -> Image.Image:
    if getattr(image, "n_frames", 1) > 1:
        image.seek(1)
    return image


STOCK_RGB = picture._to_rgb
FAULTS: dict[str, tuple[str, Any, str]] = {
    "nothing is turned": ("triptych.media.picture.upright", lambda image: image, "JPEG turned 6"),
    "transparency is left out": ("triptych.media.picture._to_rgb", lambda image: image.convert("RGB"), "PNG RGBA"),
    "black behind it": ("triptych.media.picture.WHITE", (0, 0, 0, 255), "PNG that is all clear"),
    "deep grey is clipped": (
        "triptych.media.picture._scale_deep_grey",
        lambda image: image.convert("L").convert("RGB"),
        "PNG L, 16 bits",
    ),
    "another frame": ("triptych.media.picture._to_rgb", lambda image: STOCK_RGB(_second_frame(image)), "animated GIF"),
    "cut pictures are decoded": ("PIL.ImageFile.LOAD_TRUNCATED_IMAGES", True, "JPEG, nine tenths"),
    "colours the wrong way round": (
        "triptych.media.picture.fit",
        lambda image, target: FIT(image, target)[..., ::-1],
        "BMP from the top down",
    ),
}
FIT = picture.fit


def test_the_decoder_itself_is_right() -> None:
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False
    assert wrong(corpus(), Here()) == {}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_decoder_that_is_wrong_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, value, name = FAULTS[fault]
    monkeypatch.setattr(target, value)
    (sample,) = (one for one in corpus() if one.name == name)
    assert become(sample, Here())
