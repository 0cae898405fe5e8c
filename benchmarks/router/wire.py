"""HTTP/1.1 over a bare connection that stays open: enough for a load, and cheap, because it shares the cores with what
it measures."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"transfer-encoding: *chunked", re.IGNORECASE)


class BadAnswer(RuntimeError):
    """Something else than was asked for; the message has its beginning."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Seconds from sending: to the first byte of the body, and to the end. `num_reads` is how
    often bytes came."""

    first_s: float
    total_s: float
    num_reads: int
    body: bytes


class Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reply: asyncio.Future[Reply] | None = None
        self._is_lost = False

    @classmethod
    async def open(cls, url: str) -> Connection:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: cls(parts.netloc), parts.hostname, parts.port)
        return connection

    async def post(self, path: str, body: bytes) -> Reply:
        """Raises BadAnswer for any status but 200 and for a connection that breaks off."""
        if self._is_lost or self._transport is None:
            raise BadAnswer("the connection was closed")
        head = f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        self._head_end, self._first_s, self._num_reads = 0, 0.0, 0
        self._length: int | None = None
        self._buffer = bytearray()
        self._reply = self._loop.create_future()
        self._start_s = time.perf_counter()
        self._transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        return await self._reply

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(BadAnswer(f"the connection was closed in an answer: {exc}"))

    def data_received(self, data: bytes) -> None:
        if self._reply is None or self._reply.done():
            return
        self._buffer += data
        self._num_reads += 1
        if not self._head_end and not self._read_head():
            return
        if not self._first_s and len(self._buffer) > self._head_end:
            self._first_s = time.perf_counter()
        if self._is_whole():
            self._end()

    def _read_head(self) -> bool:
        self._head_end = self._buffer.find(b"\r\n\r\n") + 4
        if self._head_end < 4:
            self._head_end = 0
            return False
        head = bytes(self._buffer[: self._head_end])
        found = _LENGTH.search(head)
        if found is not None:
            self._length = int(found[1])
        elif not _CHUNKED.search(head):
            raise BadAnswer(f"an answer of no length: {head[:200]!r}")
        return True

    def _is_whole(self) -> bool:
        if self._length is None:
            return self._buffer.endswith(b"0\r\n\r\n")
        return len(self._buffer) >= self._head_end + self._length

    def _end(self) -> None:
        assert self._reply is not None
        if not self._buffer.startswith(b"HTTP/1.1 200"):
            self._reply.set_exception(BadAnswer(bytes(self._buffer[:400]).decode(errors="replace")))
            return
        now_s = time.perf_counter()
        body = bytes(self._buffer[self._head_end :])
        self._reply.set_result(Reply(self._first_s - self._start_s, now_s - self._start_s, self._num_reads, body))
