"""A worker's gRPC server: cluster token, TLS where there is a certificate, explicit limits, and a health that means
progress."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from triptych.core.address import is_loopback
from triptych.core.errors import StartupError, Unauthenticated
from triptych.core.worker import WorkerInfo
from triptych.rpc.callers import CallerInterceptor
from triptych.rpc.convert import worker_to_proto
from triptych.rpc.errors import AbortOnError, abort_with
from triptych.rpc.malformed import MalformedInterceptor
from triptych.rpc.tls import ClusterTls
from triptych.rpc.tls_greeting import TLS_NAME
from triptych.wire.v1 import registry_pb2, registry_pb2_grpc

TOKEN_METADATA_KEY: Final = "x-triptych-token"  # noqa: S105 - the name of a header
MAX_MESSAGE_BYTES: Final = 4 * 2**20
PROGRESS_POLL_S: Final = 1.0
KEEPALIVE_MS: Final = 10_000
# Who connects and then says nothing, or not what it must, holds a socket of ours for no longer.
HANDSHAKE_TIMEOUT_MS: Final = 10_000

_log = logging.getLogger(__name__)

SERVER_OPTIONS: Final[list[tuple[str, Any]]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a second worker on the same port is an error, not a lottery
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS),  # without it a ping may go unanswered for a minute
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.keepalive_permit_without_calls", 1),
]


class RpcServer:
    """Owns one listening socket and the health of what is served there.

    Args:
        host, port: where to listen; port 0 takes a free one.
        token: the cluster token every caller must show (gRPC health excepted); None only on loopback.
        tls: who shows no certificate that names the cluster is not even told the health.
        insecure_network: without it and without `tls`, binding beyond loopback is refused.
        progress: polled each second; while it answers False (or raises) the health is NOT_SERVING.

    Raises:
        StartupError: the address is not allowed or taken.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str | None,
        tls: ClusterTls | None = None,
        insecure_network: bool = False,
        progress: Callable[[], bool] | None = None,
    ) -> None:
        _check_binding(host, token, is_protected=tls is not None or insecure_network)
        self._tls = tls
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._progress = progress
        self._wanted = False
        self._health = cast(Any, health).aio.HealthServicer()  # the stubs do not know `aio`
        callers = [] if tls is None else [CallerInterceptor(TLS_NAME)]
        self._server = grpc.aio.server(
            interceptors=[_TokenInterceptor(token), *callers, MalformedInterceptor()], options=SERVER_OPTIONS
        )
        self._poll: asyncio.Task[None] | None = None
        self._stops: list[Callable[[float], Awaitable[None]]] = []
        self.add(health_pb2_grpc.add_HealthServicer_to_server, self._health)

    def add(self, register: Callable[..., None], servicer: object) -> None:
        """`register` is the generated `add_XServicer_to_server`. Before `start`."""
        register(servicer, self._server)

    def before_stop(self, stop: Callable[[float], Awaitable[None]]) -> None:
        """`stop(grace_s)` ends what is served by other ways than gRPC, before gRPC's own calls get their grace."""
        self._stops.append(stop)

    async def start(self) -> int:
        """Listens, not yet serving by its health. Answers the port."""
        try:
            port = self._bind()
        except RuntimeError as err:
            raise StartupError(f"cannot listen on {self._address}: choose another port or stop what uses it") from err
        await self._publish(self._wanted)
        await self._server.start()
        self._poll = asyncio.create_task(self._poll_progress(), name="rpc-health")
        return port

    def _bind(self) -> int:
        """Raises RuntimeError when the address is taken."""
        if self._tls is None:
            return self._server.add_insecure_port(self._address)
        return self._server.add_secure_port(self._address, self._tls.server_credentials())

    async def set_serving(self, serving: bool) -> None:
        """What the worker wants; the health shows it for as long as there is progress."""
        self._wanted = serving
        await self._publish(serving and self._is_progressing())

    async def stop(self, grace_s: float) -> None:
        """NOT_SERVING at once, running calls get `grace_s` to end. Idempotent."""
        if self._poll is not None:
            self._poll.cancel()
            await asyncio.gather(self._poll, return_exceptions=True)
            self._poll = None
        await self._health.enter_graceful_shutdown()
        for stop in self._stops:
            await stop(grace_s)
        await self._server.stop(grace_s)

    async def _poll_progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_POLL_S)
            await self._publish(self._wanted and self._is_progressing())

    def _is_progressing(self) -> bool:
        if self._progress is None:
            return True
        try:
            return self._progress()
        except Exception:
            _log.exception("the progress check failed: reporting NOT_SERVING")
            return False

    async def _publish(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        await self._health.set("", status.SERVING if serving else status.NOT_SERVING)


class DescribeServicer(registry_pb2_grpc.WorkerRegistryServicer):
    """Answers what the worker is now."""

    def __init__(self, describe: Callable[[], WorkerInfo]) -> None:
        self._describe = describe

    async def Describe(  # noqa: N802 - the name in the proto
        self, request: registry_pb2.DescribeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> registry_pb2.DescribeResponse:
        async with AbortOnError(context):
            return registry_pb2.DescribeResponse(worker=worker_to_proto(self._describe()))


def add_describe(server: RpcServer, describe: Callable[[], WorkerInfo]) -> None:
    server.add(registry_pb2_grpc.add_WorkerRegistryServicer_to_server, DescribeServicer(describe))


class _TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Everything but health needs the token."""

    def __init__(self, token: str | None) -> None:
        self._token = None if token is None else token.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        if self._is_allowed(handler_call_details):
            return await continuation(handler_call_details)
        return grpc.unary_unary_rpc_method_handler(_refuse)

    def _is_allowed(self, details: grpc.HandlerCallDetails) -> bool:
        if self._token is None or details.method.startswith("/grpc.health.v1.Health/"):
            return True
        shown = [value for key, value in details.invocation_metadata or () if key == TOKEN_METADATA_KEY]
        raw = shown[0] if len(shown) == 1 else b""
        return hmac.compare_digest(raw if isinstance(raw, bytes) else raw.encode(), self._token)


async def _refuse(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await abort_with(context, Unauthenticated("the cluster token is missing or wrong"))


def _check_binding(host: str, token: str | None, *, is_protected: bool) -> None:
    if token is not None and not token:
        raise StartupError("the cluster token is empty: remove it, or put at least 16 characters there")
    if is_loopback(host):
        return
    if token is None:
        raise StartupError(f"refusing to listen on {host} without a cluster token: set one, or listen on 127.0.0.1")
    if not is_protected:
        raise StartupError(
            f"refusing to listen on {host}: traffic between workers is not encrypted. Give --tls-cert, --tls-key and"
            " --tls-ca, listen on 127.0.0.1, or pass --insecure-network when the network itself is trusted"
        )
