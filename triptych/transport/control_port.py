"""The receiving end of control sockets: one Unix-domain socket per process, for the senders of this host.

    connection --> same user? (SO_PEERCRED) --> knock: a session that waits, its key? --> the session's from now on
                         '------------------------------'--> closed and counted

A session waits from the answer to its greeting on, which came over gRPC and so from one who has the cluster's token.
Its key opens once.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import socket as sockets
from collections.abc import Callable
from pathlib import Path
from typing import Final

from triptych.core.errors import StartupError
from triptych.obs import metrics
from triptych.transport.control_wire import CONTROL_KEY_BYTES, KNOCK, KNOCK_MAGIC, WELCOME, FrameWire
from triptych.transport.types import ControlAddress

KNOCK_TIMEOUT_S: Final = 5.0
MAX_STRANGERS: Final = 64
"""Connections that have not knocked yet. Whoever comes then is closed."""


class ControlPort:
    """Owner of the listening socket and of the connections that no session has taken yet.

    Raises:
        StartupError: from `open`, when it cannot listen at `path`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: dict[int, tuple[bytes, Callable[[FrameWire], None]]] = {}
        self._strangers: dict[FrameWire, asyncio.TimerHandle] = {}
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        socket = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
        try:
            socket.bind(str(self._path))
            self._path.chmod(0o600)  # before it listens
            self._server = await asyncio.get_running_loop().create_unix_server(self._stranger, sock=socket)
        except OSError as error:
            socket.close()
            raise StartupError(
                f"control frames cannot be taken at {self._path}: {os.strerror(error.errno or 0)};"
                " choose another --runtime-dir"
            ) from error

    def expect(self, session: int, joined: Callable[[FrameWire], None]) -> ControlAddress:
        """What the sender is told. `joined` is called, at most once, with the connection that shows it."""
        key = secrets.token_bytes(CONTROL_KEY_BYTES)
        self._waiting[session] = (key, joined)
        return ControlAddress(str(self._path), key)

    def forget(self, session: int) -> None:
        """Nobody is let in for it any more."""
        self._waiting.pop(session, None)

    async def close(self) -> None:
        """Idempotent. Connections that a session has taken are the session's."""
        for wire in list(self._strangers):
            wire.close()
        self._waiting.clear()
        if self._server is not None:
            self._server.close()
            self._server = None
        self._path.unlink(missing_ok=True)

    def _stranger(self) -> FrameWire:
        wire = FrameWire(lambda frame: self._knocked(wire, frame), lambda: self._gone(wire), KNOCK.size)
        loop = asyncio.get_running_loop()
        patience_s = KNOCK_TIMEOUT_S if len(self._strangers) < MAX_STRANGERS else 0.0
        self._strangers[wire] = loop.call_later(patience_s, wire.close)
        return wire

    def _knocked(self, wire: FrameWire, frame: bytes) -> None:
        joined = self._admitted(frame)
        if joined is None:
            wire.close()
            return
        self._strangers.pop(wire).cancel()
        joined(wire)
        wire.write(WELCOME)

    def _admitted(self, frame: bytes) -> Callable[[FrameWire], None] | None:
        if len(frame) != KNOCK.size:
            return None
        magic, session, key = KNOCK.unpack(frame)
        waiting = self._waiting.get(session)
        if magic != KNOCK_MAGIC or waiting is None or not hmac.compare_digest(key, waiting[0]):
            return None
        del self._waiting[session]
        return waiting[1]

    def _gone(self, wire: FrameWire) -> None:
        timer = self._strangers.pop(wire, None)
        if timer is not None:
            timer.cancel()
            metrics.DATA_FRAMES_DROPPED.labels("unauthenticated").inc()
