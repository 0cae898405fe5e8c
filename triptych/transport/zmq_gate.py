"""Who may connect to the data socket: only the sender of a session that lives, with its key.

By the host's socket, and by TCP without TLS, the session's key is the password (PLAIN). Under TLS, TCP is encrypted
(CURVE), and the sender is known by the key that it named in its greeting.

ZMQ asks this handler (RFC 27, ZAP) in the handshake, before it takes a single frame. So what a stranger can make this
process hold is bounded by the handshake, not by how many parts a message may have.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

import zmq
import zmq.asyncio

from triptych.obs import metrics
from triptych.transport.curve import CurveKeys

ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
WARN_EVERY_S: Final = 60.0
_VERSION: Final = b"1.0"
_PLAIN: Final = b"PLAIN"
_CURVE: Final = b"CURVE"

_log = logging.getLogger(__name__)

KeyOf = Callable[[int], bytes | None]
"""The key of a living session."""


def credentials(session: int, session_key: bytes) -> tuple[bytes, bytes]:
    """User name and password of a session's data connection."""
    return str(session).encode(), session_key.hex().encode()


class Admission(Protocol):
    """How a sender's socket shows who it is."""

    def prepare(self, socket: zmq.asyncio.Socket) -> None:
        """Before it connects."""
        ...


@dataclass(frozen=True, slots=True)
class PlainAdmission:
    session: int
    session_key: bytes = field(repr=False)

    def prepare(self, socket: zmq.asyncio.Socket) -> None:
        socket.plain_username, socket.plain_password = credentials(self.session, self.session_key)


@dataclass(frozen=True, slots=True)
class CurveAdmission:
    """Only the owner of `server_key` can read what is sent."""

    keys: CurveKeys
    server_key: bytes

    def prepare(self, socket: zmq.asyncio.Socket) -> None:
        socket.curve_serverkey = self.server_key
        socket.curve_publickey, socket.curve_secretkey = self.keys.public, self.keys.secret


class Gate:
    """Owner of the socket that ZMQ asks. `open` comes before the data socket is bound.

    `has_sender`: whether the sender of a living session named that public key.
    """

    def __init__(self, context: zmq.asyncio.Context, key_of: KeyOf, has_sender: Callable[[bytes], bool]) -> None:
        self._key_of = key_of
        self._has_sender = has_sender
        self._quiet_until = 0.0
        self._socket: zmq.asyncio.Socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(ZAP_ENDPOINT)
        self._task = asyncio.create_task(self._serve(), name="transfer-gate")

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close(0)

    async def _serve(self) -> None:
        while True:
            peer, empty, version, request_id, *rest = await self._socket.recv_multipart()
            is_welcome = version == _VERSION and self._is_welcome(rest)
            if not is_welcome:
                self._turned_away()
            status, text = (b"200", b"OK") if is_welcome else (b"400", b"no session")
            await self._socket.send_multipart([peer, empty, _VERSION, request_id, status, text, b"", b""])

    def _turned_away(self) -> None:
        metrics.DATA_FRAMES_DROPPED.labels("unauthenticated").inc()
        now = time.monotonic()
        if now >= self._quiet_until:  # whoever knocks again and again fills no log
            self._quiet_until = now + WARN_EVERY_S
            _log.warning("a connection to the data port showed no key of a session")

    def _is_welcome(self, request: list[bytes]) -> bool:
        """`request`: domain, address, identity, mechanism, and user name and password, or public key."""
        if len(request) == 5 and request[3] == _CURVE:
            return self._has_sender(request[4])
        if len(request) != 6 or request[3] != _PLAIN or not request[4].isdigit() or len(request[4]) > 20:
            return False
        key = self._key_of(int(request[4]))
        return key is not None and hmac.compare_digest(request[5], credentials(0, key)[1])
