"""`nixl` with a fake network in the library's place: what lands, who waits for whom, and every way it can fail. The
straight way is shown with the library, too, where it is installed."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.unit.link_house import (
    ARENA_BYTES,
    EMBEDDING_LAYOUT,
    EVENTS,
    IDENTITY,
    KV_LAYOUT,
    PAGES,
    REF,
    Pages,
    eventually,
    page_of,
    send,
)
from tests.unit.nixl_house import NixlHost, running
from triptych.core.errors import Aborted, DeadlineExceeded, InvalidRequest, PeerLost, TransferRefused, TriptychError
from triptych.core.failpoints import parse_failpoints
from triptych.core.grant import Grant
from triptych.core.ids import AttemptRef
from triptych.core.plan import EmbeddingSource, Token
from triptych.faults import points
from triptych.obs import metrics
from triptych.testing.fake_nixl import FakeNetwork, FakeNixl
from triptych.transport import frames, nixl_arena, nixl_carrier
from triptych.transport.carrier import WriterEvents
from triptych.transport.layout import checksum64
from triptych.transport.link_pool import LinkPool
from triptych.transport.nixl_api import MAX_METADATA_BYTES, NixlAddress, NixlDriver, NixlError, check_runs
from triptych.transport.nixl_driver import UcxDriver, engine_config
from triptych.transport.types import SlotGrant
from triptych.wire.v1 import transfer_pb2 as wire

NETWORK = "TLS=^sm,TCP_CONN_NB=y"
GRANT = Grant("grant-1", "prefill-1", 21, b"c" * 16, 4, 0)
NOT_INSTALLED = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="the extra `nixl` is not installed here"
)


@pytest.fixture
async def network() -> AsyncIterator[FakeNetwork]:
    made = FakeNetwork()
    yield made
    assert made.violations == [] and made.arenas == {}
    await eventually(lambda: made.num_open_sources == 0)


@pytest.fixture
async def host(network: FakeNetwork) -> AsyncIterator[NixlHost]:
    async with running(FakeNixl(network)) as started:
        yield started


@pytest.fixture
async def pool(host: NixlHost, network: FakeNetwork) -> AsyncIterator[LinkPool]:
    made = host.pool()
    yield made
    network.release()
    await made.close()


@pytest.fixture(params=["fake", pytest.param("ucx", marks=NOT_INSTALLED)])
async def any_driver(request: pytest.FixtureRequest) -> NixlDriver:
    return FakeNixl(FakeNetwork()) if request.param == "fake" else await asyncio.to_thread(UcxDriver, "127.0.0.1")


def fallbacks() -> float:
    return float(metrics.FALLBACKS.labels("transport_nixl")._value.get())


async def slot_of(link: Any, num_bytes: int = 256, index: int = 0) -> SlotGrant:
    grant = await link.request_slot(REF, index, IDENTITY, 1, num_bytes)
    assert isinstance(grant, SlotGrant)
    return grant


async def bound_link(host: NixlHost, pool: LinkPool) -> tuple[Any, Grant]:
    host.kv.credits[GRANT.grant_id] = GRANT
    link = await pool.kv_link(host.info, KV_LAYOUT)
    return link, await link.bind_kv(REF, GRANT)


# --- the straight way, by both networks -------------------------------------------------------------------------------


async def test_embeddings_land_in_the_arena(any_driver: NixlDriver, seed: int) -> None:
    """Of one block, of several, and of one that ends within a block."""
    counter = metrics.EMBEDDING_TRANSFER_BYTES.labels(transport="nixl")
    before, sizes = counter._value.get(), (1, 4096, nixl_carrier.BLOCK_BYTES + 7, 3 * nixl_carrier.BLOCK_BYTES)
    async with running(any_driver, 8 << 20) as host:
        pool = host.pool()
        link: Any = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
        assert link.transport == "nixl"
        sent = [np.random.default_rng(seed + n).bytes(size) for n, size in enumerate(sizes)]
        await asyncio.gather(*(send(link, AttemptRef(f"req-{n}"), 0, data) for n, data in enumerate(sent)))
        for n, data in enumerate(sent):
            assert host.embedding.landed[AttemptRef(f"req-{n}"), 0].data == data
        assert counter._value.get() == before + sum(sizes)
        await pool.close()
        await eventually(lambda: len(host.embedding.lost) == 1)


async def test_pages_land_in_the_pool_each_cell_once(any_driver: NixlDriver, seed: int) -> None:
    async with running(any_driver) as host:
        pool = host.pool()
        link, bound = await bound_link(host, pool)
        source = Pages(seed)
        writer = link.page_writer(bound, source, EVENTS)
        moved = await asyncio.to_thread(writer.copy, [5, 2], 0) + await asyncio.to_thread(writer.copy, [7], 2)
        assert moved == 3 * PAGES.page_bytes and writer.copy([], 3) == 0
        await link.commit_kv(REF, bound, 9, moved, Token(0, 5), -2)
        for page, sent in enumerate((5, 2, 7)):
            assert (page_of(host.kv.arena.buffer, page) == source.cells[sent]).all()
        assert not page_of(host.kv.arena.buffer, 3).any() and host.kv.landed[GRANT.grant_id].num_bytes == moved
        await pool.close()


async def test_neighbouring_pages_are_one_run_in_a_plane(
    host: NixlHost, pool: LinkPool, network: FakeNetwork, seed: int
) -> None:
    link, bound = await bound_link(host, pool)
    writer = link.page_writer(bound, Pages(seed), EVENTS)
    network.hold()
    writer.copy([1, 2, 3, 4], 0)
    await eventually(lambda: len(network.waiting) == 1)
    assert len(network.waiting[0]._runs) == PAGES.num_planes
    network.release()
    await link.commit_kv(REF, bound, 9, 4 * PAGES.page_bytes, Token(0, 5), 0)


async def test_what_is_larger_than_all_blocks_goes_through_them(
    host: NixlHost, pool: LinkPool, network: FakeNetwork, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that are larger than a block, too: 64 bytes each."""
    monkeypatch.setattr(nixl_carrier, "BLOCK_BYTES", 24)
    monkeypatch.setattr("triptych.transport.ways.STAGING_BYTES", 72)
    link: Any = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    data = np.random.default_rng(seed).bytes(1000)
    await send(link, REF, 0, data)
    assert host.embedding.landed[REF, 0].data == data and network.num_writes == 42
    kv_link, bound = await bound_link(host, pool)
    source = Pages(seed)
    writer = kv_link.page_writer(bound, source, EVENTS)
    await asyncio.to_thread(writer.copy, [3, 0, 6], 0)
    await kv_link.commit_kv(REF, bound, 9, 3 * PAGES.page_bytes, Token(0, 5), 0)
    for page, sent in enumerate((3, 0, 6)):
        assert (page_of(host.kv.arena.buffer, page) == source.cells[sent]).all()


