"""Links and the Transfer service over real gRPC on loopback: what lands, and the pool that keeps the links."""

from __future__ import annotations

import asyncio
from dataclasses import replace

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
    TRANSPORTS,
    Host,
    Pages,
    fill,
    page_of,
    running,
    send,
    sender_by,
)
from triptych.core.errors import NoRoom, PeerLost, TransferRefused
from triptych.core.grant import Grant
from triptych.core.ids import AttemptRef
from triptych.core.plan import EmbeddingSource, Token
from triptych.obs import metrics
from triptych.transport.layout import checksum64
from triptych.transport.link import AskingLink
from triptych.transport.receiver_link import ReceiverLink
from triptych.transport.types import HaveIt, SlotGrant

host, link, shm_link = link_house.host, link_house.link, link_house.shm_link


# --- the straight way ------------------------------------------------------------------------------------------------


async def test_an_embedding_lands(host: Host, link: AskingLink) -> None:
    counter = metrics.EMBEDDING_TRANSFER_BYTES.labels(transport=link.transport)
    before = counter._value.get()
    await send(link, REF, 3, b"x" * 100)
    assert host.embedding.landed[REF, 3].data == b"x" * 100
    assert counter._value.get() - before == 100


async def test_have_it_needs_no_slot(host: Host, link: AskingLink) -> None:
    host.embedding.have[IDENTITY] = EmbeddingSource.RADIX
    assert await link.request_slot(REF, 0, IDENTITY, 1, 64) == HaveIt(EmbeddingSource.RADIX)


async def test_a_request_that_waits_blocks_no_other(host: Host, link: AskingLink) -> None:
    grant = await fill(link)
    waiting = asyncio.create_task(link.request_slot(REF, 0, IDENTITY, 1, 64))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    data = bytes(ARENA_BYTES)
    await link.commit_embedding(FULL, 0, grant, EmbeddingSource.CACHE, checksum64(data))
    assert isinstance(await waiting, SlotGrant)


async def test_many_at_once_never_mix(host: Host, link: AskingLink) -> None:
    refs = [AttemptRef(f"req-{n}") for n in range(200)]
    await asyncio.gather(*(send(link, ref, n % 7, bytes([n % 251]) * (1 + n)) for n, ref in enumerate(refs)))
    for n, ref in enumerate(refs):
        assert host.embedding.landed[ref, n % 7].data == bytes([n % 251]) * (1 + n)
    assert host.embedding.slots.free_bytes == ARENA_BYTES


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_kv_is_bound_and_committed(host: Host, transport: str, seed: int) -> None:
    pool, source = host.pool(sender_by(transport, host)), Pages(seed)
    link = await pool.kv_link(host.info, KV_LAYOUT)
    credit = Grant("grant-1", "prefill-1", 21, b"c" * 16, 4, 0)
    host.kv.credits["grant-1"], host.kv.num_held_tokens = credit, 32
    bound = await link.bind_kv(REF, credit)
    assert bound.groups[0].pages == [0, 1, 2, 3] and bound.generation == 1 and bound.num_held_tokens == 32
    writer = link.page_writer(bound, source, EVENTS)
    assert not writer.is_congested
    assert writer.copy([], 0) == 0
    moved = await asyncio.to_thread(writer.copy, [5, 2], 0) + await asyncio.to_thread(writer.copy, [7], 2)
    assert moved == 3 * PAGES.page_bytes
    await link.commit_kv(REF, bound, 9, moved, Token(0, 5), -2)
    for page, sent in enumerate((5, 2, 7)):
        assert (page_of(host.kv.arena.buffer, page) == source.cells[sent]).all()
    assert not page_of(host.kv.arena.buffer, 3).any()
    assert host.kv.landed["grant-1"].position_delta == -2
    with pytest.raises(TransferRefused, match=r"handle is wrong|no checksum"):
        await link.commit_kv(REF, replace(bound, generation=7), 9, moved, Token(0, 5), 0)
    with pytest.raises(TransferRefused, match="no such grant"):
        await link.bind_kv(REF, replace(credit, capability=b"d" * 16))
    await pool.close()


# --- the pool --------------------------------------------------------------------------------------------------------


async def test_the_pool_makes_one_link_for_all_who_ask(host: Host) -> None:
    pool = host.pool()
    links = await asyncio.gather(*(pool.embedding_link(host.info, EMBEDDING_LAYOUT) for _ in range(20)))
    assert len({id(link) for link in links}) == 1
    await pool.close()
    with pytest.raises(PeerLost):
        await links[0].request_slot(REF, 0, IDENTITY, 1, 64)


async def test_a_caller_that_gives_up_leaves_the_link_to_the_others(host: Host) -> None:
    pool = host.pool()
    hasty = asyncio.create_task(pool.embedding_link(host.info, EMBEDDING_LAYOUT))
    patient = asyncio.create_task(pool.embedding_link(host.info, EMBEDDING_LAYOUT))
    await asyncio.sleep(0)
    hasty.cancel()
    link = await patient
    assert not link.closed.is_set()
    await pool.close()


async def test_the_pool_replaces_a_broken_link(host: Host) -> None:
    pool = host.pool()
    first = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    await first.close()
    second = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    assert second is not first and not second.closed.is_set()
    await pool.close()


async def test_the_pool_forgets_a_failure_and_a_former_epoch(host: Host) -> None:
    pool = host.pool()
    with pytest.raises(TransferRefused):
        await pool.embedding_link(host.info, KV_LAYOUT)
    link = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    async with running(epoch=22) as reborn:
        again = await pool.embedding_link(reborn.info, EMBEDDING_LAYOUT)
        await asyncio.wait_for(link.closed.wait(), 5)
        grant = await again.request_slot(REF, 0, IDENTITY, 1, 64)
        assert isinstance(grant, SlotGrant)
        await pool.close()


async def test_too_much_unanswered_is_no_room(shm_link: ReceiverLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.transport.session.MAX_OUTSTANDING", 2)
    await fill(shm_link)
    waiting = [asyncio.create_task(shm_link.request_slot(REF, n, IDENTITY, 1, 64)) for n in range(2)]
    await asyncio.sleep(0.05)
    with pytest.raises(NoRoom):
        await shm_link.request_slot(REF, 9, IDENTITY, 1, 64)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
