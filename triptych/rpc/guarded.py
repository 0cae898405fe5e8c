"""Methods of a server with something in front of them, whatever their kind: unary or streamed, either way."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc

from triptych.rpc.errors import AbortOnError

Behaviour = Callable[[Any, Any], Any]
Check = Callable[[Any, Any], Any]
"""Takes the request, or the stream of requests, and the call's context; answers what the method gets in its place, or
raises a TriptychError, which ends the call."""


class GuardedHandler(grpc.RpcMethodHandler):  # type: ignore[type-arg]  # generic in the stubs only
    """A method's handler, with `check` in front of its behaviour, and another deserializer if one is given."""

    def __init__(self, handler: Any, check: Check, deserializer: Callable[[bytes], Any] | None = None) -> None:
        self.request_streaming = handler.request_streaming
        self.response_streaming = handler.response_streaming
        self.request_deserializer = deserializer or handler.request_deserializer
        self.response_serializer = handler.response_serializer
        self.unary_unary = _guarded(handler.unary_unary, check)
        self.unary_stream = _guarded(handler.unary_stream, check)
        self.stream_unary = _guarded(handler.stream_unary, check)
        self.stream_stream = _guarded(handler.stream_stream, check)


def _guarded(behaviour: Behaviour | None, check: Check) -> Behaviour | None:
    """gRPC looks at a function's kind, so an async generator stays one."""
    if behaviour is None:
        return None
    if inspect.isasyncgenfunction(behaviour):

        async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
            async with AbortOnError(context):
                request = check(request, context)
            async with aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response

        return generate

    async def answer(request: Any, context: Any) -> Any:
        async with AbortOnError(context):
            request = check(request, context)
        return await behaviour(request, context)

    return answer