# --- commit and abort come after the last write -----------------------------------------------------------------------


async def test_a_commit_waits_for_the_write(host: NixlHost, pool: LinkPool, network: FakeNetwork) -> None:
    link: Any = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    network.hold()
    sending = asyncio.create_task(send(link, REF, 0, b"x" * 64))
    await eventually(lambda: len(network.waiting) == 1)
    await asyncio.sleep(0.1)
    assert not sending.done() and not host.embedding.landed and not any(host.embedding.arena.buffer)
    network.release()
    await sending
    assert host.embedding.landed[REF, 0].data == b"x" * 64


async def test_who_is_cancelled_in_a_write_leaves_only_after_it(
    host: NixlHost, pool: LinkPool, network: FakeNetwork
) -> None:
    link: Any = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    grant = await slot_of(link)
    network.hold()
    writing = asyncio.create_task(link.write_slot(grant, memoryview(bytes(256))))
    await eventually(lambda: len(network.waiting) == 1)
    for _ in range(3):
        writing.cancel()
        await asyncio.sleep(0.02)
        assert not writing.done()
    network.release()
    with pytest.raises(asyncio.CancelledError):
        await writing
    await link.abort(REF, None, "given up")
    await eventually(lambda: host.embedding.slots.free_bytes == ARENA_BYTES)


