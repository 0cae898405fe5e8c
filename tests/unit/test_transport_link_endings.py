"""Requests that are given up, links that break and peers that die: nothing leaks, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Never

import numpy as np
import pytest

from tests.unit import link_house
from tests.unit.link_house import (
    ARENA_BYTES,
    EMBEDDING_LAYOUT,
    EVENTS,
    FULL,
    IDENTITY,
    KV_LAYOUT,
    PAGES,
    REF,
    SENDER,
    TOKEN,
    Host,
    Pages,
    eventually,
    fill,
    running,
    send,
    sender_by,
)
from triptych.core.errors import DeadlineExceeded, PeerLost, TriptychError
from triptych.core.grant import Grant
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.plan import EmbeddingSource
from triptych.testing.receivers import FakeEmbeddingReceiver
from triptych.transport.layout import checksum64
from triptych.transport.link import AskingLink
from triptych.transport.link_pool import LinkPool
from triptych.transport.pages import MappedPages
from triptych.transport.receiver import Receivers
from triptych.transport.receiver_link import ReceiverLink
from triptych.transport.shm import SharedSegment
from triptych.transport.types import Arena, ArenaKind, HaveIt, SlotGrant

host, link, shm_link = link_house.host, link_house.link, link_house.shm_link


# --- giving up -------------------------------------------------------------------------------------------------------


async def give_up_by_cancelling(link: AskingLink) -> None:
    waiting = asyncio.create_task(link.request_slot(REF, 0, IDENTITY, 1, 64))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def give_up_by_deadline(link: AskingLink) -> None:
    with pytest.raises(DeadlineExceeded):
        await link.request_slot(REF, 0, IDENTITY, 1, 64, timeout_s=0.05)


@pytest.mark.parametrize("give_up", [give_up_by_cancelling, give_up_by_deadline])
async def test_a_request_given_up_is_aborted_and_leaks_nothing(
    host: Host, link: AskingLink, give_up: Callable[[AskingLink], Awaitable[None]]
) -> None:
    await fill(link)
    await give_up(link)
    await eventually(lambda: [ref for ref, _ in host.embedding.aborted] == [REF])
    await link.abort(FULL, None, "line\nbreak " + "x" * 999)
    await eventually(lambda: host.embedding.slots.free_bytes == ARENA_BYTES)
    await send(link, AttemptRef("req-2"), 0, b"next")


async def test_requests_cancelled_at_any_moment_leak_nothing(host: Host, link: AskingLink) -> None:
    for n in range(60):
        ref = AttemptRef(f"req-{n}")
        waiting = asyncio.create_task(link.request_slot(ref, 0, IDENTITY, 1, 300))
        for _ in range(n % 12):
            await asyncio.sleep(0)
        if n % 5 == 0:
            await asyncio.sleep(0.001)
        waiting.cancel()
        (outcome,) = await asyncio.gather(waiting, return_exceptions=True)
        if isinstance(outcome, SlotGrant):
            await link.abort(ref, None, "not needed")
    await eventually(lambda: host.embedding.slots.free_bytes == ARENA_BYTES)


async def test_a_bind_given_up_is_aborted(host: Host) -> None:
    pool = host.pool()
    link = await pool.kv_link(host.info, KV_LAYOUT)
    credit = Grant("grant-1", "prefill-1", 21, b"c" * 16, 4, 0)
    host.kv.credits["grant-1"] = credit
    host.kv.may_bind.clear()
    with pytest.raises(DeadlineExceeded):
        await link.bind_kv(REF, credit, timeout_s=0.05)
    await eventually(lambda: bool(host.kv.aborted))
    assert host.kv.aborted[0][:2] == (REF, "grant-1") and not host.kv.bound
    await pool.close()
    await eventually(lambda: host.kv.lost == [SENDER.ref])


class StubbornReceiver(FakeEmbeddingReceiver):
    """Grants only when told, whatever happens meanwhile."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self.go = asyncio.Event()

    async def request_slot(
        self, peer: WorkerRef, ref: AttemptRef, item_index: int, identity: bytes, num_tokens: int, num_bytes: int
    ) -> SlotGrant | HaveIt:
        while not self.go.is_set():
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                continue
        return await super().request_slot(peer, ref, item_index, identity, num_tokens, num_bytes)


