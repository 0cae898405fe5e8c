"""The receiving end of `zmq-ipc` and `zmq-tcp`: one socket per process, whose frames land in the arenas.

    connection --> key of a living session? (zmq_gate.py)
    data frame --> header right? --> its session known? key? --> its grant open? in order? --> written
                        '--------------------'--------------------------'--> dropped and counted

Nothing that comes in is ever unpickled, decoded as text or answered. A frame that is not taken costs its sender the
transfer, and nobody else anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket as sockets
from pathlib import Path
from typing import Final

import zmq
import zmq.asyncio

from triptych.core.address import is_loopback
from triptych.core.errors import StartupError
from triptych.obs import metrics
from triptych.transport.curve import CURVE_OVERHEAD_BYTES, CurveKeys
from triptych.transport.data_frame import MAX_PAYLOAD_BYTES, SESSION_KEY_BYTES, BadFrame, unpack
from triptych.transport.frames import MAX_SOCKET_PATH_BYTES
from triptych.transport.landings import LandingSession
from triptych.transport.types import DataAddress
from triptych.transport.zmq_gate import Gate

# Messages that may wait in this process, a connection; each at most a header and MAX_PAYLOAD_BYTES.
RECEIVE_HIGH_WATER: Final = 16
HANDSHAKE_TIMEOUT_MS: Final = 5_000

_log = logging.getLogger(__name__)


class DataPort:
    """Owner of the process's data socket and of the landing sessions behind it.

    Args:
        host, port: where to listen by TCP; port 0 takes a free one, None none.
        socket_path: where to listen for the senders of this host; None: nowhere.
        keys: with them what comes by TCP is encrypted (CURVE), from senders that named a key of theirs.
        insecure_network: without it and without `keys`, a host beyond loopback is refused.

    Raises:
        StartupError: from `open`, when it may not or cannot listen there.
    """

    def __init__(
        self,
        host: str,
        port: int | None,
        socket_path: Path | None,
        *,
        keys: CurveKeys | None = None,
        insecure_network: bool = False,
    ) -> None:
        if not is_loopback(host) and keys is None and not insecure_network:
            raise StartupError(
                f"refusing to take data on {host}: it is not encrypted. Give --tls-cert, --tls-key and --tls-ca, listen"
                " on 127.0.0.1, or pass --insecure-network when the network itself is trusted"
            )
        self._keys = keys
        self._senders: dict[int, bytes] = {}
        self._host = host
        self._port = port
        self._socket_path = socket_path
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._reader: asyncio.Task[None] | None = None
        self._gate: Gate | None = None
        self._sessions: dict[int, LandingSession] = {}

    @property
    def address(self) -> DataAddress:
        """Without a session's key."""
        return DataAddress(str(self._socket_path or ""), self._port or 0, curve_key=self._curve_key)

    @property
    def _curve_key(self) -> bytes:
        return b"" if self._keys is None else self._keys.public

    async def open(self) -> None:
        self._gate = Gate(self._context, self._key_of, self._has_sender)
        socket = self._context.socket(zmq.PULL)
        self._socket = socket
        socket.plain_server = True
        socket.zap_domain = b"triptych"
        socket.linger = 0
        socket.rcvhwm = RECEIVE_HIGH_WATER
        socket.maxmsgsize = MAX_PAYLOAD_BYTES
        socket.handshake_ivl = HANDSHAKE_TIMEOUT_MS
        try:
            # Options hold for what is bound after them: the host's socket stays as it is, where TCP is encrypted.
            if self._socket_path is not None:
                _bind_path(socket, self._socket_path)
            if self._keys is not None:
                _encrypt(socket, self._keys)
            if self._port is not None:
                self._port = self._bind_tcp(socket, self._port)
        except BaseException:
            await self.close()
            raise
        self._reader = asyncio.create_task(self._read(socket), name="transfer-data")
        self._reader.add_done_callback(_tell_if_failed)

    def open_session(self, session_id: int, curve_key: bytes = b"") -> LandingSession:
        """A session whose frames are taken from now on, until `close_session`. `curve_key` is the sender's
        public one."""
        if curve_key:
            self._senders[session_id] = curve_key
        session = self._sessions[session_id] = LandingSession(secrets.token_bytes(SESSION_KEY_BYTES))
        return session

    def close_session(self, session_id: int) -> None:
        self._senders.pop(session_id, None)
        session = self._sessions.pop(session_id, None)
        if session is not None:
            session.close()

    async def close(self) -> None:
        """Idempotent. Senders see that nothing takes their frames."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        for session_id in list(self._sessions):
            self.close_session(session_id)
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None
        if self._gate is not None:
            await self._gate.close()
            self._gate = None
        self._context.destroy(linger=0)
        if self._socket_path is not None:
            self._socket_path.unlink(missing_ok=True)

    def _key_of(self, session_id: int) -> bytes | None:
        session = self._sessions.get(session_id)
        return None if session is None else session.session_key

    def _has_sender(self, curve_key: bytes) -> bool:
        return curve_key in self._senders.values()

    def _bind_tcp(self, socket: zmq.asyncio.Socket, port: int) -> int:
        host = _numeric(self._host)
        socket.ipv6 = ":" in host
        shown = f"[{host}]" if ":" in host else host
        try:
            socket.bind(f"tcp://{shown}:{port or '*'}")
        except zmq.ZMQError as error:
            raise StartupError(
                f"data cannot be taken on port {port} of {self._host}: {error.strerror};"
                " choose another --data-port or stop what uses it"
            ) from error
        return int(str(socket.getsockopt_string(zmq.LAST_ENDPOINT)).rpartition(":")[2])

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            parts = await socket.recv_multipart(copy=False)
            try:
                self._land([part.buffer for part in parts])
            except BadFrame as bad:
                metrics.DATA_FRAMES_DROPPED.labels(bad.reason).inc()
            except Exception:
                metrics.DATA_FRAMES_DROPPED.labels("internal").inc()
                _log.exception("a data frame could not be landed")
            await asyncio.sleep(0)  # a flood of frames must not keep the loop from anything else

    def _land(self, parts: list[memoryview]) -> None:
        if len(parts) != 2:
            raise BadFrame("malformed")
        header = unpack(parts[0], parts[1])
        session = self._sessions.get(header.session)
        if session is None:
            raise BadFrame("unknown_session")
        session.take(header, parts[1])


def _tell_if_failed(reader: asyncio.Task[None]) -> None:
    """Without it no frame lands any more, and every commit says so; here is why."""
    if not reader.cancelled() and (error := reader.exception()) is not None:
        _log.error("the data socket is read no more", exc_info=error)


def data_socket_path(folder: Path, worker_id: str) -> Path | None:
    """Where a worker's data socket stands, a new name each time; None when the system takes no path as long as that."""
    path = folder / f"{worker_id}.{secrets.token_hex(4)}.sock"
    return path if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES else None