async def test_what_is_queued_when_its_sender_is_cancelled_is_never_written(
    host: NixlHost, pool: LinkPool, network: FakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_carrier, "BLOCK_BYTES", 64)
    monkeypatch.setattr("triptych.transport.ways.STAGING_BYTES", 64)
    link: Any = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    grant = await slot_of(link)
    network.hold()
    writing = asyncio.create_task(link.write_slot(grant, memoryview(b"y" * 256)))
    await eventually(lambda: len(network.waiting) == 1)
    writing.cancel()
    await asyncio.sleep(0)  # it hears of it
    network.release()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert bytes(host.embedding.arena.buffer[:256]) == b"y" * 64 + bytes(192)
    await send(link, AttemptRef("req-2"), 0, b"z" * 200)
    assert host.embedding.landed[AttemptRef("req-2"), 0].data == b"z" * 200


async def test_a_commit_of_pages_waits_and_so_does_an_abort(
    host: NixlHost, pool: LinkPool, network: FakeNetwork, seed: int
) -> None:
    link, bound = await bound_link(host, pool)
    writer = link.page_writer(bound, Pages(seed), EVENTS)
    network.hold()
    await asyncio.to_thread(writer.copy, [1, 2], 0)
    with pytest.raises(DeadlineExceeded):
        await link.commit_kv(REF, bound, 9, 128, Token(0, 5), 0, timeout_s=0.05)
    assert not host.kv.landed
    aborting = asyncio.create_task(link.abort(REF, GRANT.grant_id, "given up"))
    await asyncio.sleep(0.1)
    assert not aborting.done() and not host.kv.aborted
    writer.copy([4], 2)  # after the cancel: goes nowhere
    await asyncio.sleep(0.02)
    assert len(network.waiting) == 1
    network.release()
    await aborting
    await eventually(lambda: len(host.kv.aborted) == 1)
    assert not page_of(host.kv.arena.buffer, 2).any()
    with pytest.raises(Aborted):
        await writer.flush()


async def test_pages_out_of_order_or_beyond_the_grant_fail_the_commit(
    host: NixlHost, pool: LinkPool, seed: int
) -> None:
    link, bound = await bound_link(host, pool)
    for pages, first in (([1], 1), ([1, 2, 3, 4, 5], 0)):
        failed = list[TriptychError]()
        writer = link.page_writer(bound, Pages(seed), WriterEvents(failed.append, lambda: None))
        writer.copy(pages, first)
        await eventually(lambda failed=failed: len(failed) == 1)
        with pytest.raises(TransferRefused, match="in order"):
            await link.commit_kv(REF, bound, 9, 64, Token(0, 5), 0)
    assert not any(host.kv.arena.buffer)


async def test_congestion_is_told_and_ends(
    host: NixlHost, pool: LinkPool, network: FakeNetwork, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_carrier, "CONGESTED_BYTES", 1)
    monkeypatch.setattr("triptych.transport.zmq_carrier.CONGESTED_BYTES", 1)
    monkeypatch.setattr("triptych.transport.zmq_carrier.MAX_IN_FLIGHT_BYTES", 2 * PAGES.page_bytes)
    monkeypatch.setattr(nixl_carrier, "BLOCK_BYTES", 64)
    monkeypatch.setattr("triptych.transport.ways.STAGING_BYTES", 64)
    link, bound = await bound_link(host, pool)
    relieved, failed = asyncio.Event(), list[TriptychError]()
    writer = link.page_writer(bound, Pages(seed), WriterEvents(failed.append, relieved.set))
    network.hold()
    assert not writer.is_congested
    writer.copy([1, 2], 0)
    await eventually(lambda: len(network.waiting) == 1)
    assert writer.is_congested and not relieved.is_set()
    network.release()
    await asyncio.wait_for(relieved.wait(), 5)
    assert not writer.is_congested and not failed
    network.hold()
    writer.copy([1], 2)
    writer.copy([2, 3], 3)  # more than may be under way, and beyond the grant
    await eventually(lambda: len(failed) == 1)
    network.release()
    with pytest.raises(TriptychError):
        await link.commit_kv(REF, bound, 9, 1, Token(0, 5), 0)


# --- what a commit shows ----------------------------------------------------------------------------------------------


