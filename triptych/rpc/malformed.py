"""Messages that are no protobuf: the caller's fault (INVALID_ARGUMENT), not a bug of ours with a traceback in the log.

gRPC answers UNKNOWN and logs a traceback for whatever a deserializer raises. So ours raises nothing: it hands on a mark
in place of the message, and what stands before each method ends the call when it meets one.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from triptych.core.errors import InvalidRequest
from triptych.rpc.errors import AbortOnError

_MALFORMED = object()

Behaviour = Callable[[Any, Any], Any]


class MalformedInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Guards every method of the server, health included."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        return None if handler is None else _Guarded(handler)


class _Guarded(grpc.RpcMethodHandler):  # type: ignore[type-arg]  # generic in the stubs only
    """A method's handler, with its deserializer and its behaviour replaced."""

    def __init__(self, handler: Any) -> None:
        self.request_streaming = handler.request_streaming
        self.response_streaming = handler.response_streaming
        self.request_deserializer = _lenient(handler.request_deserializer)
        self.response_serializer = handler.response_serializer
        guard = _guard_stream if handler.request_streaming else _guard_one
        self.unary_unary = guard(handler.unary_unary)
        self.unary_stream = guard(handler.unary_stream)
        self.stream_unary = guard(handler.stream_unary)
        self.stream_stream = guard(handler.stream_stream)


def _lenient(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserialize is None:
        return None

    def read(raw: bytes) -> Any:
        try:
            return deserialize(raw)
        except DecodeError:
            return _MALFORMED

    return read


def _guard_one(behaviour: Behaviour | None) -> Behaviour | None:
    return None if behaviour is None else _like(behaviour, _check)


def _guard_stream(behaviour: Behaviour | None) -> Behaviour | None:
    return None if behaviour is None else _like(behaviour, _Checked)


def _like(behaviour: Behaviour, checked: Callable[[Any], Any]) -> Behaviour:
    """`behaviour` on a checked request. gRPC looks at a function's kind, so an async generator stays one."""
    if inspect.isasyncgenfunction(behaviour):

        async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
            async with AbortOnError(context):
                request = checked(request)
            async with aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response

        return generate

    async def answer(request: Any, context: Any) -> Any:
        async with AbortOnError(context):
            request = checked(request)
        return await behaviour(request, context)

    return answer


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
