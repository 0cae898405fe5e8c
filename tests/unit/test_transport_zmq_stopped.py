"""A receiver process that is stopped or killed while the data socket sends to it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from tests.unit.link_house import EMBEDDING_LAYOUT, IDENTITY, KV, KV_LAYOUT, PAGES, REF, TOKEN, Pages
from tests.unit.zmq_house import WAYS
from triptych.core.errors import PeerLost, TriptychError
from triptych.core.grant import Grant
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.plan import EmbeddingSource, Token
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.rpc.client import ChannelPool, transfer_stub
from triptych.transport import zmq_carrier
from triptych.transport.carrier import WriterEvents
from triptych.transport.layout import checksum64, host_id
from triptych.transport.link import EmbeddingLink
from triptych.transport.link_pool import LinkPool
from triptych.transport.shm import sweep_dead_segments
from triptych.transport.types import Endpoint, SlotGrant

RECEIVER_PROCESS = """
import asyncio, sys
from tests.unit import link_house
from triptych.core.grant import Grant

async def main():
    async with link_house.running(arena_bytes=int(sys.argv[1])) as host:
        num_pages = int(sys.argv[1]) // link_house.PAGES.page_bytes
        host.kv.credits["grant-1"] = Grant("grant-1", "prefill-1", 21, b"c" * 16, num_pages, 0)
        print(host.info.grpc_address, flush=True)
        await asyncio.sleep(120)

asyncio.run(main())
"""
STOPPED_BYTES = 64 << 20


@asynccontextmanager
async def receiver_process(num_bytes: int) -> AsyncIterator[tuple[asyncio.subprocess.Process, WorkerInfo]]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RECEIVER_PROCESS, str(num_bytes), stdout=subprocess.PIPE, env={**os.environ}
    )
    assert child.stdout is not None
    try:
        address = (await asyncio.wait_for(child.stdout.readline(), 30)).decode().strip()
        info = WorkerInfo(
            "prefill-1",
            21,
            frozenset({Role.PREFILL}),
            WorkerState.READY,
            address,
            host_id=host_id(),
            transports=("shm", *WAYS),
        )
        yield child, info
    finally:
        with suppress(ProcessLookupError):
            child.send_signal(signal.SIGCONT)
            child.kill()
        await child.wait()
        sweep_dead_segments()


async def worst_lag_s(stop: asyncio.Event) -> float:
    """How late the loop was at worst."""
    worst = 0.0
    while not stop.is_set():
        due = time.monotonic() + 0.01
        await asyncio.sleep(0.01)
        worst = max(worst, time.monotonic() - due)
    return worst


async def link_again(pool: LinkPool, info: WorkerInfo) -> EmbeddingLink:
    """Once the pause of the circuit is over and one may try."""
    async with asyncio.timeout(40):
        while True:
            with suppress(PeerLost):
                return await pool.embedding_link(info, EMBEDDING_LAYOUT, timeout_s=20)
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("way", WAYS)
async def test_a_stopped_receiver_is_a_typed_error_in_time_and_never_blocks_the_loop(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hazard: a socket at its high-water mark blocks whoever sends. The bound on the lag is the hazard's own."""
    monkeypatch.setattr(zmq_carrier, "SEND_TIMEOUT_S", 1.0)
    channels, me = ChannelPool(TOKEN), Endpoint(WorkerRef("encoder-1", 11), host_id(), (way,))
    async with receiver_process(STOPPED_BYTES) as (child, info):
        pool = LinkPool(me, lambda worker: transfer_stub(channels, worker))
        link = await pool.embedding_link(info, EMBEDDING_LAYOUT)
        grant = await link.request_slot(REF, 0, IDENTITY, 1, STOPPED_BYTES)
        assert isinstance(grant, SlotGrant)
        data = memoryview(bytes(STOPPED_BYTES))
        child.send_signal(signal.SIGSTOP)
        stop = asyncio.Event()
        lag = asyncio.create_task(worst_lag_s(stop))
        with pytest.raises(PeerLost, match="stopped taking data"):
            await asyncio.wait_for(link.write_slot(grant, data), 20)
        stop.set()
        assert await lag < 1.0
        await asyncio.wait_for(link.closed.wait(), 5)
        with pytest.raises(PeerLost):
            await link.request_slot(REF, 0, IDENTITY, 1, 64)
        child.send_signal(signal.SIGCONT)
        again = await link_again(pool, info)
        fresh = await again.request_slot(AttemptRef("req-2"), 0, IDENTITY, 1, STOPPED_BYTES)
        assert isinstance(fresh, SlotGrant)
        await again.write_slot(fresh, data)
        await again.commit_embedding(AttemptRef("req-2"), 0, fresh, EmbeddingSource.REMOTE, checksum64(data))
        await pool.close()
    await channels.close()


async def test_a_stopped_receiver_of_pages_never_holds_the_engines_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages go on being taken, up to the bound, while the peer reads nothing; then the link fails, and says so."""
    monkeypatch.setattr(zmq_carrier, "SEND_TIMEOUT_S", 1.0)
    monkeypatch.setattr(zmq_carrier, "CONGESTED_BYTES", 8 << 20)
    num_pages = STOPPED_BYTES // PAGES.page_bytes
    channels, me = ChannelPool(TOKEN), Endpoint(WorkerRef("prefill-9", 11), host_id(), ("zmq-tcp",))
    async with receiver_process(STOPPED_BYTES) as (child, info):
        pool = LinkPool(me, lambda worker: transfer_stub(channels, worker), kv=KV)
        link = await pool.kv_link(info, KV_LAYOUT)
        grant = await link.bind_kv(REF, Grant("grant-1", "prefill-1", 21, b"c" * 16, num_pages, 0))
        failed: asyncio.Queue[TriptychError] = asyncio.Queue()
        writer = link.page_writer(grant, Pages(1), WriterEvents(failed.put_nowait, lambda: None))
        child.send_signal(signal.SIGSTOP)
        step, was_congested = num_pages // 16, False
        for first in range(0, num_pages, step):
            await asyncio.wait_for(asyncio.to_thread(writer.copy, [0] * step, first), 5)
            was_congested |= writer.is_congested  # on a busy machine the link may have failed before all is copied
        assert was_congested
        with pytest.raises(PeerLost, match="stopped taking data"):
            await asyncio.wait_for(link.commit_kv(REF, grant, 9, STOPPED_BYTES, Token(0, 5), 0), 20)
        assert isinstance(await asyncio.wait_for(failed.get(), 5), PeerLost)
        assert not writer.is_congested, "what has failed holds nobody up"
        await pool.close()
    await channels.close()


async def test_a_killed_receiver_is_a_typed_error(seed: int) -> None:
    channels, me = ChannelPool(TOKEN), Endpoint(WorkerRef("prefill-9", 11), host_id(), ("zmq-tcp",))
    async with receiver_process(STOPPED_BYTES) as (child, info):
        pool = LinkPool(me, lambda worker: transfer_stub(channels, worker))
        link = await pool.embedding_link(info, EMBEDDING_LAYOUT)
        grant = await link.request_slot(REF, 0, IDENTITY, 1, STOPPED_BYTES)
        assert isinstance(grant, SlotGrant)
        child.kill()
        with pytest.raises(TriptychError):
            await asyncio.wait_for(send_again_and_again(link, grant), 20)
        await pool.close()
    await channels.close()


async def send_again_and_again(link: object, grant: SlotGrant) -> None:
    data = memoryview(bytes(STOPPED_BYTES))
    while True:
        await link.write_slot(grant, data)  # type: ignore[attr-defined]
