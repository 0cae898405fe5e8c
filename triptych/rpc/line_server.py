"""The worker's end of lines: serves the same methods as its gRPC server, for callers of the same host.

Hold (gRPC, with the cluster's token) --> socket and key --> knock --> calls, many at once
  '-- stays open: when it ends, so do the line and its calls, and the other way round
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, NoReturn, cast

import grpc
from google.protobuf.message import DecodeError, Message

from triptych.core.errors import InvalidRequest, TransferRefused, TriptychError
from triptych.rpc import line_frames
from triptych.rpc.errors import ERROR_METADATA_KEY, detail_from_error
from triptych.rpc.line_frames import MAX_HEAD_BYTES, Kind, Open
from triptych.rpc.server import MAX_MESSAGE_BYTES, RpcServer
from triptych.transport.control_port import ControlPort
from triptych.transport.control_wire import FrameWire
from triptych.wire.v1 import decode_pb2, lines_pb2, lines_pb2_grpc, prefill_pb2

# Of one line. A router has bounds of its own, far below.
MAX_CALLS: Final = 16_384

_log = logging.getLogger(__name__)


def serve_lines(server: RpcServer, port: ControlPort, methods: Mapping[int, LineMethod]) -> None:
    """Before `server` starts. Lines end with it."""
    lines = LineServer(port, methods)
    server.add(lines_pb2_grpc.add_LinesServicer_to_server, lines)
    server.before_stop(lines.stop)


def generate_method(stage: Any) -> LineMethod:
    """Of who has Decode's methods."""
    return LineMethod(decode_pb2.GenerateRequest.FromString, stage.Generate)


def prefill_method(stage: Any) -> LineMethod:
    """Of who has Prefill's methods."""
    return LineMethod(prefill_pb2.PrefillRequest.FromString, stage.Prefill)


@dataclass(frozen=True, slots=True)
class LineMethod:
    """`serve(request, context)` is a servicer's method: one request, a stream of answers."""

    read: Callable[[bytes], Message]
    serve: Callable[[Any, Any], AsyncIterator[Message]]


class LineServer(lines_pb2_grpc.LinesServicer):
    """Owner of all lines of a process. Register it with the gRPC server; the port is whoever's opened it."""

    def __init__(self, port: ControlPort, methods: Mapping[int, LineMethod]) -> None:
        self._port = port
        self._methods = methods
        self._sessions = itertools.count(1)
        self._lines: set[_ServedLine] = set()
        self._is_stopping = False

    async def Hold(  # noqa: N802 - the name in the proto
        self, request: lines_pb2.HoldRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[lines_pb2.HoldResponse]:
        if self._is_stopping:
            return
        session, line = next(self._sessions), _ServedLine(self._methods)
        address = self._port.expect(session, line.joined)
        self._lines.add(line)
        try:
            yield lines_pb2.HoldResponse(socket_path=address.socket_path, session=session, key=address.key)
            await line.over.wait()
        finally:
            self._port.forget(session)
            self._lines.discard(line)
            line.close()

    async def stop(self, grace_s: float) -> None:
        """No new lines or calls; those under way get `grace_s` to end. Idempotent."""
        self._is_stopping = True
        lines = list(self._lines)
        calls = [call for line in lines for call in line.stop_taking()]
        if calls:
            await asyncio.wait(calls, timeout=grace_s)
        for line in lines:
            line.close()


class _ServedLine:
    """One caller's line. Owner of the tasks of its calls."""

    def __init__(self, methods: Mapping[int, LineMethod]) -> None:
        self.over = asyncio.Event()
        self._methods = methods
        self._wire: FrameWire | None = None
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._is_stopping = False

    def joined(self, wire: FrameWire) -> None:
        self._wire = wire
        wire.take, wire.lost = self._take, self._lost
        wire.max_frame_bytes = MAX_HEAD_BYTES + MAX_MESSAGE_BYTES

    def stop_taking(self) -> list[asyncio.Task[None]]:
        """The calls that are under way."""
        self._is_stopping = True
        return list(self._calls.values())

    def close(self) -> None:
        """Cancels all calls. Idempotent."""
        if self._wire is not None:
            self._wire.close()
        self._lost()

    def _lost(self) -> None:
        for call in self._calls.values():
            call.cancel()
        self.over.set()

    def _take(self, frame: bytes) -> None:
        try:
            kind, call = line_frames.head_of(frame)
            if kind == Kind.OPEN:
                self._open(line_frames.read_open(call, frame))
            elif kind == Kind.CANCEL:
                if call in self._calls:
                    self._calls[call].cancel()
            else:
                raise TransferRefused("a line's frame is none that a caller sends")
        except TransferRefused as error:
            _log.warning("a line is closed: %s", error.message)
            self.close()

    def _open(self, asked: Open) -> None:
        method = self._methods.get(asked.method)
        if asked.call in self._calls or method is None:
            raise TransferRefused("a line's call has a number or a method that it cannot have")
        if self._is_stopping or len(self._calls) >= MAX_CALLS:
            self._write(line_frames.end_frame(asked.call, _number(grpc.StatusCode.UNAVAILABLE)))
            return
        task = asyncio.get_running_loop().create_task(self._serve(method, asked), name="line-call")
        self._calls[asked.call] = task
        task.add_done_callback(lambda _: self._calls.pop(asked.call, None))

    async def _serve(self, method: LineMethod, asked: Open) -> None:
        context = _Context()
        try:
            async with asyncio.timeout(asked.timeout_s):
                await self._answer(method, asked, context)
        except grpc.aio.AbortError:
            pass  # `context` knows
        except TimeoutError:
            context.status = grpc.StatusCode.DEADLINE_EXCEEDED
        except Exception:
            _log.exception("a call failed with an error that is no TriptychError")
            context.status = grpc.StatusCode.UNKNOWN  # as gRPC says it
        self._write(line_frames.end_frame(asked.call, _number(context.status), context.detail))

    async def _answer(self, method: LineMethod, asked: Open, context: _Context) -> None:
        try:
            request = method.read(asked.request)
        except DecodeError:
            context.fail(InvalidRequest("the message cannot be read; is the caller of another version?"))
            return
        # The servicer's methods are generators, whatever they are declared as.
        async with aclosing(cast(Any, method.serve(request, context))) as answers:
            async for answer in answers:
                if self._wire is not None and not self._wire.has_room:
                    await self._wire.drained()
                self._write(line_frames.message_frame(asked.call, answer.SerializeToString()))

    def _write(self, frame: bytes) -> None:
        if self._wire is not None:
            self._wire.write(frame)


class _Context:
    """As much of gRPC's context as servicers use: it notes how the call ended."""

    def __init__(self) -> None:
        self.status = grpc.StatusCode.OK
        self.detail = b""

    def fail(self, error: TriptychError) -> None:
        self.status = grpc.StatusCode[error.grpc_status]
        self.detail = detail_from_error(error).SerializeToString()

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: tuple[tuple[str, bytes], ...] = ()
    ) -> NoReturn:
        self.status = code
        self.detail = dict(trailing_metadata).get(ERROR_METADATA_KEY, b"")
        raise grpc.aio.AbortError(details)


def _number(status: grpc.StatusCode) -> int:
    return int(status.value[0])
