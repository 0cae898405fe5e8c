"""A fetcher among names and networks of the tests: a name server that says what it is told, and a network in which
every address is one local server, and which notes who was called."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpcore

from services.router.fetch import FetchLimits, UrlFetcher
from services.router.fetch_rules import FetchRules
from services.router.media_allowance import MediaAllowance
from services.router.public_addresses import IPAddress
from tests.picture_server import PictureServer, serving_pictures

PUBLIC = "93.184.216.34"
GOOD = "good.example"


@dataclass
class Names:
    """The answers of each name, one after another, the last for ever. What looks like a number is one, as it is to
    the C library; `asked` is what was looked up."""

    answers: dict[str, list[list[str]]]
    asked: list[str] = field(default_factory=list)

    async def __call__(self, host: str, port: int) -> list[IPAddress]:
        self.asked.append(host)
        known = self.answers.get(host)
        if known:
            found = known.pop(0) if len(known) > 1 else known[0]
        else:
            found = [_as_number(host)]
        return [ipaddress.ip_address(text) for text in found]


def _as_number(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return socket.inet_ntoa(socket.inet_aton(host))  # OSError for a name, as from a resolver


class Network(httpcore.AsyncNetworkBackend):
    """Every address leads to the same server; `called` are the addresses that were."""

    def __init__(self, port: int) -> None:
        self.called: list[tuple[str, int]] = []
        self._port = port
        self._real = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        self.called.append((host, port))
        return await self._real.connect_tcp("127.0.0.1", self._port, timeout)


@dataclass
class House:
    fetcher: UrlFetcher
    names: Names
    network: Network
    server: PictureServer
    held: list[int] = field(default_factory=list)

    async def fetch(self, url: str, max_request_bytes: int = 10**9, fetch_s: float = 20.0) -> bytes:
        allowance = MediaAllowance(max_request_bytes, fetch_s, self.held.append)
        return await self.fetcher(url, allowance, "messages.0")


@asynccontextmanager
async def house(
    names: Mapping[str, list[list[str]]] | None = None,
    rules: FetchRules | None = None,
    max_bytes: int = 100_000,
    timeout_s: float = 10.0,
) -> AsyncIterator[House]:
    """`good.example` is public unless the names say otherwise."""
    async with serving_pictures() as server:
        known = Names({GOOD: [[PUBLIC]], **(names or {})})
        network = Network(server.port)
        fetcher = UrlFetcher(rules or FetchRules(), FetchLimits(max_bytes, timeout_s), known, network)
        try:
            yield House(fetcher, known, network, server)
        finally:
            await fetcher.close()
            await asyncio.sleep(0)
