"""Messages that are no protobuf: the caller's fault (INVALID_ARGUMENT), not a bug of ours with a traceback in the log.

gRPC answers UNKNOWN and logs a traceback for whatever a deserializer raises. So ours raises nothing: it hands on a mark
in place of the message, and what stands before each method ends the call when it meets one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from triptych.core.errors import InvalidRequest
from triptych.rpc.guarded import GuardedHandler

_MALFORMED = object()


class MalformedInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Guards every method of the server, health included."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        check = _check_stream if handler.request_streaming else _check_one
        return GuardedHandler(handler, check, _lenient(handler.request_deserializer))


def _lenient(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserialize is None:
        return None

    def read(raw: bytes) -> Any:
        try:
            return deserialize(raw)
        except DecodeError:
            return _MALFORMED

    return read


def _check_one(message: Any, _context: Any) -> Any:
    return _check(message)


def _check_stream(messages: Any, _context: Any) -> Any:
    return _Checked(messages)


def _check(message: Any) -> Any:
    if message is _MALFORMED:
        raise InvalidRequest("the message cannot be read; is the caller of another version?")
    return message


class _Checked:
    """A stream of requests, up to the first that cannot be read."""

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._requests = aiter(requests)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        return _check(await anext(self._requests))
