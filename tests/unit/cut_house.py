"""A connection that is cut after any number of bytes."""

from __future__ import annotations

import asyncio


class CuttingProxy:
    """Forwards to a port on loopback. The first connection is cut after `num_bytes` from the sender (None: never);
    `num_passed` counts those."""

    def __init__(self, port: int, num_bytes: int | None) -> None:
        self._target = port
        self._left = num_bytes
        self.is_cut = False
        self.num_passed = 0
        self._pipes: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> int:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for pipe in list(self._pipes):
            pipe.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)
        await self._server.wait_closed()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        pipes = {asyncio.create_task(self._forth(reader, back)), asyncio.create_task(_back(there, writer))}
        self._pipes |= pipes
        await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
        for pipe in pipes:
            pipe.cancel()
        for stream in (writer, back):
            stream.close()

    async def _forth(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 if not self.is_cut else 65536):
            if not self.is_cut and self._left is not None and self.num_passed == self._left:
                self.is_cut = True
                return
            self.num_passed += 0 if self.is_cut else 1
            writer.write(data)


async def _back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
