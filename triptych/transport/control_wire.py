"""Control frames of one session by a Unix-domain socket: for two processes of one host, in place of the stream that the
greeting came by. Both ends, without what the frames mean.

    u32 length, little-endian | that many bytes

The first frame of the sender is its *knock*: the session's number and key, which the receiver told it in the greeting's
answer. The receiver's first is empty: it was let in. All others are protobuf messages (`transfer.proto`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket as sockets
import stat
import struct
from collections.abc import Callable
from typing import Final, cast

from triptych.core.errors import DeadlineExceeded, PeerLost, TransferRefused
from triptych.rpc.server import MAX_MESSAGE_BYTES
from triptych.transport.wakefulness import Wakefulness

CONNECT_TIMEOUT_S: Final = 4.0
CONTROL_KEY_BYTES: Final = 16
KNOCK: Final = struct.Struct("<4sQ16s")
KNOCK_MAGIC: Final = b"TPC\x01"
WELCOME: Final = b""
# As many are taken in one turn of the event loop: a flood must not keep it from anything else.
FRAMES_A_TURN: Final = 32
_LENGTH: Final = struct.Struct("<I")
_UCRED: Final = struct.Struct("3i")

_log = logging.getLogger(__name__)


class FrameWire(asyncio.Protocol):
    """Owner of one connection.

    Attributes:
        take: called with each whole frame. What it raises ends the connection.
        lost: called once when the connection is over, whoever ended it.
        wakefulness: tell it when the peer's next frame ought to come at once.
        max_frame_bytes: a longer frame ends the connection before it is read.
    """

    def __init__(
        self, take: Callable[[bytes], None], lost: Callable[[], None], max_frame_bytes: int = MAX_MESSAGE_BYTES
    ) -> None:
        self.take = take
        self.lost = lost
        self.max_frame_bytes = max_frame_bytes
        self.wakefulness = Wakefulness()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._is_paused = False
        self._room = asyncio.Event()
        self._room.set()

    @property
    def has_room(self) -> bool:
        """Whether what is written now leaves at once, or soon; else wait for `drained`."""
        return self._room.is_set()

    def write(self, frame: bytes) -> None:
        """After the connection is lost, to nobody."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(_LENGTH.pack(len(frame)) + frame)

    async def drained(self) -> None:
        """Returns when the peer reads, or is lost."""
        await self._room.wait()

    def close(self) -> None:
        """Idempotent. What was written and has not left is dropped: whoever closes says nothing more."""
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio's side ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if peer_uid(self._transport) != os.getuid():
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self.wakefulness.heard()
        self._buffer += data
        self._deliver()

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._room.set()
        self._buffer.clear()
        self.lost()

    def _deliver(self) -> None:
        transport = self._transport
        assert transport is not None
        for _ in range(FRAMES_A_TURN):
            if transport.is_closing():
                return
            frame = self._next_frame(transport)
            if frame is None:
                self._go_on_reading(transport)
                return
            self.take(frame)
        if not self._is_paused:
            self._is_paused = True
            transport.pause_reading()
        asyncio.get_running_loop().call_soon(self._deliver_rest)

    def _deliver_rest(self) -> None:
        """In a turn of its own, where the loop would only log what a taker raises, and nobody read on."""
        try:
            self._deliver()
        except Exception:
            _log.exception("a frame could not be taken, and its connection is closed")
            self.close()

    def _go_on_reading(self, transport: asyncio.Transport) -> None:
        if self._is_paused:
            self._is_paused = False
            transport.resume_reading()

    def _next_frame(self, transport: asyncio.Transport) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self.max_frame_bytes:
            transport.abort()
            return None
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        frame = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return frame


def peer_uid(transport: asyncio.BaseTransport) -> int | None:
    """The user that the other end ran as when it connected; None where the kernel does not say."""
    socket = transport.get_extra_info("socket")
    if socket is None:
        return None
    raw = socket.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _UCRED.size)
    return int(_UCRED.unpack(raw)[1])


async def knock(path: str, session: int, key: bytes) -> FrameWire:
    """A connection that the receiver let in; set its `take` and `lost` before anything else is awaited.

    Raises TransferRefused when there is no such socket of this user, or nobody opens.
    """
    check_socket(path)
    opened: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    wire = FrameWire(lambda frame: _resolve(opened, frame), lambda: _resolve(opened, None), KNOCK.size)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await asyncio.get_running_loop().create_unix_connection(lambda: wire, path)
            wire.write(KNOCK.pack(KNOCK_MAGIC, session, key))
            if await opened != WELCOME:
                raise TransferRefused("the receiver's control socket answers in another language")
    except (OSError, PeerLost, DeadlineExceeded, TimeoutError) as error:
        wire.close()
        raise TransferRefused("the receiver's control socket cannot be reached from here") from error
    except BaseException:
        wire.close()
        raise
    wire.max_frame_bytes = MAX_MESSAGE_BYTES
    return wire


def check_socket(path: str) -> None:
    """Raises TransferRefused unless it is a socket of this user that others cannot reach."""
    try:
        found = os.lstat(path)
    except OSError as error:
        raise TransferRefused("the receiver's socket is not on this host") from error
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise TransferRefused("the receiver's socket belongs to someone else")


def _resolve(opened: asyncio.Future[bytes], frame: bytes | None) -> None:
    if opened.done():
        return
    if frame is None:
        opened.set_exception(PeerLost("the receiver's control socket was closed"))
    else:
        opened.set_result(frame)