async def test_pages_that_are_not_what_was_sent_are_refused(host: NixlHost, pool: LinkPool, seed: int) -> None:
    link, bound = await bound_link(host, pool)
    writer = link.page_writer(bound, Pages(seed), EVENTS)
    await asyncio.to_thread(writer.copy, [1, 2], 0)
    await writer.flush()
    host.kv.arena.buffer[3] ^= 1
    with pytest.raises(TransferRefused, match="checksum is wrong"):
        await link.commit_kv(REF, bound, 9, 2 * PAGES.page_bytes, Token(0, 5), 0)
    assert not host.kv.landed
    host.kv.arena.buffer[3] ^= 1
    for wrong_bytes in (PAGES.page_bytes, 2 * PAGES.page_bytes - 1, 5 * PAGES.page_bytes):
        with pytest.raises(TransferRefused, match=r"checksum is wrong|another length"):
            await link.commit_kv(REF, bound, 9, wrong_bytes, Token(0, 5), 0)
    await link.commit_kv(REF, bound, 9, 2 * PAGES.page_bytes, Token(0, 5), 0)
    assert GRANT.grant_id in host.kv.landed


async def test_a_commit_of_pages_without_a_checksum_or_a_grant_is_refused(host: NixlHost, pool: LinkPool) -> None:
    link, bound = await bound_link(host, pool)
    with pytest.raises(TransferRefused, match="shows no checksum"):
        await link.commit_kv(REF, bound, 9, PAGES.page_bytes, Token(0, 5), 0)  # nobody wrote, so there is none
    await link.abort(REF, GRANT.grant_id, "given up")
    await eventually(lambda: len(host.kv.aborted) == 1)
    (talk,) = host.servicer._talks.values()
    assert talk._written is not None and not talk._written._pages
    assert not host.kv.landed


async def test_an_embedding_with_another_checksum_is_refused(host: NixlHost, pool: LinkPool) -> None:
    link: Any = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    grant = await slot_of(link)
    await link.write_slot(grant, memoryview(b"a" * 256))
    with pytest.raises(TransferRefused, match="checksum"):
        await link.commit_embedding(REF, 0, grant, EmbeddingSource.REMOTE, checksum64(b"b" * 256))


