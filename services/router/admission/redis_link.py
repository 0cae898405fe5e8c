"""One connection to a Redis, for short commands of many requests at once: what is asked goes out at once, and replies
come in the order of the commands, so that one who gives up waiting leaves nothing behind for the next.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

Reply = int | bytes | None | list["Reply"]
Argument = str | int | float | bytes

MAX_REPLY_BYTES: Final = 2**16
MAX_REPLY_ENTRIES: Final = 1024
MAX_REPLY_DEPTH: Final = 4
_DEFAULT_PORT: Final = 6379


class RedisRefused(Exception):
    """It answered with an error; `kind` is its first word, as NOSCRIPT."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Where one listens, and who asks. Exactly one of `host` and `path` is there."""

    host: str = ""
    port: int = _DEFAULT_PORT
    path: str = ""
    database: int = 0
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None


def parse_address(url: str, password: str | None, ca_file: Path | None) -> RedisAddress:
    """`redis://USER:PASSWORD@HOST:PORT/DATABASE`, `rediss://` the same over TLS, `unix:///PATH`. `password` counts
    before the URL's. Raises ValueError or OSError, whose words may quote the URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss", "unix") or parts.query or parts.fragment:
        raise ValueError("no URL of a Redis")
    user, known = unquote(parts.username or ""), unquote(parts.password or "") if password is None else password
    if parts.scheme == "unix":
        if parts.hostname or not parts.path:
            raise ValueError("a socket needs its path")
        return RedisAddress(path=unquote(parts.path), user=user, password=known)
    if not parts.hostname:
        raise ValueError("a host is missing")
    database = parts.path.strip("/") or "0"
    if not database.isdecimal() or len(database) > 5:
        raise ValueError("a database is a number")
    tls = ssl.create_default_context(cafile=ca_file) if parts.scheme == "rediss" else None
    port = parts.port or _DEFAULT_PORT
    return RedisAddress(parts.hostname, port, "", int(database), user, known, tls)


class RedisLink:
    """Owner of a connection and of those who wait for replies on it. When it is lost all of them hear so, and so does
    whoever asks after that."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._waiting: deque[asyncio.Future[Reply]] = deque()
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def open(cls, address: RedisAddress) -> RedisLink:
        """Raises OSError, EOFError, ValueError, or RedisRefused for a password that is not the right one."""
        if address.path:
            reader, writer = await asyncio.open_unix_connection(address.path, limit=MAX_REPLY_BYTES)
        else:
            reader, writer = await asyncio.open_connection(
                address.host, address.port, ssl=address.tls, limit=MAX_REPLY_BYTES
            )
        link = cls(reader, writer)
        try:
            if address.password:
                await link.ask("AUTH", *([address.user] if address.user else []), address.password)
            if address.database:
                await link.ask("SELECT", address.database)
        except BaseException:
            link.abort()
            raise
        return link

    @property
    def is_lost(self) -> bool:
        return self._listener.done()

    async def ask(self, *command: Argument) -> Reply:
        """Raises RedisRefused, OSError when the connection is lost."""
        if self.is_lost:
            raise ConnectionResetError
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting.append(reply)
        self._writer.write(encoded(command))
        return await reply

    def abort(self) -> None:
        """Hangs up without a word. Idempotent."""
        self._listener.cancel()
        self._writer.transport.abort()

    async def _listen(self) -> None:
        try:
            while True:
                self._answer(await read_reply(self._reader))
        except (OSError, EOFError, ValueError, IndexError, asyncio.LimitOverrunError):
            return
        finally:
            self._writer.transport.abort()
            for waiting in self._waiting:
                if not waiting.done():
                    waiting.set_exception(ConnectionResetError())
                    waiting.exception()  # whoever does not wait any more need not hear it
            self._waiting.clear()

    def _answer(self, reply: Reply | RedisRefused) -> None:
        """Raises IndexError for a reply to nothing."""
        waiting = self._waiting.popleft()
        if waiting.done():
            return
        if isinstance(reply, RedisRefused):
            waiting.set_exception(reply)
        else:
            waiting.set_result(reply)


def encoded(command: Sequence[Argument]) -> bytes:
    parts = [part if isinstance(part, bytes) else str(part).encode() for part in command]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


async def read_reply(reader: asyncio.StreamReader, depth: int = 0) -> Reply | RedisRefused:
    """One reply in RESP2. Raises ValueError for what is none, or larger than any of ours; EOFError at the end."""
    line = await reader.readuntil(b"\r\n")
    kind, rest = line[:1], line[1:-2]
    if kind == b"+":
        return rest
    if kind == b"-":
        return RedisRefused(rest.split(b" ")[0].decode("ascii", "replace")[:32])
    number = int(rest)
    if kind == b":":
        return number
    if number == -1 and kind in (b"$", b"*"):
        return None
    if kind == b"$" and 0 <= number <= MAX_REPLY_BYTES:
        return (await reader.readexactly(number + 2))[:-2]
    if kind == b"*" and 0 <= number <= MAX_REPLY_ENTRIES and depth < MAX_REPLY_DEPTH:
        found = [await read_reply(reader, depth + 1) for _ in range(number)]
        return [None if isinstance(entry, RedisRefused) else entry for entry in found]
    raise ValueError("no reply of a Redis")
