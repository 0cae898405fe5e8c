"""Who calls: under TLS only those whose certificate names the cluster, as servers must.

The authority may have signed for others, too: for who reads the metrics, say. Those have no business here, and a
cluster token that leaked does not help them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc

from triptych.core.errors import Unauthenticated
from triptych.rpc.guarded import GuardedHandler

_NAMES: Final = "x509_subject_alternative_name"


class CallerInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Guards every method of the server, health included."""

    def __init__(self, name: str) -> None:
        self._name = name.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        return None if handler is None else GuardedHandler(handler, self._check)

    def _check(self, request: Any, context: Any) -> Any:
        names = context.auth_context().get(_NAMES, ())
        if not any(name.lower() == self._name for name in names):
            raise Unauthenticated(f"the caller's certificate does not name {self._name.decode()}")
        return request
