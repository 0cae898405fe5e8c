"""A web server on loopback that answers as it is told: pictures, redirects, and what no web server should."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field

Say = Callable[[asyncio.StreamWriter], Awaitable[None]]


def body(data: bytes, content_type: str = "image/png", status: str = "200 OK") -> Say:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {len(data)}\r\n\r\n"
    return raw(head.encode() + data)


def redirect(location: str, status: int = 302) -> Say:
    return raw(f"HTTP/1.1 {status} Elsewhere\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n".encode())


def raw(data: bytes) -> Say:
    async def say(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    return say


def endless(head: bytes, piece: bytes, pause_s: float = 0.0) -> Say:
    """Until the other side has enough."""

    async def say(writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        while not writer.is_closing():
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)

    return say


@dataclass
class PictureServer:
    """`answers[path]` says what comes; `asked` is what was asked for; `num_sent` counts the bytes that went out."""

    port: int = 0
    talking: set[asyncio.Task[None]] = field(default_factory=set)
    answers: dict[str, Say] = field(default_factory=dict)
    asked: list[bytes] = field(default_factory=list)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.talking.add(task)
        with contextlib.suppress(
            ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError
        ):
            head = await reader.readuntil(b"\r\n\r\n")
            self.asked.append(head)
            path = head.split(b" ")[1].decode()
            await self.answers.get(path, body(b"", status="404 Not Found"))(writer)
        writer.close()
        self.talking.discard(task)

    async def hang_up(self) -> None:
        for task in self.talking:
            task.cancel()
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def serving_pictures() -> AsyncIterator[PictureServer]:
    """In the loop of the caller."""
    served = PictureServer()
    server = await asyncio.start_server(served.handle, "127.0.0.1", 0)
    served.port = server.sockets[0].getsockname()[1]
    try:
        yield served
    finally:
        server.close()
        await served.hang_up()


@contextlib.contextmanager
def picture_server() -> Iterator[PictureServer]:
    """In a thread of its own."""
    served, started, stop = PictureServer(), threading.Event(), threading.Event()

    async def run() -> None:
        server = await asyncio.start_server(served.handle, "127.0.0.1", 0)
        served.port = server.sockets[0].getsockname()[1]
        started.set()
        await asyncio.to_thread(stop.wait)
        server.close()
        await served.hang_up()

    thread = threading.Thread(target=asyncio.run, args=(run(),), name="pictures")
    thread.start()
    assert started.wait(10)
    try:
        yield served
    finally:
        stop.set()
        thread.join(10)
