from __future__ import annotations

import base64
import io
import ipaddress
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import httpx
import pytest
from PIL import Image

from services.router.fetch import IPAddress, UrlFetcher, is_public
from services.router.image_header import ImageHeader
from services.router.media import Fetch, MediaLimits, MediaReader, MediaReference
from triptych.core.errors import InvalidRequest, MediaInvalid, PayloadTooLarge


def png(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


def uri(data: bytes) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(data).decode()


@asynccontextmanager
async def reader(fetch: Fetch | None = None) -> AsyncIterator[MediaReader]:
    limits = MediaLimits(max_items=3, max_bytes=10_000, max_pixels=1_000_000)
    with ThreadPoolExecutor(2) as executor:
        before = Image.MAX_IMAGE_PIXELS
        try:
            yield MediaReader(limits, executor, fetch)
        finally:
            Image.MAX_IMAGE_PIXELS = before


async def read(*uris: str, fetch: Fetch | None = None) -> list[ImageHeader]:
    async with reader(fetch) as media:
        references = [MediaReference(one, f"messages.{number}") for number, one in enumerate(uris)]
        return [one.header for one in await media.read_all(references)]


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
    with pytest.raises(MediaInvalid, match="--allow-url-fetch") as caught:
        await read(url)
    assert "example" not in caught.value.message


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://x/y", "/etc/passwd", "", "javascript:1", "blob:x"])
async def test_other_schemes_are_refused_always(url: str) -> None:
    async def fetch(url: str, param: str) -> bytes:
        raise AssertionError("fetched")

    with pytest.raises(MediaInvalid, match="data: URI"):
        await read(url, fetch=fetch)


PUBLIC = ipaddress.ip_address("93.184.216.34")
Handler = Callable[[httpx.Request], httpx.Response]


async def fetch(url: str, handler: Handler, *addresses: IPAddress, max_bytes: int = 100) -> bytes:
    async def resolve(host: str, port: int) -> list[IPAddress]:
        return list(addresses or (PUBLIC,))

    async with httpx.AsyncClient(transport=httpx.MockTransport(handler)) as client:
        return await UrlFetcher(client, max_bytes, resolve)(url, "messages.0")


async def test_the_connection_goes_to_the_address_that_was_checked() -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, stream=httpx.ByteStream(b"picture"))

    assert await fetch("https://pictures.example:8443/a?b=c", handler) == b"picture"
    (request,) = seen
    assert str(request.url) == f"https://{PUBLIC}:8443/a?b=c"
    assert request.headers["host"] == "pictures.example:8443"
    assert request.extensions["sni_hostname"] == "pictures.example"
    assert request.headers["accept-encoding"] == "identity"


SPECIAL = (
    "127.0.0.1 0.0.0.0 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 224.0.0.1 240.0.0.1 255.255.255.255 "
    "192.0.0.9 ::1 :: fe80::1 fc00::1 ff02::1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 64:ff9b::7f00:1 2002:7f00:1::1"
).split()


@pytest.mark.parametrize("address", SPECIAL)
async def test_special_addresses_are_refused(address: str) -> None:
    bad = ipaddress.ip_address(address)
    assert not is_public(bad)
    for addresses in ((bad,), (PUBLIC, bad)):
        with pytest.raises(MediaInvalid, match="not public") as caught:
            await fetch("http://rebinding.example/", lambda request: httpx.Response(200), *addresses)
        assert address not in caught.value.message


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1::1", "8.8.8.8"])
def test_public_addresses(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "url",
    [
        "http://user:pw@example.com/",
        "http:///x",
        "http://" + "a" * 9000,
        "http://exa mple.com/",
        "http://[::1",
        "http://\\@x",
    ],
)
async def test_odd_urls_are_refused(url: str) -> None:
    with pytest.raises(MediaInvalid):
        await fetch(url, lambda request: httpx.Response(500))


@pytest.mark.parametrize("status", [301, 302, 307, 404, 500, 204])
async def test_only_a_200_counts_and_no_redirect_is_followed(status: int) -> None:
    answer = httpx.Response(status, headers={"location": "http://127.0.0.1/"})
    with pytest.raises(MediaInvalid, match=str(status)):
        await fetch("http://example.com/", lambda request: answer)


async def test_bodies_are_bounded_and_never_unpacked() -> None:
    with pytest.raises(PayloadTooLarge):
        await fetch("http://example.com/", lambda request: httpx.Response(200, stream=httpx.ByteStream(bytes(101))))
    packed = httpx.Response(200, headers={"content-encoding": "gzip"}, stream=httpx.ByteStream(b"x"))
    with pytest.raises(MediaInvalid):
        await fetch("http://example.com/", lambda request: packed)


async def test_a_failed_connection_tells_nothing() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("10.0.0.1 refused")

    with pytest.raises(MediaInvalid, match="cannot be fetched") as caught:
        await fetch("http://example.com/", handler)
    assert "10.0" not in caught.value.message
