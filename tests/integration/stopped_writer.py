"""A process that gets a landing slot and is stopped before it writes: it says `granted`, and then is too busy to hear
that the request has ended. A module of its own: tests run it with `python -m`."""

from __future__ import annotations

import asyncio
import sys
import time

from triptych.core.errors import TriptychError
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.plan import EmbeddingSource
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.rpc.client import ChannelPool, transfer_stub
from triptych.transport.layout import checksum64, host_id
from triptych.transport.receiver_link import ReceiverLink
from triptych.transport.types import ArenaKind, Endpoint, SlotGrant
from triptych.transport.ways import DataSockets, Ways

WRITTEN = 0x42
BUSY_S = 0.5


async def write_late(address: str, worker_id: str, epoch: str, token: str, layout: str, way: str) -> None:
    receiver = WorkerInfo(worker_id, int(epoch), frozenset({Role.PREFILL}), WorkerState.READY, address)
    me = Endpoint(WorkerRef("encoder-9", 9), host_id(), (way,))
    link = ReceiverLink(me, receiver.ref, ArenaKind.EMBEDDING, bytes.fromhex(layout))
    await link.connect(transfer_stub(ChannelPool(token), receiver), Ways(DataSockets(), "127.0.0.1"))
    print("connected", flush=True)
    request_id, identity, num_tokens, num_bytes = sys.stdin.readline().split()
    ref = AttemptRef(request_id)
    grant = await link.request_slot(ref, 0, bytes.fromhex(identity), int(num_tokens), int(num_bytes))
    assert isinstance(grant, SlotGrant)
    print("granted", grant.offset, flush=True)
    time.sleep(BUSY_S)  # noqa: ASYNC251 - the loop is to hear nothing until the bytes are written
    data = memoryview(bytes([WRITTEN]) * grant.num_bytes)
    try:
        await link.write_slot(grant, data)
        await link.commit_embedding(ref, 0, grant, EmbeddingSource.REMOTE, checksum64(data))
        print("committed", flush=True)
    except TriptychError as error:
        print(error.code, flush=True)
    await link.close()


if __name__ == "__main__":
    asyncio.run(write_late(*sys.argv[1:]))
