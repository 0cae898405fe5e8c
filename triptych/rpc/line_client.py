"""The router's end of lines: one long-lived connection to each worker of this host, by which its calls go.

Where there is none (another host, a worker that offers none, one that is just being opened) calls are gRPC's own, and
look the same: `read` and `cancel`, errors and statuses.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError, Message
from grpc.aio import EOF  # type: ignore[attr-defined]

from triptych.core.errors import TransferRefused
from triptych.core.ids import WorkerRef
from triptych.core.worker import WorkerInfo
from triptych.obs import metrics
from triptych.rpc import line_frames
from triptych.rpc.client import ChannelPool, lines_stub
from triptych.rpc.errors import ERROR_METADATA_KEY
from triptych.rpc.line_frames import MAX_HEAD_BYTES, Kind, Method
from triptych.rpc.server import MAX_MESSAGE_BYTES
from triptych.rpc.tls import ClusterTls
from triptych.transport.control_wire import FrameWire, knock
from triptych.wire.v1 import lines_pb2

ADDRESS_TIMEOUT_S: Final = 5.0
REOPEN_S: Final = 1.0

_STATUSES: Final = {status.value[0]: status for status in grpc.StatusCode}
_log = logging.getLogger(__name__)


class LineCall:
    """One call, as gRPC's aio calls are: `read` until EOF, `cancel`. No other call waits for who reads this one."""

    def __init__(self, parse: Callable[[bytes], Message], cancelled: Callable[[], None], timeout_s: float) -> None:
        self._parse = parse
        self._cancelled = cancelled
        self._gathered: deque[bytes] = deque()
        self._end: tuple[grpc.StatusCode, bytes] | None = None
        self._news = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(timeout_s, self._give_up, grpc.StatusCode.DEADLINE_EXCEEDED)

    async def read(self) -> Any:
        """The next message, or EOF after the last. Raises grpc.aio.AioRpcError."""
        while not self._gathered and self._end is None:
            self._news.clear()
            await self._news.wait()
        if self._gathered:
            return self._parsed(self._gathered.popleft())
        assert self._end is not None
        status, detail = self._end
        if status is grpc.StatusCode.OK:
            return EOF
        raise _error(status, detail)

    def cancel(self) -> None:
        """Idempotent."""
        self._gathered.clear()
        self._give_up(grpc.StatusCode.CANCELLED)

    def feed(self, message: bytes) -> None:
        self._gathered.append(message)
        self._news.set()

    def end(self, status: grpc.StatusCode, detail: bytes = b"") -> None:
        """The first end counts."""
        if self._end is None:
            self._end = status, detail
            self._deadline.cancel()
            self._news.set()

    def _give_up(self, status: grpc.StatusCode) -> None:
        if self._end is None:
            self.end(status)
            self._cancelled()

    def _parsed(self, raw: bytes) -> Message:
        try:
            return self._parse(raw)
        except DecodeError:
            raise _error(grpc.StatusCode.INTERNAL, b"") from None


class Line:
    """Owner of one connection and of the calls on it."""

    def __init__(self, wire: FrameWire) -> None:
        self.over = asyncio.Event()
        self._wire = wire
        self._numbers = itertools.count(1)
        self._calls: dict[int, LineCall] = {}
        wire.take, wire.lost = self._take, self._lost
        wire.max_frame_bytes = MAX_HEAD_BYTES + MAX_MESSAGE_BYTES

    @property
    def has_room(self) -> bool:
        return self._wire.has_room and not self.over.is_set()

    def call(self, method: Method, request: Message, parse: Callable[[bytes], Message], timeout_s: float) -> LineCall:
        number = next(self._numbers)
        call = LineCall(parse, lambda: self._give_up(number), timeout_s)
        raw = request.SerializeToString()
        if len(raw) > MAX_MESSAGE_BYTES:
            call.end(grpc.StatusCode.RESOURCE_EXHAUSTED)
        else:
            self._calls[number] = call
            self._wire.write(line_frames.open_frame(number, method, timeout_s, raw))
        return call

    def close(self) -> None:
        """Idempotent. Calls on it fail."""
        self._wire.close()
        self._lost()

    def _give_up(self, number: int) -> None:
        if self._calls.pop(number, None) is not None:
            self._wire.write(line_frames.cancel_frame(number))

    def _take(self, frame: bytes) -> None:
        try:
            kind, number = line_frames.head_of(frame)
            if kind == Kind.MESSAGE:
                call = self._calls.get(number)
                if call is not None:  # else it has been given up
                    call.feed(line_frames.read_message(frame))
            elif kind == Kind.END:
                status, detail = line_frames.read_end(frame)
                call = self._calls.pop(number, None)
                if call is not None:
                    call.end(_STATUSES.get(status, grpc.StatusCode.UNKNOWN), detail)
            else:
                raise TransferRefused("a line's frame is none that a worker sends")
        except TransferRefused as error:
            _log.warning("a line is closed: %s", error.message)
            self.close()

    def _lost(self) -> None:
        self.over.set()
        calls = list(self._calls.values())
        self._calls.clear()
        for call in calls:
            call.end(grpc.StatusCode.UNAVAILABLE)