async def test_a_grant_that_comes_too_late_is_given_back() -> None:
    segment = SharedSegment.create(ARENA_BYTES, "embed")
    receiver = StubbornReceiver(Arena.shared(ArenaKind.EMBEDDING, EMBEDDING_LAYOUT, segment))
    async with running() as host:
        host.servicer._receivers = Receivers(receiver)
        pool = host.pool()
        link = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
        await give_up_by_deadline(link)  # type: ignore[arg-type]
        receiver.go.set()
        await eventually(lambda: len(receiver.aborted) == 2)
        assert receiver.aborted[1] == (REF, "granted too late")
        assert receiver.slots.free_bytes == ARENA_BYTES
        await pool.close()
        await eventually(lambda: bool(receiver.lost))
    segment.close()


# --- breaking --------------------------------------------------------------------------------------------------------


async def test_a_cut_stream_fails_all_who_wait(host: Host, shm_link: ReceiverLink) -> None:
    await fill(shm_link)
    waiting = [asyncio.create_task(shm_link.request_slot(REF, n, IDENTITY, 1, 64)) for n in range(5)]
    await asyncio.sleep(0.05)
    await host.servicer.close()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(outcome, PeerLost) for outcome in outcomes)
    await asyncio.wait_for(shm_link.closed.wait(), 5)
    with pytest.raises(PeerLost):
        await shm_link.request_slot(REF, 0, IDENTITY, 1, 64)
    with pytest.raises(PeerLost):
        await shm_link.write_slot(SlotGrant(1, 0, 64, 1, b"c" * 16), memoryview(bytes(64)))
    await shm_link.abort(REF, None, "too late to matter")
    assert host.embedding.lost == [SENDER.ref]


async def test_closing_a_link_fails_who_waits_and_tells_the_receiver(host: Host, shm_link: ReceiverLink) -> None:
    await fill(shm_link)
    waiting = asyncio.create_task(shm_link.request_slot(REF, 0, IDENTITY, 1, 64))
    await asyncio.sleep(0.05)
    await shm_link.close()
    with pytest.raises(PeerLost):
        await waiting
    await eventually(lambda: host.embedding.lost == [SENDER.ref])
    assert host.embedding.slots.free_bytes == ARENA_BYTES


async def bound_writer(host: Host, pool: LinkPool, seed: int) -> MappedPages:
    """A page writer that maps the receiver's pool, over a grant of four pages."""
    link = await pool.kv_link(host.info, KV_LAYOUT)
    credit = Grant("grant-1", "prefill-1", 21, b"c" * 16, 4, 0)
    host.kv.credits["grant-1"] = credit
    writer = link.page_writer(await link.bind_kv(REF, credit), Pages(seed), EVENTS)
    assert isinstance(writer, MappedPages)
    return writer


async def test_what_a_lost_sender_may_still_write_is_not_freed(host: Host, seed: int) -> None:
    pool = host.pool()
    writer = await bound_writer(host, pool, seed)
    await pool.close()
    await asyncio.sleep(0.2)
    assert host.kv.lost == []
    writer.copy([1], 0)  # harms nobody: the pages are still this sender's
    del writer
    await eventually(lambda: host.kv.lost == [SENDER.ref])


async def test_a_sender_of_frames_is_let_go_at_once(host: Host, seed: int) -> None:
    """It maps nothing, so nothing is to be waited for; what it sends later finds no grant."""
    pool = host.pool(sender_by("zmq-tcp", host))
    link = await pool.kv_link(host.info, KV_LAYOUT)
    credit = Grant("grant-1", "prefill-1", 21, b"c" * 16, 4, 0)
    host.kv.credits["grant-1"] = credit
    writer = link.page_writer(await link.bind_kv(REF, credit), Pages(seed), EVENTS)
    await pool.close()
    await eventually(lambda: host.kv.lost == [SENDER.ref])
    assert writer.copy([1], 0) == PAGES.page_bytes
    await asyncio.sleep(0.05)
    assert not np.frombuffer(host.kv.arena.buffer, dtype=np.uint8).any()


async def test_a_new_session_waits_for_the_farewell_of_the_former(host: Host, seed: int) -> None:
    pool, second = host.pool(), host.pool()
    writer = await bound_writer(host, pool, seed)
    connecting = asyncio.create_task(second.kv_link(host.info, KV_LAYOUT))
    await asyncio.sleep(0.2)
    assert not connecting.done()
    del writer
    again = await connecting
    assert host.kv.lost == [SENDER.ref]
    assert not again.closed.is_set()
    await asyncio.gather(pool.close(), second.close())


