"""Fetching pictures from addresses that anybody may name.

There is one way to a socket, and it is guarded: a host is resolved once, each of its addresses is held against the
rules, and the connection goes to one that was; so it is with each redirect. No proxy is used, no body is unpacked, no
connection is used twice, and bytes, seconds and fetches are counted: of one URL, of one request, of all together.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import httpcore

from services.router.data_uri import too_large
from services.router.fetch_rules import FetchRules
from services.router.fetch_url import FetchUrl, parse_fetch_url, redirected
from services.router.media_allowance import MediaAllowance
from services.router.public_addresses import IPAddress
from services.router.resolver import Resolve, is_this_machine
from triptych.core.errors import MediaInvalid, Overloaded, PayloadTooLarge, TriptychError
from triptych.obs import metrics

MAX_FETCHES: Final = 32
MAX_REDIRECTS: Final = 3
# Of a host with many, so that those that do not answer take no more than the time there is.
MAX_ADDRESSES_TRIED: Final = 2
CONNECT_S: Final = 4.0
# Headers and the seams of a chunked body, over what the body itself may have.
_OVERHEAD_BYTES: Final = 1 << 20

_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_OK: Final = 200
_HEADERS: Final = (
    ("accept", "image/*,*/*;q=0.8"),
    ("accept-encoding", "identity"),
    ("connection", "close"),
    ("user-agent", "triptych"),
)


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Of one URL, its redirects included."""

    max_bytes: int
    timeout_s: float


class Forbidden(Exception):
    """The rules do not let us connect there."""


class TooManyBytes(Exception):
    """More has come over the wire than any answer may have."""


class UrlFetcher:
    """Owner of the connections, until `close`."""

    def __init__(
        self,
        rules: FetchRules,
        limits: FetchLimits,
        resolve: Resolve,
        network: httpcore.AsyncNetworkBackend | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """`resolve`: the addresses of a host, or OSError. `network`: connects to an address; this machine's network if
        there is none. `ssl_context`: the usual authorities if there is none."""
        self._limits = limits
        wire_bytes = limits.max_bytes + limits.max_bytes // 4 + _OVERHEAD_BYTES
        self._turns = asyncio.Semaphore(MAX_FETCHES)
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=ssl_context,
            max_connections=MAX_FETCHES,
            max_keepalive_connections=0,
            network_backend=_GuardedNetwork(rules, resolve, network or httpcore.AnyIOBackend(), wire_bytes),
        )

    async def close(self) -> None:
        await self._pool.aclose()

    async def __call__(self, url: str, allowance: MediaAllowance, param: str) -> bytes:
        """The body behind an http(s) URL.

        Raises:
            MediaInvalid: forbidden, unreachable, too slow, or no answer with a body.
            PayloadTooLarge: more bytes than one medium, or one request, may have.
            Overloaded: more than the router holds for all requests, or too many fetches before this one.
        """
        start = asyncio.get_running_loop().time()
        try:
            body = await self._guarded(parse_fetch_url(url, param), allowance, param)
        except TriptychError as error:
            metrics.MEDIA_FETCHES.labels(_outcome(error)).inc()
            raise
        metrics.MEDIA_FETCHES.labels("fetched").inc()
        metrics.MEDIA_FETCH_SECONDS.observe(asyncio.get_running_loop().time() - start)
        return body

    async def _guarded(self, url: FetchUrl, allowance: MediaAllowance, param: str) -> bytes:
        """In its turn and its time, with errors that tell nothing of where it led."""
        try:
            async with asyncio.timeout_at(allowance.fetch_until), allowance.turn, self._turn():
                async with asyncio.timeout(self._limits.timeout_s):
                    return await self._follow(url, allowance, param)
        except TimeoutError:
            raise MediaInvalid("the picture's URL did not answer in time", param=param) from None
        except Forbidden:
            raise MediaInvalid(
                "the picture's URL leads to an address that this server may not fetch", param=param
            ) from None
        except TooManyBytes:
            raise too_large(self._limits.max_bytes, param) from None
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError, OSError):
            raise MediaInvalid("the picture's URL cannot be fetched", param=param) from None

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """One of the fetches of all requests. Raises Overloaded when none is free in time."""
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                await self._turns.acquire()
        except TimeoutError:
            raise Overloaded("too many pictures are being fetched right now; try again later") from None
        try:
            yield
        finally:
            self._turns.release()

    async def _follow(self, url: FetchUrl, allowance: MediaAllowance, param: str) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            async with self._pool.stream("GET", _requested(url), headers=_headers(url)) as response:
                if response.status not in _REDIRECTS:
                    return await self._read(response, allowance, param)
                location = _header(response, b"location")
            url = redirected(url, location, param)
        raise MediaInvalid(f"the picture's URL leads on more than {MAX_REDIRECTS} times", param=param)

    async def _read(self, response: httpcore.Response, allowance: MediaAllowance, param: str) -> bytes:
        if response.status != _OK:
            raise MediaInvalid(f"the picture's URL answered {response.status}", param=param)
        if _header(response, b"content-encoding").lower() not in ("", "identity"):
            raise MediaInvalid("the picture's URL answered with a packed body", param=param)
        length = _header(response, b"content-length")
        if length.isdecimal() and int(length) > self._limits.max_bytes:
            raise too_large(self._limits.max_bytes, param)
        body = bytearray()
        async for piece in response.aiter_stream():
            allowance.count_fetched(len(piece), param)
            body += piece
            if len(body) > self._limits.max_bytes:
                raise too_large(self._limits.max_bytes, param)
        metrics.MEDIA_FETCH_BYTES.inc(len(body))
        return bytes(body)