class LinedChannels(ChannelPool):
    """Also owner of a line to each worker of this host, opened when it is first asked for, and again when lost."""

    def __init__(self, token: str | None, tls: ClusterTls | None, host_id: str) -> None:
        super().__init__(token, tls)
        self._host_id = host_id
        self._lines: dict[WorkerRef, Line] = {}
        self._holders: dict[WorkerRef, asyncio.Task[None]] = {}

    def line(self, worker: WorkerInfo) -> Line | None:
        line = self._lines.get(worker.ref)
        if line is None and worker.host_id == self._host_id and worker.ref not in self._holders:
            self._holders[worker.ref] = asyncio.create_task(self._hold(worker), name="line")
        return line if line is not None and line.has_room else None

    async def keep_only(self, living: Collection[WorkerRef]) -> None:
        await self._drop([ref for ref in self._holders if ref not in living])
        await super().keep_only(living)

    async def forget(self, worker_id: str) -> None:
        await self._drop([ref for ref in self._holders if ref.worker_id == worker_id])
        await super().forget(worker_id)

    async def close(self) -> None:
        await self._drop(list(self._holders))
        await super().close()

    async def _drop(self, gone: Collection[WorkerRef]) -> None:
        holders = [self._holders.pop(ref) for ref in gone]
        for holder in holders:
            holder.cancel()
        if holders:
            await asyncio.wait(holders)

    async def _hold(self, worker: WorkerInfo) -> None:
        """Until cancelled, or the worker says that it has no lines."""
        while True:
            call: Any = lines_stub(self, worker).Hold(lines_pb2.HoldRequest())
            try:
                await self._serve(worker, call)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    return
                _log.debug("a line was lost", extra={"worker_id": worker.worker_id, "status": error.code().name})
            except (TransferRefused, TimeoutError):
                metrics.FALLBACKS.labels("line").inc()
                _log.warning("calls go by gRPC: no line can be opened", extra={"worker_id": worker.worker_id})
            finally:
                call.cancel()
            await asyncio.sleep(REOPEN_S)

    async def _serve(self, worker: WorkerInfo, call: Any) -> None:
        """Opens a line, and returns or raises when it is over."""
        async with asyncio.timeout(ADDRESS_TIMEOUT_S):
            address = await call.read()
        if address is EOF:
            return
        line = Line(await knock(address.socket_path, address.session, address.key))
        self._lines[worker.ref] = line
        ends = [asyncio.ensure_future(call.read()), asyncio.ensure_future(line.over.wait())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._lines[worker.ref]
            line.close()
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)


def line_to(channels: ChannelPool, worker: WorkerInfo) -> Line | None:
    """None where calls to the worker go by gRPC."""
    return channels.line(worker) if isinstance(channels, LinedChannels) else None


def _error(status: grpc.StatusCode, detail: bytes) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(*(((ERROR_METADATA_KEY, detail),) if detail else ()))
    return grpc.aio.AioRpcError(status, grpc.aio.Metadata(), trailing, "by a line", None)
