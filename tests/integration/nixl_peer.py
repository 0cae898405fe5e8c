"""A sender by NIXL in a process of its own, for tests: `python -m tests.integration.nixl_peer ADDRESS WAY`.

`once`: it is granted a slot, says so, waits for a line, writes and commits. `late`: the same, but from the grant on its
event loop does not run, so that it does not hear what becomes of its session, and it only writes. `ever`: it writes
without end; when its link breaks it says so, and makes a new one when it is told to. `target`: it shows memory of its
own, says its address, and waits.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import replace
from functools import partial

import numpy as np

from tests.unit.link_house import EMBEDDING_LAYOUT, IDENTITY, REF, SENDER, TOKEN, send
from triptych.core.errors import TriptychError
from triptych.core.ids import AttemptRef
from triptych.core.plan import EmbeddingSource
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.rpc.client import ChannelPool, transfer_stub
from triptych.transport.layout import checksum64, host_id
from triptych.transport.link import AskingLink
from triptych.transport.link_pool import LinkPool
from triptych.transport.nixl_api import NixlError, NixlSource
from triptych.transport.nixl_carrier import BLOCK_BYTES, NixlCarrier
from triptych.transport.nixl_driver import UcxDriver
from triptych.transport.types import SlotGrant

NUM_BYTES = 6 << 20
PATIENCE_S = 20.0
DATA = b"\x5a" * NUM_BYTES


def say(word: str) -> None:
    print(word, flush=True)


async def granted(pool: LinkPool, there: WorkerInfo) -> tuple[AskingLink, SlotGrant]:
    link = await linked(pool, there)
    grant = await link.request_slot(REF, 0, IDENTITY, 1, NUM_BYTES)
    assert isinstance(grant, SlotGrant)
    say("granted")
    return link, grant


async def once(pool: LinkPool, there: WorkerInfo) -> None:
    link, grant = await granted(pool, there)
    await asyncio.to_thread(sys.stdin.readline)
    await link.write_slot(grant, memoryview(DATA))
    await link.commit_embedding(REF, 0, grant, EmbeddingSource.REMOTE, checksum64(DATA))
    say("committed")


async def late(pool: LinkPool, there: WorkerInfo) -> None:
    link, grant = await granted(pool, there)
    carrier = link._carrier()
    assert isinstance(carrier, NixlCarrier)
    sys.stdin.readline()
    say("written" if await_nothing_and_write(carrier._source, grant) else "lost")


def await_nothing_and_write(source: NixlSource, grant: SlotGrant) -> bool:
    """Whether the network says that it arrived."""
    source.staging[:BLOCK_BYTES] = DATA[:BLOCK_BYTES]
    give_up_at_s = time.monotonic() + PATIENCE_S
    try:
        transfer = source.write(0, np.array([[grant.offset, BLOCK_BYTES]]))
        while not transfer.is_done():
            if time.monotonic() > give_up_at_s:
                return False
    except NixlError:
        return False
    return True


async def ever(pool: LinkPool, there: WorkerInfo) -> None:
    for number in range(100_000):
        link = await linked(pool, there)
        try:
            await send(link, AttemptRef(f"req-{number}"), 0, DATA)
            say("sent")
        except TriptychError:
            say("lost")
            await asyncio.to_thread(sys.stdin.readline)


async def linked(pool: LinkPool, there: WorkerInfo) -> AskingLink:
    """Tries again: who has broken a link is left alone for a while."""
    while True:
        try:
            link = await pool.embedding_link(there, EMBEDDING_LAYOUT)
        except TriptychError:
            await asyncio.sleep(0.05)
        else:
            assert isinstance(link, AskingLink)
            return link


def target(host: str) -> None:
    shown = UcxDriver(host).expose(memoryview(bytearray(NUM_BYTES)))
    say(f"{shown.address.metadata.hex()} {shown.address.base}")
    sys.stdin.readline()
    shown.revoke()


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
    await {"once": once, "late": late, "ever": ever}[way](pool, there)
    await pool.close()
    await channels.close()


if __name__ == "__main__":
    if sys.argv[2] == "target":
        target(sys.argv[1].rpartition(":")[0])
    else:
        asyncio.run(main(sys.argv[1], sys.argv[2]))