class _GuardedNetwork(httpcore.AsyncNetworkBackend):
    """Where all connections of the pool come from: it cannot be told to connect without being asked whether it may."""

    def __init__(
        self, rules: FetchRules, resolve: Resolve, network: httpcore.AsyncNetworkBackend, max_bytes: int
    ) -> None:
        self._rules = rules
        self._resolve = resolve
        self._max_bytes = max_bytes
        self._network = network

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Raises Forbidden, OSError, or what httpcore raises."""
        last: Exception | None = None
        for address in (await self._permitted(host, port))[:MAX_ADDRESSES_TRIED]:
            try:
                stream = await self._network.connect_tcp(str(address), port, CONNECT_S)
                return _CountedStream(stream, self._max_bytes)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                last = error
        raise last or Forbidden

    async def _permitted(self, host: str, port: int) -> list[IPAddress]:
        """All addresses of the host. Raises Forbidden when one among them is not allowed: who mixes them is up to
        something."""
        if not self._rules.may_look_up(host, port):
            raise Forbidden
        addresses = await self._resolve(host, port)
        if not addresses or not all(self._may_connect(host, port, address) for address in addresses):
            raise Forbidden
        return addresses

    def _may_connect(self, host: str, port: int, address: IPAddress) -> bool:
        if not self._rules.may_connect(host, port, address):
            return False
        return self._rules.is_excused(host, port, address) or not is_this_machine(address, port)

    async def connect_unix_socket(self, *args: object, **options: object) -> httpcore.AsyncNetworkStream:
        raise Forbidden

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _CountedStream(httpcore.AsyncNetworkStream):
    """Counts what is read, of everything: headers, seams of chunks, and what is no HTTP at all."""

    def __init__(self, stream: httpcore.AsyncNetworkStream, left_bytes: int) -> None:
        self._stream = stream
        self._left_bytes = left_bytes

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = await self._stream.read(max_bytes, timeout)
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise TooManyBytes
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.AsyncNetworkStream:
        inner = await self._stream.start_tls(ssl_context, server_hostname, timeout)
        return _CountedStream(inner, self._left_bytes)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _outcome(error: TriptychError) -> str:
    match error, error.__context__:
        case PayloadTooLarge(), _:
            return "too_large"
        case Overloaded(), _:
            return "overloaded"
        case _, Forbidden():
            return "forbidden"
        case _, TimeoutError():
            return "late"
    return "failed"


def _requested(url: FetchUrl) -> httpcore.URL:
    """By its parts: nothing reads it again."""
    return httpcore.URL(scheme=url.scheme, host=url.host, port=url.port, target=url.target)


def _headers(url: FetchUrl) -> list[tuple[bytes | str, bytes | str]]:
    return [("host", url.netloc), *_HEADERS]


def _header(response: httpcore.Response, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in response.headers if key.lower() == name), "")
