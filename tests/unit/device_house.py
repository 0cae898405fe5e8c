"""A receiver whose arenas are device memory of a fake device, in this process, and senders with devices of their own.

The host sees the fake device's memory, too: `arena.buffer` is the same bytes, so that receivers and tests read there
what lies on the device.

A test module names the fixtures that it uses as its own: `host = device_house.host`.
"""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.unit.link_house import (
    ARENA_BYTES,
    EMBEDDING_LAYOUT,
    IDENTITY,
    KV,
    KV_LAYOUT,
    PAGES,
    REF,
    SENDER,
    TOKEN,
    eventually,
)
from triptych.core.grant import Grant
from triptych.core.ids import WorkerRef
from triptych.core.kv_format import KvTerms
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.rpc.client import ChannelPool, transfer_stub
from triptych.rpc.server import RpcServer
from triptych.testing.fake_device import FakeDevice
from triptych.testing.receivers import FakeEmbeddingReceiver, FakeKvReceiver
from triptych.transport.device import Driver
from triptych.transport.device_arena import DeviceArena
from triptych.transport.layout import host_id
from triptych.transport.link_pool import LinkPool
from triptych.transport.receiver import Receivers
from triptych.transport.servicer import TransferServicer
from triptych.transport.shm import SharedSegment
from triptych.transport.types import Arena, ArenaKind, Endpoint, SlotGrant
from triptych.wire.v1 import transfer_pb2_grpc

WAYS = ("cuda_ipc", "shm")


@dataclass
class DeviceHost:
    """`device` is the receiver's; what it lands is in `embedding` and `kv`."""

    info: WorkerInfo
    device: FakeDevice
    embedding: FakeEmbeddingReceiver
    kv: FakeKvReceiver
    servicer: TransferServicer
    channels: ChannelPool

    def pool(
        self,
        driver: Driver | None,
        transports: tuple[str, ...] = ("cuda_ipc",),
        epoch: int = 11,
        *,
        strict: bool = False,
        kv: KvTerms = KV,
    ) -> LinkPool:
        me = replace(SENDER, ref=WorkerRef("encoder-1", epoch), transports=transports)
        return LinkPool(me, partial(transfer_stub, self.channels), strict=strict, driver=driver, kv=kv)

    def arenas(self) -> list[DeviceArena]:
        devices = [receiver.arena.device for receiver in (self.embedding, self.kv)]
        return [device for device in devices if device is not None]


@asynccontextmanager
async def running(folder: Path, epoch: int = 21, transports: tuple[str, ...] = WAYS) -> AsyncIterator[DeviceHost]:
    device = FakeDevice(folder)
    segments = [SharedSegment.create(ARENA_BYTES, kind) for kind in ("embed", "kv")]
    arenas = [DeviceArena.create(device, ARENA_BYTES, "--flag") for _ in segments]
    views = [memoryview(arena.tensor.numpy()).cast("B") for arena in arenas]
    embedding = FakeEmbeddingReceiver(
        Arena(ArenaKind.EMBEDDING, EMBEDDING_LAYOUT, views[0], segments[0], is_open=True, device=arenas[0])
    )
    kv = FakeKvReceiver(Arena(ArenaKind.KV, KV_LAYOUT, views[1], segments[1], PAGES, is_open=True, device=arenas[1]))
    me = Endpoint(WorkerRef("prefill-1", epoch), host_id(), transports)
    servicer = TransferServicer(me, Receivers(embedding, kv))
    server = RpcServer("127.0.0.1", 0, token=TOKEN)
    server.add(transfer_pb2_grpc.add_TransferServicer_to_server, servicer)
    port = await server.start()
    channels = ChannelPool(TOKEN)
    info = WorkerInfo(
        me.ref.worker_id,
        epoch,
        frozenset({Role.PREFILL}),
        WorkerState.READY,
        f"127.0.0.1:{port}",
        host_id=me.host_id,
        transports=transports,
    )
    try:
        yield DeviceHost(info, device, embedding, kv, servicer, channels)
    finally:
        await channels.close()
        await servicer.close()
        await server.stop(0)
        for arena in arenas:
            await arena.close()
        for segment in segments:
            segment.close()
        device.close()


GRANT = Grant("grant-1", "prefill-1", 21, b"c" * 16, 4, 0)


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[DeviceHost]:
    async with running(tmp_path) as started:
        yield started
    assert started.device.violations == [] and started.device.num_allocations == 0


@pytest.fixture
def mine(tmp_path: Path, host: DeviceHost) -> Iterator[FakeDevice]:
    """The sender's view of the same card."""
    device = FakeDevice(tmp_path)
    yield device
    device.close()
    assert device.violations == []


@pytest.fixture
async def pool(host: DeviceHost, mine: FakeDevice) -> AsyncIterator[LinkPool]:
    made = host.pool(mine)
    yield made
    mine.release()
    await made.close()
    await eventually(lambda: mine.num_open == 0 or mine._is_broken)


async def slot_of(link: Any, num_bytes: int = 256, index: int = 0) -> SlotGrant:
    grant = await link.request_slot(REF, index, IDENTITY, 1, num_bytes)
    assert isinstance(grant, SlotGrant)
    return grant


async def bound_link(host: DeviceHost, pool: LinkPool) -> tuple[Any, Grant]:
    host.kv.credits[GRANT.grant_id] = GRANT
    link = await pool.kv_link(host.info, KV_LAYOUT)
    return link, await link.bind_kv(REF, GRANT)


def unlock() -> None:
    """What the end of the process does to the lease that a failed device keeps."""
    for segment in [found for found in gc.get_objects() if type(found) is SharedSegment]:
        if segment.name.startswith("triptych-lease") and segment._owned_path is None:
            segment.close()
