"""Fetching pictures from addresses, behind `--allow-url-fetch`.

The host is resolved once, every address it resolves to must be public, and the connection goes to the address that was
checked. No redirect is followed, no proxy is used, and size and time are bounded.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable

import httpx

from services.router.data_uri import too_large
from triptych.core.errors import MediaInvalid

FETCH_TIMEOUT_S = 10.0
_MAX_URL_CHARS = 8192
_USER_AGENT = "triptych"

# Public by `is_global`, yet they lead to addresses that need not be.
_TRANSLATED = tuple(
    ipaddress.ip_network(net) for net in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "192.0.0.0/24")
)

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[list[IPAddress]]]


class UrlFetcher:
    """Fetches bodies of up to `max_bytes` over one shared client."""

    def __init__(self, client: httpx.AsyncClient, max_bytes: int, resolve: Resolve | None = None) -> None:
        self._client = client
        self._max_bytes = max_bytes
        self._resolve = resolve or resolve_host

    async def __call__(self, url: str, param: str) -> bytes:
        """Raises MediaInvalid (refused, unreachable, too slow, not a 200) or PayloadTooLarge."""
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                return await self._fetch(_parse(url, param), param)
        except TimeoutError:
            raise MediaInvalid(f"the picture's URL did not answer within {FETCH_TIMEOUT_S:g} s", param=param) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError):
            raise MediaInvalid("the picture's URL cannot be fetched", param=param) from None

    async def _fetch(self, url: httpx.URL, param: str) -> bytes:
        port = url.port or (443 if url.scheme == "https" else 80)
        addresses = await self._resolve(url.host, port)
        if not addresses or not all(map(is_public, addresses)):
            raise MediaInvalid("the picture's URL leads to an address that is not public", param=param)
        headers = {"host": url.netloc.decode("ascii"), "accept-encoding": "identity", "user-agent": _USER_AGENT}
        pinned = url.copy_with(host=str(addresses[0]))
        async with self._client.stream(
            "GET", pinned, headers=headers, extensions={"sni_hostname": url.host}, follow_redirects=False
        ) as response:
            if response.status_code != httpx.codes.OK or "content-encoding" in response.headers:
                raise MediaInvalid(f"the picture's URL answered {response.status_code}", param=param)
            return await self._read(response, param)

    async def _read(self, response: httpx.Response, param: str) -> bytes:
        body = bytearray()
        async for piece in response.aiter_raw():
            body += piece
            if len(body) > self._max_bytes:
                raise too_large(self._max_bytes, param)
        return bytes(body)


def is_public(address: IPAddress) -> bool:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    if mapped is not None:
        return is_public(mapped)
    in_translated = any(address.version == net.version and address in net for net in _TRANSLATED)
    return address.is_global and not address.is_multicast and not address.is_reserved and not in_translated


async def resolve_host(host: str, port: int) -> list[IPAddress]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [ipaddress.ip_address(entry[4][0]) for entry in found]


def new_client() -> httpx.AsyncClient:
    """`trust_env` is off: a proxy would resolve the name again."""
    return httpx.AsyncClient(trust_env=False, timeout=FETCH_TIMEOUT_S, limits=httpx.Limits(max_connections=32))


def _parse(url: str, param: str) -> httpx.URL:
    parsed = httpx.URL(url) if len(url) <= _MAX_URL_CHARS else None
    if parsed is None or parsed.scheme not in ("http", "https") or not parsed.host or parsed.userinfo:
        raise MediaInvalid("the picture's URL is not a plain http(s) URL", param=param)
    return parsed
