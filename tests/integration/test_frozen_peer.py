"""A peer that is there and does nothing any more: the system still takes what is sent to it, but nobody reads."""

from __future__ import annotations

import asyncio
import signal
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2

from tests.seed import IS_FULL, SEED
from triptych.core.ids import new_epoch
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.rpc.client import ChannelPool, health_stub
from triptych.rpc.errors import error_from_rpc

# A ping after at most 20 s of silence, and 10 s for its answer; the rest is for a busy machine. gRPC's own patience
# with an unanswered ping is a minute.
PATIENCE_S = 45.0

SERVER = """
import asyncio
from triptych.rpc.server import RpcServer

async def main():
    server = RpcServer("127.0.0.1", 0, token=None)
    print(await server.start(), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.timeout(120)
@pytest.mark.skipif(
    not IS_FULL and SEED % 4 != 0, reason="takes half a minute: one run in four, and make verify-cluster"
)
async def test_a_call_to_a_frozen_worker_ends() -> None:
    server = await asyncio.create_subprocess_exec(sys.executable, "-P", "-c", SERVER, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    address = f"127.0.0.1:{int(await server.stdout.readline())}"
    channels = ChannelPool(None)
    worker = WorkerInfo("decode-0", new_epoch(), frozenset({Role.DECODE}), WorkerState.READY, address)
    try:
        call = health_stub(channels, worker).Watch(health_pb2.HealthCheckRequest())
        assert await call.read() is not None
        server.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(grpc.aio.AioRpcError) as lost:
                await call.read()
        assert error_from_rpc(lost.value).retriable
    finally:
        server.kill()
        await server.wait()
        await channels.close()
