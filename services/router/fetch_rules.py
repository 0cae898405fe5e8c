"""Where pictures may be fetched from: public addresses, but for what the settings say. Pure.

An entry of a list is a host's name (`cdn.example.com`), all names below one (`*.example.com`), an address or a network
(`10.1.2.3`, `10.1.0.0/16`, `[fd00::]`, `[fd00::/8]`), and each may name its port (`10.1.2.3:9000`).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from services.router.public_addresses import IPAddress, IPNetwork, is_public, is_within, unmapped
from triptych.core.errors import StartupError

# Below this, servers speak other protocols than HTTP, and some take a request for a command.
FIRST_FREE_PORT: Final = 1024
_WEB_PORTS: Final = frozenset({80, 443})

_ENTRY: Final = re.compile(r"(\[[^\]]+\]|[^:\[\]]+)(?::([0-9]{1,5}))?")
_NAME: Final = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")


@dataclass(frozen=True, slots=True)
class Entry:
    """Either a name or a network; `port` None is any."""

    name: str | None
    network: IPNetwork | None
    port: int | None

    @classmethod
    def parse(cls, text: str, setting: str) -> Entry:
        """Raises StartupError, naming the setting."""
        match = _ENTRY.fullmatch(text.strip().lower())
        if match is None:
            raise _not_an_entry(text, setting)
        host, port = match[1].strip("[]"), int(match[2]) if match[2] else None
        try:
            return cls(None, ipaddress.ip_network(host), port)
        except ValueError:
            if not _NAME.fullmatch(host) or host.rpartition(".")[2].isdecimal():
                raise _not_an_entry(text, setting) from None
        return cls(host, None, port)

    def has_name(self, host: str, port: int) -> bool:
        if self.name is None or self.port not in (None, port):
            return False
        return host.endswith(self.name[1:]) if self.name.startswith("*.") else host == self.name

    def has_address(self, address: IPAddress, port: int) -> bool:
        return self.network is not None and self.port in (None, port) and is_within(address, self.network)


@dataclass(frozen=True, slots=True)
class FetchRules:
    """`deny` wins over all; of `only`, when it names any, a place must be; `allow` excuses from being public."""

    only: tuple[Entry, ...] = ()
    allow: tuple[Entry, ...] = ()
    deny: tuple[Entry, ...] = ()

    @classmethod
    def parse(cls, only: Iterable[str], allow: Iterable[str], deny: Iterable[str]) -> FetchRules:
        """Raises StartupError for what is no entry."""
        named = {"fetch_only": only, "fetch_allow": allow, "fetch_deny": deny}
        return cls(*(tuple(Entry.parse(text, name) for text in texts) for name, texts in named.items()))

    def may_look_up(self, host: str, port: int) -> bool:
        """Whether the name may be asked for at all; its addresses are looked at afterwards."""
        if _any_name(self.deny, host, port):
            return False
        by_address = any(entry.network is not None for entry in self.only)
        return not self.only or by_address or _any_name(self.only, host, port)

    def may_connect(self, host: str, port: int, address: IPAddress) -> bool:
        """Whether this address may be connected to for that host."""
        address = unmapped(address)
        if _any(self.deny, host, port, address) or (self.only and not _any(self.only, host, port, address)):
            return False
        return self.is_excused(host, port, address) or (_is_for_the_web(port) and is_public(address))

    def is_excused(self, host: str, port: int, address: IPAddress) -> bool:
        """Whether the settings say that it need not be public."""
        return _any(self.allow, host, port, unmapped(address))


def _is_for_the_web(port: int) -> bool:
    return port in _WEB_PORTS or port >= FIRST_FREE_PORT


def _any(entries: Iterable[Entry], host: str, port: int, address: IPAddress) -> bool:
    return any(entry.has_name(host, port) or entry.has_address(address, port) for entry in entries)


def _any_name(entries: Iterable[Entry], host: str, port: int) -> bool:
    return any(entry.has_name(host, port) for entry in entries)


def _not_an_entry(text: str, setting: str) -> StartupError:
    return StartupError(
        f"the setting {setting} has {text!r}, which is no host, address or network; "
        "write cdn.example.com, *.example.com, 10.1.2.3, 10.1.0.0/16 or [fd00::/8], each with or without :PORT"
    )
