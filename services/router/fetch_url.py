"""The address of a picture, taken apart once: what is checked is what is connected to. Pure.

Nothing but this reads an address, and it takes less than a browser does: where two readers could disagree (a backslash,
a user name, a number that stands for an address, a character that only looks like a dot) there is nothing to read.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, urljoin

from services.router.public_addresses import IPAddress
from triptych.core.errors import MediaInvalid

MAX_URL_CHARS: Final = 8192
DEFAULT_PORTS: Final = {"http": 80, "https": 443}

_SHAPE: Final = re.compile(r"(https?)://([^/?#]+)([^#]*)(?:#.*)?", re.IGNORECASE)
_FORBIDDEN: Final = re.compile(r"[\x00-\x1f\x7f\\]")
_AUTHORITY: Final = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?")
_LABEL: Final = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
# What a resolver may take for a number: decimal, octal or hexadecimal.
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
_MAX_HOST_CHARS: Final = 253
# Kept as they are in a path or query; all else is escaped.
_IN_TARGET: Final = "/?:@!$&'()*+,;=-._~%[]"


@dataclass(frozen=True, slots=True)
class FetchUrl:
    """`host`: a name in lower case, or an IP address as Python writes it; `target`: path and query."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def netloc(self) -> str:
        """Host and port as the header `host` has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def address(self) -> IPAddress | None:
        """When the host is one."""
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"{self.scheme}://{self.netloc}{self.target}"


def parse_fetch_url(text: str, param: str) -> FetchUrl:
    """Raises MediaInvalid for all but a plain http(s) URL."""
    shape = _SHAPE.fullmatch(text) if len(text) <= MAX_URL_CHARS and not _FORBIDDEN.search(text) else None
    authority = _AUTHORITY.fullmatch(shape[2].lower()) if shape else None
    if shape is None or authority is None:
        raise MediaInvalid(
            "the picture's URL is not a plain http(s) URL: scheme, host in ASCII, no user name", param=param
        )
    scheme = shape[1].lower()
    port = int(authority[2] or DEFAULT_PORTS[scheme])
    if not 0 < port < 65536:
        raise MediaInvalid("the picture's URL has a port that does not exist", param=param)
    return FetchUrl(scheme, _host(authority[1], param), port, _target(shape[3]))


def redirected(url: FetchUrl, location: str, param: str) -> FetchUrl:
    """Where a redirect leads. Raises MediaInvalid for what is no plain URL, and for https that would become http."""
    there = parse_fetch_url(urljoin(str(url), location), param)
    if url.scheme == "https" and there.scheme == "http":
        raise MediaInvalid("the picture's URL leads from https to http", param=param)
    return there


def _host(text: str, param: str) -> str:
    try:
        if text.startswith("["):
            return str(ipaddress.IPv6Address(text[1:-1]))
        labels = text.removesuffix(".").split(".")
        if _NUMBER.fullmatch(labels[-1]):
            return str(ipaddress.IPv4Address(text))  # four decimal numbers without leading zeros, or nothing
        if len(text) > _MAX_HOST_CHARS or not all(_LABEL.fullmatch(label) for label in labels):
            raise ValueError
    except ValueError:
        raise MediaInvalid("the picture's URL has a host that is neither a name nor an address", param=param) from None
    return ".".join(labels)


def _target(text: str) -> str:
    return quote(text if text.startswith("/") else f"/{text}", safe=_IN_TARGET)
