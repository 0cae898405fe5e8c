"""A receiver whose arenas are shown to senders by NIXL, in this process, and senders; by the fake network or the
library."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from tests.unit.link_house import ARENA_BYTES, EMBEDDING_LAYOUT, KV, KV_LAYOUT, PAGES, SENDER, TOKEN
from triptych.core.ids import WorkerRef
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.rpc.client import ChannelPool, transfer_stub
from triptych.rpc.server import RpcServer
from triptych.testing.receivers import FakeEmbeddingReceiver, FakeKvReceiver
from triptych.transport.layout import host_id
from triptych.transport.link_pool import LinkPool
from triptych.transport.nixl_api import NixlDriver
from triptych.transport.receiver import Receivers
from triptych.transport.servicer import TransferServicer
from triptych.transport.types import Arena, ArenaKind, Endpoint
from triptych.transport.zmq_port import DataPort
from triptych.wire.v1 import transfer_pb2_grpc

WAYS = ("nixl", "zmq-tcp")


@dataclass
class NixlHost:
    info: WorkerInfo
    driver: NixlDriver
    embedding: FakeEmbeddingReceiver
    kv: FakeKvReceiver
    servicer: TransferServicer
    channels: ChannelPool

    def pool(
        self,
        transports: tuple[str, ...] = ("nixl",),
        epoch: int = 11,
        *,
        strict: bool = False,
        driver: NixlDriver | None = None,
    ) -> LinkPool:
        me = replace(SENDER, ref=WorkerRef("encoder-1", epoch), transports=transports)
        return LinkPool(me, partial(transfer_stub, self.channels), strict=strict, nixl=driver or self.driver, kv=KV)


@asynccontextmanager
async def running(driver: NixlDriver, arena_bytes: int = ARENA_BYTES) -> AsyncIterator[NixlHost]:
    memory = [memoryview(bytearray(arena_bytes)) for _ in range(2)]
    embedding = FakeEmbeddingReceiver(Arena.unshared(ArenaKind.EMBEDDING, EMBEDDING_LAYOUT, memory[0]))
    kv = FakeKvReceiver(Arena.unshared(ArenaKind.KV, KV_LAYOUT, memory[1], PAGES))
    me = Endpoint(WorkerRef("prefill-1", 21), host_id(), WAYS)
    data_port = DataPort("127.0.0.1", 0, None)
    await data_port.open()
    servicer = TransferServicer(me, Receivers(embedding, kv), data_port, nixl=driver)
    server = RpcServer("127.0.0.1", 0, token=TOKEN)
    server.add(transfer_pb2_grpc.add_TransferServicer_to_server, servicer)
    port = await server.start()
    channels = ChannelPool(TOKEN)
    info = WorkerInfo(
        me.ref.worker_id,
        me.ref.epoch,
        frozenset({Role.PREFILL}),
        WorkerState.READY,
        f"127.0.0.1:{port}",
        host_id=me.host_id,
        transports=WAYS,
    )
    try:
        yield NixlHost(info, driver, embedding, kv, servicer, channels)
    finally:
        await channels.close()
        await servicer.close()
        await server.stop(0)
        await data_port.close()
