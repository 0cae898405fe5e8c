"""The receiving end of our transports: the real servicer, sessions and data port, over an arena whose slots are free
again as soon as they are committed."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from triptych.core.errors import NoRoom, TransferRefused
from triptych.core.ids import AttemptRef, WorkerRef, new_epoch
from triptych.core.plan import EmbeddingSource
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.rpc.server import RpcServer
from triptych.transport.control_port import ControlPort
from triptych.transport.layout import checksum64, embedding_layout_fingerprint, host_id
from triptych.transport.names import NIXL, SAME_HOST, SHM, ZMQ_IPC, ZMQ_TCP
from triptych.transport.nixl_api import NixlDriver
from triptych.transport.nixl_driver import UcxDriver
from triptych.transport.receiver import Receivers
from triptych.transport.servicer import TransferServicer
from triptych.transport.shm import SharedSegment
from triptych.transport.slots import SlotAllocator
from triptych.transport.types import Arena, ArenaKind, Endpoint, HaveIt, SlotGrant
from triptych.transport.zmq_port import DataPort, data_socket_path
from triptych.wire.v1 import transfer_pb2_grpc

LAYOUT = embedding_layout_fingerprint("float32", 16, 1, b"benchmark" + bytes(23))
NOT_SUMMED = 0
"""The checksum of a commit whose bytes are taken as they are."""
# As `triptych/stages/landing.py` does: above that size another thread sums up.
INLINE_CHECKSUM_BYTES = 1 << 20


class Landing:
    """Implements `EmbeddingReceiver`. Owner of the arena's slots."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._slots = SlotAllocator(arena.buffer.nbytes)

    async def request_slot(
        self, peer: WorkerRef, ref: AttemptRef, item_index: int, identity: bytes, num_tokens: int, num_bytes: int
    ) -> SlotGrant | HaveIt:
        slots = self._slots.try_reserve([num_bytes])
        if slots is None:
            raise NoRoom("more is under way than the arena holds")
        (slot,) = slots
        return SlotGrant(slot.slot_id, slot.offset, slot.num_bytes, slot.generation, slot.capability)

    async def commit_embedding(
        self,
        peer: WorkerRef,
        ref: AttemptRef,
        item_index: int,
        slot_id: int,
        generation: int,
        capability: bytes,
        num_bytes: int,
        checksum: int,
        source: EmbeddingSource,
    ) -> None:
        slot = self._slots.find(slot_id)
        shown = (generation, capability, num_bytes)
        if slot is None or (slot.generation, slot.capability, slot.num_bytes) != shown:
            raise TransferRefused("no such slot was granted")
        if checksum != NOT_SUMMED and checksum != await self._sum(slot.offset, num_bytes):
            raise TransferRefused("other bytes have landed than were sent")
        self._slots.release(slot)

    async def abort(self, peer: WorkerRef, ref: AttemptRef, reason: str) -> None:
        """A measurement that failed ends the arm."""

    async def peer_lost(self, peer: WorkerRef) -> None:
        """There is one sender, and it comes but once."""

    async def _sum(self, offset: int, num_bytes: int) -> int:
        view = self.arena.buffer[offset : offset + num_bytes]
        if num_bytes <= INLINE_CHECKSUM_BYTES:
            return checksum64(view)
        return await asyncio.to_thread(checksum64, view)


def private_arena(room_bytes: int) -> Arena:
    """Of this process alone: for data frames, and for `inproc`."""
    return Arena.unshared(ArenaKind.EMBEDDING, LAYOUT, touched(memoryview(mmap.mmap(-1, room_bytes))))


def touched(memory: memoryview) -> memoryview:
    """All its pages are there from now on: nothing that is measured waits for one."""
    zeros = bytes(1 << 20)
    for start in range(0, len(memory), len(zeros)):
        memory[start : start + len(zeros)] = zeros[: len(memory) - start]
    return memory


@asynccontextmanager
async def receiver(transport: str, folder: Path, room_bytes: int) -> AsyncIterator[WorkerInfo]:
    """A receiver that can be sent to by that transport alone. Raises StartupError."""
    me = Endpoint(WorkerRef(f"receiver-{transport}", new_epoch()), host_id(), (transport,))
    async with AsyncExitStack() as stack:
        arena, port = await _ways_in(transport, folder, room_bytes, stack)
        control = await _control(transport, folder, stack)
        receivers, nixl = Receivers(embedding=Landing(arena)), nixl_of(transport)
        servicer = TransferServicer(me, receivers, port, nixl=nixl, control_port=control)
        server = RpcServer("127.0.0.1", 0, token=None)
        server.add(transfer_pb2_grpc.add_TransferServicer_to_server, servicer)
        address = f"127.0.0.1:{await server.start()}"
        stack.push_async_callback(server.stop, 0.0)
        stack.push_async_callback(servicer.close)
        yield info(me, address)


async def _ways_in(
    transport: str, folder: Path, room_bytes: int, stack: AsyncExitStack
) -> tuple[Arena, DataPort | None]:
    if transport == SHM:
        segment = SharedSegment.create(room_bytes, "bench")
        stack.callback(segment.close)
        touched(segment.buffer)
        return Arena.shared(ArenaKind.EMBEDDING, LAYOUT, segment), None
    if transport == NIXL:
        return private_arena(room_bytes), None
    path = data_socket_path(folder, f"receiver-{transport}") if transport == ZMQ_IPC else None
    port = DataPort("127.0.0.1", 0 if transport == ZMQ_TCP else None, path)
    stack.push_async_callback(port.close)
    await port.open()
    return private_arena(room_bytes), port


def nixl_of(transport: str) -> NixlDriver | None:
    """Raises NixlError where it is not installed."""
    return UcxDriver("127.0.0.1") if transport == NIXL else None


async def _control(transport: str, folder: Path, stack: AsyncExitStack) -> ControlPort | None:
    path = data_socket_path(folder, f"control-{transport}")
    if transport not in SAME_HOST or path is None:
        return None
    port = ControlPort(path)
    stack.push_async_callback(port.close)
    await port.open()
    return port


def info(me: Endpoint, address: str) -> WorkerInfo:
    """What a registry would tell of it."""
    return WorkerInfo(
        me.ref.worker_id,
        me.ref.epoch,
        frozenset({Role.PREFILL}),
        WorkerState.READY,
        address,
        host_id=me.host_id,
        transports=me.transports,
        embedding_layout=LAYOUT,
    )
