"""A sender by NIXL in a process of its own, for tests: `python -m tests.integration.nixl_peer ADDRESS WAY`.

`once`: it is granted a slot, says so, and waits for a line without its event loop running, so that it does not hear
what becomes of its session meanwhile; then it writes and commits. `ever`: it writes without end; when its link breaks
it says so, and makes a new one when it is told to.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from functools import partial

from tests.unit.link_house import EMBEDDING_LAYOUT, IDENTITY, REF, SENDER, TOKEN, send
from triptych.core.errors import PeerLost, TriptychError
from triptych.core.ids import AttemptRef
from triptych.core.plan import EmbeddingSource
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.rpc.client import ChannelPool, transfer_stub
from triptych.transport.layout import checksum64, host_id
from triptych.transport.link_pool import LinkPool
from triptych.transport.nixl_driver import UcxDriver
from triptych.transport.types import SlotGrant

NUM_BYTES = 6 << 20
DATA = b"\x5a" * NUM_BYTES


def say(word: str) -> None:
    print(word, flush=True)


async def once(pool: LinkPool, there: WorkerInfo) -> None:
    link = await pool.embedding_link(there, EMBEDDING_LAYOUT)
    grant = await link.request_slot(REF, 0, IDENTITY, 1, NUM_BYTES)
    assert isinstance(grant, SlotGrant)
    say("granted")
    sys.stdin.readline()
    try:
        await link.write_slot(grant, memoryview(DATA))
        await link.commit_embedding(REF, 0, grant, EmbeddingSource.REMOTE, checksum64(DATA))
        say("committed")
    except PeerLost:
        say("lost")


async def ever(pool: LinkPool, there: WorkerInfo) -> None:
    for number in range(100_000):
        try:
            link = await pool.embedding_link(there, EMBEDDING_LAYOUT)
            await send(link, AttemptRef(f"req-{number}"), 0, DATA)  # type: ignore[arg-type]
            say("sent")
        except TriptychError:
            say("lost")
            await asyncio.to_thread(sys.stdin.readline)


async def main(address: str, way: str) -> None:
    channels = ChannelPool(TOKEN)
    there = WorkerInfo(
        "prefill-1",
        21,
        frozenset({Role.PREFILL}),
        WorkerState.READY,
        address,
        host_id=host_id(),
        transports=("nixl",),
    )
    me = replace(SENDER, transports=("nixl",))
    pool = LinkPool(me, partial(transfer_stub, channels), nixl=UcxDriver("127.0.0.1"))
    await (once if way == "once" else ever)(pool, there)
    await pool.close()
    await channels.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
