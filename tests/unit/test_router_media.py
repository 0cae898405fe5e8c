from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest
from PIL import Image

from services.router.image_header import ImageHeader
from services.router.media import Fetch, MediaLimits, MediaReader, MediaReference
from services.router.media_allowance import MediaAllowance
from triptych.core.errors import InvalidRequest, MediaInvalid, PayloadTooLarge

MAX_REQUEST_BYTES = 15_000


def png(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


def uri(data: bytes) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(data).decode()


@asynccontextmanager
async def reader(fetch: Fetch | None = None) -> AsyncIterator[MediaReader]:
    limits = MediaLimits(3, max_bytes=10_000, max_pixels=1_000_000, max_request_bytes=MAX_REQUEST_BYTES, fetch_s=5.0)
    with ThreadPoolExecutor(2) as executor:
        before = Image.MAX_IMAGE_PIXELS
        try:
            yield MediaReader(limits, executor, fetch)
        finally:
            Image.MAX_IMAGE_PIXELS = before


async def read(*uris: str, fetch: Fetch | None = None) -> list[ImageHeader]:
    async with reader(fetch) as media:
        references = [MediaReference(one, f"messages.{number}") for number, one in enumerate(uris)]
        return [one.header for one in await media.read_all(references, lambda _: None)]


async def test_in_order_and_by_content() -> None:
    assert await read(uri(png(3, 4)), uri(png(5, 6))) == [ImageHeader(3, 4), ImageHeader(5, 6)]
    assert await read() == []


async def test_one_bad_item_fails_the_request_and_is_named() -> None:
    with pytest.raises(MediaInvalid) as caught:
        await read(uri(png(3, 4)), uri(b"\x89PNG\r\n\x1a\nbroken"))
    assert caught.value.param == "messages.1"


async def test_too_many_items() -> None:
    with pytest.raises(InvalidRequest, match="4 pictures"):
        await read(*[uri(png(1, 1))] * 4)


@pytest.mark.parametrize("url", ["http://example.com/a.png", "HTTPS://example.com/a.png"])
async def test_addresses_are_refused_unless_switched_on(url: str) -> None:
    with pytest.raises(MediaInvalid, match="does not fetch URLs") as caught:
        await read(url)
    assert "example" not in caught.value.message


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://x/y", "/etc/passwd", "", "javascript:1", "blob:x"])
async def test_other_schemes_are_refused_always(url: str) -> None:
    async def fetch(url: str, allowance: MediaAllowance, param: str) -> bytes:
        raise AssertionError("fetched")

    with pytest.raises(MediaInvalid, match="data: URI"):
        await read(url, fetch=fetch)


async def test_what_a_request_sends_is_counted_together() -> None:
    bulky = png(3, 4) + bytes(7_000)
    assert await read(uri(bulky), uri(bulky)) == [ImageHeader(3, 4)] * 2
    with pytest.raises(PayloadTooLarge, match=f"together may have at most {MAX_REQUEST_BYTES}"):
        await read(uri(bulky), uri(bulky), uri(bulky))