# --- the ladder -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("refuses_to_connect", "cannot be reached by NIXL"),
        ("refuses_to_expose", "the receiver cannot show its memory"),
    ],
)
async def test_a_way_that_cannot_be_is_a_counted_fallback(
    host: NixlHost, network: FakeNetwork, fault: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    setattr(network, fault, True)
    pool, before = host.pool(("nixl", "zmq-tcp")), fallbacks()
    link: Any = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    assert link.transport == "zmq" and fallbacks() == before + 1
    assert any(why in getattr(record, "reason", "") for record in caplog.records)
    await send(link, REF, 0, b"x" * 64)
    assert host.embedding.landed[REF, 0].data == b"x" * 64
    for stubborn in (host.pool(("nixl",)), host.pool(("nixl", "zmq-tcp"), strict=True)):
        with pytest.raises(TransferRefused, match="nixl to another worker does not work"):
            await stubborn.embedding_link(host.info, EMBEDDING_LAYOUT)
        await stubborn.close()
    await pool.close()
    await eventually(lambda: not host.servicer._talks)


async def test_who_gives_up_while_a_link_is_made_leaves_nothing_open(
    host: NixlHost, network: FakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, connect = asyncio.Event(), FakeNixl.connect
    loop = asyncio.get_running_loop()

    def slowly(self: FakeNixl, *arguments: Any) -> Any:
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(10)
        return connect(self, *arguments)

    monkeypatch.setattr(FakeNixl, "connect", slowly)
    pool = host.pool()
    with pytest.raises(DeadlineExceeded):
        await pool.embedding_link(host.info, EMBEDDING_LAYOUT, timeout_s=0.1)
    closing = asyncio.create_task(pool.close())
    await eventually(lambda: not host.servicer._talks)
    gate.set()
    await closing
    await eventually(lambda: network.num_open_sources == 0 and not network.arenas)


def metadata_of(num_bytes: int, base: int = 4096) -> wire.HelloAck:
    return wire.HelloAck(
        worker_id="w",
        epoch=1,
        transport="nixl",
        segment_bytes=ARENA_BYTES,
        nixl=wire.NixlAddress(metadata=b"m" * num_bytes, base=base),
    )


def test_an_address_comes_back_as_it_was_and_is_bounded() -> None:
    sound = frames.welcome_from_frame(metadata_of(MAX_METADATA_BYTES))
    assert sound.nixl == NixlAddress(b"m" * MAX_METADATA_BYTES, 4096)
    assert "mmm" not in repr(sound) and "4096" not in repr(sound.nixl)
    top = 2**63 - 1 - ARENA_BYTES
    assert frames.welcome_from_frame(metadata_of(1, top)).nixl == NixlAddress(b"m", top)
    for bad in (metadata_of(0), metadata_of(MAX_METADATA_BYTES + 1), metadata_of(1, 0), metadata_of(1, top + 1)):
        with pytest.raises(InvalidRequest):
            frames.welcome_from_frame(bad)


async def test_metadata_without_end_is_not_sent(
    network: FakeNetwork, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nixl_arena, "MAX_METADATA_BYTES", 3)
    async with running(FakeNixl(network)) as host:
        pool = host.pool(("nixl", "zmq-tcp"))
        link: Any = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
        assert link.transport == "zmq" and "says too much" in caplog.text
        await pool.close()


async def test_metadata_is_read_only_in_a_session_of_the_receiver_that_was_dialled(
    host: NixlHost, network: FakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another epoch answers: what it says is not looked at. And without the token nothing is shown at all."""
    read = list[NixlAddress]()

    def counted(self: FakeNixl, address: NixlAddress, *_: Any) -> Any:
        read.append(address)
        raise NixlError("not reached")

    monkeypatch.setattr(FakeNixl, "connect", counted)
    pool = host.pool()
    with pytest.raises(PeerLost, match="another worker answers"):
        await pool.embedding_link(replace(host.info, epoch=22), EMBEDDING_LAYOUT)
    await eventually(lambda: not network.arenas)
    await pool.close()
    assert not read


# --- the end of a session ---------------------------------------------------------------------------------------------


async def test_a_lost_senders_slots_are_free_only_when_it_can_write_no_more(
    host: NixlHost, network: FakeNetwork, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has a write on the way, and the receiver does not get rid of it at once."""
    monkeypatch.setattr(nixl_arena, "RETRY_S", 0.01)
    pool = host.pool()
    link: Any = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    grant = await slot_of(link)
    network.hold()
    writing = asyncio.create_task(link.write_slot(grant, memoryview(b"w" * 256)))
    await eventually(lambda: len(network.waiting) == 1)
    network.refuses_to_revoke = True
    next(iter(host.servicer._talks.values())).hang_up()
    with pytest.raises(PeerLost):
        await writing
    await asyncio.sleep(0.1)
    assert host.embedding.lost == [] and host.embedding.slots.owned_bytes == 256
    assert "still reaches the arena" in caplog.text
    network.refuses_to_revoke = False
    await eventually(lambda: len(host.embedding.lost) == 1)
    assert host.embedding.slots.free_bytes == ARENA_BYTES
    network.release()
    assert not any(host.embedding.arena.buffer), "the late write found nothing"
    await pool.close()


async def test_a_late_write_of_a_lost_sender_reaches_nobody(host: NixlHost, network: FakeNetwork) -> None:
    """Its sending end is still open: only the receiver has ended the session, as with a process that is stopped."""
    source = await asyncio.to_thread(_own_source, host)
    network.hold()
    transfer = source.write(0, np.array([[0, 64]]))
    for target in list(network.arenas):
        network.arenas.pop(target)
    network.release()
    with pytest.raises(NixlError):
        transfer.is_done()
    assert not any(host.embedding.arena.buffer)
    source.close()


def _own_source(host: NixlHost) -> Any:
    target = host.driver.expose(host.embedding.arena.buffer)
    return host.driver.connect(target.address, ARENA_BYTES, 4096)


async def test_a_second_session_of_a_sender_has_a_way_in_of_its_own(host: NixlHost, network: FakeNetwork) -> None:
    first, second = host.pool(), host.pool()
    link: Any = await first.embedding_link(host.info, EMBEDDING_LAYOUT)
    (former,) = network.arenas
    other: Any = await second.embedding_link(host.info, EMBEDDING_LAYOUT)
    await eventually(lambda: link.closed.is_set())
    assert former not in network.arenas and len(network.arenas) == 1
    await send(other, REF, 0, b"x" * 64)
    await first.close()
    await second.close()


async def test_a_receiver_that_stops_has_nothing_exposed(network: FakeNetwork) -> None:
    async with running(FakeNixl(network)) as host:
        pool = host.pool()
        link: Any = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
        assert len(network.arenas) == 1
        await host.servicer.close()
        assert not network.arenas
        await eventually(lambda: link.closed.is_set())
        await pool.close()


# --- a network that fails ---------------------------------------------------------------------------------------------


async def test_a_peer_that_takes_nothing_breaks_the_link(
    host: NixlHost, pool: LinkPool, network: FakeNetwork, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_carrier, "STALLED_S", 0.1)
    link, bound = await bound_link(host, pool)
    failed = list[TriptychError]()
    writer = link.page_writer(bound, Pages(seed), WriterEvents(failed.append, lambda: None))
    network.hold()
    await asyncio.to_thread(writer.copy, [1], 0)
    with pytest.raises(PeerLost):
        await link.commit_kv(REF, bound, 9, 64, Token(0, 5), 0)
    await eventually(lambda: link.closed.is_set())
    assert [type(error) for error in failed] == [PeerLost]
    writer.copy([2], 1)
    assert network.num_writes == 1
    await asyncio.wait_for(writer.settle(), 5)
    await eventually(lambda: len(host.kv.lost) == 1)
    with pytest.raises(PeerLost, match="left alone for a while"):
        await pool.kv_link(host.info, KV_LAYOUT)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_network_that_breaks_is_a_lost_peer(
    host: NixlHost, pool: LinkPool, network: FakeNetwork, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    link: Any = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    grant = await slot_of(link)
    network.hold()
    if when == "before":
        network.is_broken = True
    writing = asyncio.create_task(link.write_slot(grant, memoryview(b"w" * 256)))
    await eventually(lambda: len(network.waiting) == 1)
    network.is_broken = True
    network.release()
    with pytest.raises(PeerLost):
        await writing
    await eventually(lambda: link.closed.is_set() and len(host.embedding.lost) == 1)
    assert "failed" in caplog.text and host.embedding.slots.free_bytes == ARENA_BYTES
    with pytest.raises(PeerLost):
        await link.write_slot(grant, memoryview(bytes(256)))


async def test_a_failpoint_stands_before_each_block(host: NixlHost, pool: LinkPool, network: FakeNetwork) -> None:
    link: Any = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    points.arm(parse_failpoints("link.before_frame=error(peer_lost)*1"))
    try:
        with pytest.raises(PeerLost):
            await send(link, REF, 0, b"x" * 64)
    finally:
        points.arm(())
    assert network.num_writes == 0
    await eventually(lambda: link.closed.is_set())


# --- the library ------------------------------------------------------------------------------------------------------


def test_ucx_is_told_to_stay_on_the_network_and_on_loopback() -> None:
    assert engine_config("127.0.0.1", {}) == engine_config("localhost", {}) == f"{NETWORK},NET_DEVICES=lo"
    assert engine_config("10.0.0.7", {}) == engine_config("10.0.0.7", {"UCX_TLS": "rc,tcp"}) == NETWORK
    for ways in ("all", "rc,cma", "SHM,tcp", "^cma", "xpmem"):
        with pytest.raises(NixlError, match="UCX_TLS"):
            engine_config("10.0.0.7", {"UCX_TLS": ways})
    with pytest.raises(NixlError, match="UCX_NET_DEVICES"):
        engine_config("127.0.0.1", {"UCX_NET_DEVICES": "mlx5_0:1"})


@pytest.mark.skipif(importlib.util.find_spec("nixl") is not None, reason="the extra `nixl` is installed here")
def test_a_library_that_is_missing_is_told_in_words() -> None:
    with pytest.raises(NixlError, match=r"not installed here .* pip install 'triptych\[nixl\]'"):
        UcxDriver("127.0.0.1")


@pytest.mark.parametrize("runs", [[], [[-1, 4]], [[0, 0]], [[60, 5]], [[0, 4], [64, 1]], [[2**62, 2**62]]])
def test_runs_outside_of_the_arena_are_refused(runs: list[list[int]]) -> None:
    with pytest.raises(NixlError, match="outside"):
        check_runs(np.array(runs, dtype=np.int64).reshape(-1, 2), 64)
    check_runs(np.array([[0, 64], [63, 1]]), 64)
