"""The API's port, and gRPC between processes of this host."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from triptych.cli.checks.finding import Finding, fail, ok, warn
from triptych.cli.ports import free_port, is_free
from triptych.cli.settings import DEFAULT_PORT

if TYPE_CHECKING:
    from triptych.core.tls_files import TlsFiles

RPC_TIMEOUT_S = 10.0


def api_port(host: str, port: int | None) -> Finding:
    """`port`: what was asked for; None is the standard one or, where that is taken, any."""
    wanted = DEFAULT_PORT if port is None else port
    free_port(host)  # raises StartupError for a host that is not here
    if wanted == 0 or is_free(host, wanted):
        return ok("port", f"{wanted} of {host} is free" if wanted else f"any free one of {host}")
    if port is None:
        todo = f"nothing: triptych up takes another port and prints it; or stop what listens on {wanted}"
        return warn("port", f"{wanted} of {host} is taken", todo)
    return fail(
        "port", f"{wanted} of {host} is taken", "stop what listens there, or give another --port (0: a free one)"
    )


def grpc_round_trip() -> Finding:
    """Our own server on a free port of loopback, asked for its health."""
    import grpc
    from grpc_health.v1 import health_pb2

    status = asyncio.run(_ask_health())
    if status != health_pb2.HealthCheckResponse.SERVING:
        return fail("grpc", f"a server on loopback answers {status}", "run: pip install --force-reinstall grpcio")
    return ok("grpc", f"{grpc.__version__}: a server on loopback answered")


def tls(files: TlsFiles | None) -> Finding:
    """The files as a worker reads them at its start: it greets itself with them. Raises StartupError as it would."""
    if files is None:
        return ok("tls", "not asked for: workers of triptych up stay on loopback")
    from triptych.rpc.tls import WARN_BEFORE_S, load_tls
    from triptych.transport.curve import CurveKeys

    loaded = load_tls(files)
    assert loaded is not None
    CurveKeys.make()
    left_s = loaded.expires_at - time.time()
    found = f"{files.cert} is signed by {files.ca} and good for {left_s / 86400:.0f} more days; ZeroMQ can encrypt"
    if left_s < WARN_BEFORE_S:
        return warn("tls", found, "make another, and restart the workers before that: no new connection is made then")
    return ok("tls", found)


async def _ask_health() -> int:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from triptych.rpc.client import CHANNEL_OPTIONS
    from triptych.rpc.server import RpcServer

    server = RpcServer("127.0.0.1", 0, token="0" * 64)
    port = await server.start()
    try:
        await server.set_serving(True)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=RPC_TIMEOUT_S, wait_for_ready=True)
            return int(answer.status)
    finally:
        await server.stop(0.0)
