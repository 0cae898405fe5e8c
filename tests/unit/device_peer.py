"""A sender in a process of its own, for tests: `python -m tests.unit.device_peer ADDRESS EPOCH FOLDER`.

It asks for a slot, enqueues a copy that its device holds back, and then obeys lines on its standard input: `go` lets
the device run and commits; anything else, or the end, leaves.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.unit.link_house import EMBEDDING_LAYOUT, IDENTITY, REF, SENDER, TOKEN
from triptych.core.plan import EmbeddingSource
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.rpc.client import ChannelPool, transfer_stub
from triptych.testing.fake_device import FakeDevice
from triptych.transport.layout import checksum64, host_id
from triptych.transport.link_pool import LinkPool
from triptych.transport.types import SlotGrant

DATA = bytes(range(256))


def say(word: str) -> None:
    print(word, flush=True)


async def main(address: str, epoch: int, folder: Path) -> None:
    device = FakeDevice(folder)
    channels = ChannelPool(TOKEN)
    info = WorkerInfo(
        "prefill-1",
        epoch,
        frozenset({Role.PREFILL}),
        WorkerState.READY,
        address,
        host_id=host_id(),
        transports=("cuda_ipc",),
    )
    pool = LinkPool(replace(SENDER, transports=("cuda_ipc",)), partial(transfer_stub, channels), driver=device)
    link = await pool.embedding_link(info, EMBEDDING_LAYOUT)
    grant = await link.request_slot(REF, 0, IDENTITY, 1, len(DATA))
    assert isinstance(grant, SlotGrant)
    device.hold()
    writing = asyncio.create_task(link.write_slot(grant, memoryview(bytearray(DATA))))
    while not device.num_waiting:  # noqa: ASYNC110 - it is in another thread
        await asyncio.sleep(0.005)
    say("held")
    if (await asyncio.to_thread(sys.stdin.readline)).strip() == "go":
        device.release()
        await writing
        await link.commit_embedding(REF, 0, grant, EmbeddingSource.REMOTE, checksum64(DATA))
        say("committed")
        await asyncio.to_thread(sys.stdin.readline)
    device.release()
    await pool.close()
    await channels.close()
    assert not device.violations


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