def sweep_dead_sockets(folder: Path, worker_id: str) -> list[str]:
    """Removes the sockets that dead processes of that worker left; answers their names."""
    swept = []
    for path in sorted(folder.glob(f"{worker_id}.*.sock")):
        if path.name.count(".") == worker_id.count(".") + 2 and not _is_listening(path):
            path.unlink(missing_ok=True)
            swept.append(path.name)
    return swept


def _is_listening(path: Path) -> bool:
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True  # it is busy, or not ours to judge
    return True


def _encrypt(socket: zmq.asyncio.Socket, keys: CurveKeys) -> None:
    socket.curve_secretkey = keys.secret
    socket.curve_server = True
    socket.maxmsgsize = MAX_PAYLOAD_BYTES + CURVE_OVERHEAD_BYTES  # it is counted on the wire; `unpack` counts again


def _bind_path(socket: zmq.asyncio.Socket, path: Path) -> None:
    try:
        socket.bind(f"ipc://{path}")
        path.chmod(0o600)
    except (zmq.ZMQError, OSError) as error:
        raise StartupError(
            f"data cannot be taken at {path}: {error.strerror}; choose another --runtime-dir, or --transport zmq-tcp"
        ) from error


def _numeric(host: str) -> str:
    """The address that a name stands for: ZMQ binds no names."""
    with contextlib.suppress(OSError):
        return str(sockets.getaddrinfo(host, None, type=sockets.SOCK_STREAM)[0][4][0])
    return host