SENDER_PROCESS = """
import asyncio, sys
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.plan import EmbeddingSource
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.rpc.client import ChannelPool, transfer_stub
from triptych.transport.layout import host_id
from triptych.transport.receiver_link import ReceiverLink
from triptych.transport.types import ArenaKind, Endpoint
from triptych.transport.ways import DataSockets, Ways

async def main(address, token, layout, transport):
    worker = WorkerInfo("prefill-1", 21, frozenset({Role.PREFILL}), WorkerState.READY, address)
    me = Endpoint(WorkerRef("child", 5), host_id(), (transport,))
    link = ReceiverLink(me, worker.ref, ArenaKind.EMBEDDING, bytes.fromhex(layout))
    await link.connect(transfer_stub(ChannelPool(token), worker), Ways(DataSockets(), "127.0.0.1"))
    grant = await link.request_slot(AttemptRef("req-child"), 0, b"i" * 32, 1, 1024)
    await link.write_slot(grant, memoryview(b"y" * 1024))
    print("written", flush=True)
    await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("transport", ["shm", "zmq-ipc", "zmq-tcp"])
async def test_a_killed_sender_frees_what_it_held(host: Host, transport: str) -> None:
    args = [host.info.grpc_address, TOKEN, EMBEDDING_LAYOUT.hex(), transport]
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", SENDER_PROCESS, *args, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert await asyncio.wait_for(child.stdout.readline(), 30) == b"written\n"
    await eventually(lambda: bytes(host.embedding.arena.buffer) == b"y" * ARENA_BYTES)
    assert host.embedding.slots.free_bytes == 0
    child.kill()
    await child.wait()
    await eventually(lambda: host.embedding.lost == [WorkerRef("child", 5)])
    assert host.embedding.slots.free_bytes == ARENA_BYTES and not host.embedding.landed


# --- bugs ------------------------------------------------------------------------------------------------------------


async def test_a_bug_in_answering_ends_the_session_and_frees_nothing_under_a_living_mapping(
    host: Host, shm_link: ReceiverLink
) -> None:
    """Whatever went wrong here, the sender has the arena mapped and may be writing."""
    grant = await shm_link.request_slot(FULL, 0, IDENTITY, 1, 512)
    assert isinstance(grant, SlotGrant)
    (talk,) = host.servicer._talks.values()

    def broken(_: object) -> Never:
        raise RuntimeError("a bug")

    assert talk._wire is not None
    talk._wire.write = broken  # type: ignore[method-assign]
    keeps = SharedSegment.open(host.embedding.arena.segment.name, ARENA_BYTES, mapping_id=talk._mapping_id)  # type: ignore[union-attr]
    with pytest.raises(PeerLost):
        await shm_link.request_slot(REF, 1, IDENTITY, 1, 64, timeout_s=5)
    await asyncio.sleep(0.2)
    assert host.embedding.lost == [] and host.embedding.slots.owned_bytes >= grant.num_bytes
    keeps.close()
    await eventually(lambda: host.embedding.lost == [SENDER.ref])
    assert host.embedding.slots.free_bytes == ARENA_BYTES


async def test_a_commit_under_way_ends_before_the_farewell_whatever_else_breaks(
    host: Host, shm_link: ReceiverLink
) -> None:
    grant = await fill(shm_link)
    (talk,) = host.servicer._talks.values()
    entered, go, ended = asyncio.Event(), asyncio.Event(), list[str]()
    sound = host.embedding.commit_embedding

    async def slow(*arguments: Any) -> None:
        entered.set()
        try:
            await go.wait()
            await sound(*arguments)
            ended.append("taken")
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    def broken(_: object) -> Never:
        raise RuntimeError("a bug")

    host.embedding.commit_embedding = slow  # type: ignore[method-assign]
    checksum = checksum64(bytes(ARENA_BYTES))
    committing = asyncio.create_task(shm_link.commit_embedding(FULL, 0, grant, EmbeddingSource.REMOTE, checksum))
    await entered.wait()
    assert talk._wire is not None
    talk._wire.write = broken  # type: ignore[method-assign]
    await shm_link.abort(REF, None, "makes the receiver answer")
    await asyncio.sleep(0.1)
    go.set()
    await asyncio.gather(committing, return_exceptions=True)
    await eventually(lambda: host.embedding.lost == [SENDER.ref])
    assert ended == ["taken"]


async def test_an_answer_that_fits_no_frame_is_an_error_and_no_silence(host: Host, shm_link: ReceiverLink) -> None:
    sound = host.embedding.request_slot

    async def bug(*arguments: Any) -> SlotGrant | HaveIt:
        answer = await sound(*arguments)
        return replace(answer, generation=-1) if isinstance(answer, SlotGrant) else answer

    host.embedding.request_slot = bug  # type: ignore[method-assign]
    with pytest.raises(TriptychError, match="internal error"):
        await shm_link.request_slot(REF, 0, IDENTITY, 1, 64, timeout_s=2)
    host.embedding.request_slot = sound  # type: ignore[method-assign]
    await send(shm_link, AttemptRef("req-2"), 0, b"next")
