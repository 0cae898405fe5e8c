"""Names to addresses, in threads of their own: a name server that does not answer holds up nothing but pictures."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Final

from services.router.public_addresses import IPAddress

Resolve = Callable[[str, int], Awaitable[list[IPAddress]]]

MAX_LOOK_UPS: Final = 16


class Resolver:
    """Owner of the threads, until `close`."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_LOOK_UPS, thread_name_prefix="router-names")

    async def __call__(self, host: str, port: int) -> list[IPAddress]:
        """Raises OSError."""
        found = await asyncio.get_running_loop().run_in_executor(self._threads, _look_up, host, port)
        return list(dict.fromkeys(found))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def is_this_machine(address: IPAddress, port: int) -> bool:
    """Whether the address is one of this machine's own: what listens there may trust whoever is here.

    Asks the kernel how it would send there, and sends nothing.
    """
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
            probe.connect((str(address), port))
            return ipaddress.ip_address(probe.getsockname()[0]) == address
    except OSError:
        return False  # there is no way there


def _look_up(host: str, port: int) -> list[IPAddress]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a name that no encoding has
        raise OSError("not a name") from error
    return [ipaddress.ip_address(entry[4][0]) for entry in found]
