"""The sending end of our transports, and of a plain copy, which is what there is to reach."""

from __future__ import annotations

import asyncio
import itertools
import mmap
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

from benchmarks.transport.cells import under_way
from benchmarks.transport.child import Child
from benchmarks.transport.landing import LAYOUT, NOT_SUMMED, Landing, info, nixl_of, private_arena, touched
from triptych.core.ids import AttemptRef, WorkerRef, new_epoch
from triptych.core.plan import IDENTITY_BYTES, EmbeddingSource
from triptych.rpc.client import ChannelPool, transfer_stub
from triptych.transport.layout import checksum64, host_id
from triptych.transport.link import EmbeddingLink
from triptych.transport.link_pool import LinkPool
from triptych.transport.names import INPROC
from triptych.transport.nixl_api import NixlDriver
from triptych.transport.receiver import Receivers
from triptych.transport.types import Endpoint, SlotGrant

IDENTITY = bytes(IDENTITY_BYTES)
Transfer = Callable[[], Awaitable[None]]
"""Moves the bytes; returns when the receiver has said that it has them all."""


class Arm(Protocol):
    """One way from this process's memory to the other's. One measurement at a time uses it."""

    async def prepare(self, num_bytes: int) -> Transfer:
        """What can be done before there are bytes: with ours, a slot is granted."""
        ...

    async def stream(self, num_bytes: int, count: int) -> None:
        """`count` transfers, `cells.under_way` at once, with all that each needs."""
        ...


class Memcpy:
    """Into other memory of this process."""

    def __init__(self, source: memoryview) -> None:
        self._source = source
        self._target = touched(memoryview(mmap.mmap(-1, len(source))))

    async def prepare(self, num_bytes: int) -> Transfer:
        return partial(self._copy, num_bytes, 0)

    async def stream(self, num_bytes: int, count: int) -> None:
        for number in range(count):
            await self._copy(num_bytes, number % under_way(num_bytes) * num_bytes)

    async def _copy(self, num_bytes: int, offset: int) -> None:
        self._target[offset : offset + num_bytes] = self._source[:num_bytes]


class Linked:
    """Over a link of ours, as an encoder uses it: room, bytes, commit. `checksum` is shown at the commit."""

    def __init__(self, link: EmbeddingLink, source: memoryview, checksum: Callable[[memoryview], int]) -> None:
        self._link = link
        self._source = source
        self._checksum = checksum
        self._numbers = itertools.count()

    async def prepare(self, num_bytes: int) -> Transfer:
        ref = AttemptRef(f"benchmark-{next(self._numbers)}")
        grant = await self._link.request_slot(ref, 0, IDENTITY, 1, num_bytes)
        assert isinstance(grant, SlotGrant)
        return partial(self._move, ref, grant, self._source[:num_bytes])

    async def stream(self, num_bytes: int, count: int) -> None:
        waiting = iter(range(count))

        async def one_after_the_other() -> None:
            for _ in waiting:
                move = await self.prepare(num_bytes)
                await move()

        async with asyncio.TaskGroup() as tasks:
            for _ in range(under_way(num_bytes)):
                tasks.create_task(one_after_the_other())

    async def _move(self, ref: AttemptRef, grant: SlotGrant, data: memoryview) -> None:
        await self._link.write_slot(grant, data)
        await self._link.commit_embedding(ref, 0, grant, EmbeddingSource.REMOTE, self._checksum(data))


def not_summed(_: memoryview) -> int:
    return NOT_SUMMED


def summed_up(data: memoryview) -> int:
    return checksum64(data)


class Links:
    """Owner of the links of this process and of their channels."""

    def __init__(self) -> None:
        self._channels = ChannelPool(None)
        self._pools: list[LinkPool] = []

    async def to_child(self, transport: str, child: Child) -> EmbeddingLink:
        """Raises TransferRefused, PeerLost or DeadlineExceeded."""
        there = Endpoint(WorkerRef(child.where["worker_id"], child.where["epoch"]), host_id(), (transport,))
        me = Endpoint(WorkerRef(f"sender-{transport}", new_epoch()), host_id(), (transport,))
        return await self._pool(me, nixl=nixl_of(transport)).embedding_link(info(there, child.where["address"]), LAYOUT)

    async def within(self, room_bytes: int) -> EmbeddingLink:
        """To a receiver in this process."""
        me = Endpoint(WorkerRef("sender-inproc", new_epoch()), host_id(), (INPROC,))
        receivers = Receivers(embedding=Landing(private_arena(room_bytes)))
        return await self._pool(me, receivers).embedding_link(info(me, "none:1"), LAYOUT)

    async def close(self) -> None:
        for pool in self._pools:
            await pool.close()
        await self._channels.close()

    def _pool(self, me: Endpoint, receivers: Receivers | None = None, nixl: NixlDriver | None = None) -> LinkPool:
        self._pools.append(LinkPool(me, partial(transfer_stub, self._channels), receivers, nixl=nixl))
        return self._pools[-1]
