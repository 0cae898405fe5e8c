"""Pages over the data socket: what lands, what fails the commit, and how much may be on its way."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.unit import link_house
from tests.unit.link_house import ARENA_BYTES, EVENTS, PAGES, REF, Host, Pages, eventually, page_of
from tests.unit.zmq_house import WAYS, carrier_of, tampered, zmq_link
from triptych.core.errors import Aborted, NoRoom, TransferRefused, TriptychError
from triptych.core.grant import Grant
from triptych.core.plan import Token
from triptych.transport import zmq_carrier
from triptych.transport.carrier import WriterEvents
from triptych.transport.data_frame import DataHeader, PayloadKind, pack
from triptych.transport.receiver_link import ReceiverLink
from triptych.transport.types import ArenaKind

host = link_house.host


async def bound(link: ReceiverLink, host: Host, grant_id: str = "grant-1") -> Grant:
    credit = Grant(grant_id, "prefill-1", 21, b"c" * 16, 4, 0)
    host.kv.credits[grant_id] = credit
    return await link.bind_kv(REF, credit)


@pytest.mark.parametrize("payload_bytes", [7, 16, 64, 100])
async def test_pages_land_in_their_cells_whatever_a_frame_holds(
    host: Host, payload_bytes: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_carrier, "MAX_PAYLOAD_BYTES", payload_bytes)
    source = Pages(seed)
    async with zmq_link(host, kind=ArenaKind.KV) as link:
        grant = await bound(link, host)
        writer = link.page_writer(grant, source, EVENTS)
        moved = sum([await asyncio.to_thread(writer.copy, [page], first) for first, page in enumerate((3, 6, 1))])
        await link.commit_kv(REF, grant, 9, moved, Token(0, 5), 0)
        for page, sent in enumerate((3, 6, 1)):
            assert (page_of(host.kv.arena.buffer, page) == source.cells[sent]).all()


async def test_a_page_commit_shows_the_sum_of_all_that_was_sent(host: Host, seed: int) -> None:
    """Content that was swapped for other content with a sound frame of its own."""
    async with zmq_link(host, kind=ArenaKind.KV) as link:
        carrier, grant = carrier_of(link), await bound(link, host)

        def swap(number: int, parts: list[bytes]) -> list[list[bytes]]:
            header = DataHeader(
                PayloadKind.PAGES,
                carrier._session,
                carrier._session_key,
                1,
                grant.capability,
                grant.generation,
                0,
                len(parts[1]),
            )
            other = bytes(len(parts[1]))
            return [[pack(header, memoryview(other)), other]]

        tampered(carrier, swap)
        writer = link.page_writer(grant, Pages(seed), EVENTS)
        moved = writer.copy([1], 0)
        with pytest.raises(TransferRefused, match="checksum"):
            await link.commit_kv(REF, grant, 9, moved, Token(0, 5), 0)
        assert not host.kv.landed


async def test_pages_out_of_order_or_beyond_the_grant_fail_the_commit(host: Host, seed: int) -> None:
    for pages, first in (([1], 1), ([1, 2, 3, 4, 5], 0)):
        async with zmq_link(host, kind=ArenaKind.KV) as link:
            failures: list[TriptychError] = []
            grant = await bound(link, host)
            writer = link.page_writer(grant, Pages(seed), WriterEvents(failures.append, lambda: None))
            moved = writer.copy(pages, first)
            assert moved == len(pages) * PAGES.page_bytes
            await asyncio.sleep(0)
            with pytest.raises(TransferRefused):
                await link.commit_kv(REF, grant, 9, moved, Token(0, 5), 0)
            assert len(failures) == 1 and isinstance(failures[0], TransferRefused)
            assert not any(host.kv.arena.buffer)


async def test_pages_that_the_receiver_does_not_have_are_refused_before_anything_runs(host: Host, seed: int) -> None:
    for way in ("shm", *WAYS):
        async with zmq_link(host, way, ArenaKind.KV) as link:
            grant = await bound(link, host)
            (group,) = grant.groups
            (region,) = group.regions
            far = replace(grant, groups=(replace(group, regions=(replace(region, first_page=ARENA_BYTES),)),))
            with pytest.raises(TransferRefused, match="does not have"):
                link.page_writer(far, Pages(seed), EVENTS)
            with pytest.raises(TransferRefused, match="not bound"):
                link.page_writer(replace(grant, grant_id="grant-2"), Pages(seed), EVENTS)


async def test_a_writer_says_when_too_much_is_on_its_way_and_when_not_any_more(
    host: Host, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_carrier, "CONGESTED_BYTES", PAGES.page_bytes)
    relieved = asyncio.Event()
    async with zmq_link(host, kind=ArenaKind.KV) as link:
        grant = await bound(link, host)
        writer = link.page_writer(grant, Pages(seed), WriterEvents(lambda error: None, relieved.set))
        moved = writer.copy([1], 0)
        assert not writer.is_congested
        moved += writer.copy([2], 1)
        assert writer.is_congested
        await asyncio.wait_for(relieved.wait(), 5)
        assert not writer.is_congested
        await link.commit_kv(REF, grant, 9, moved, Token(0, 5), 0)


async def test_a_grant_given_up_while_its_commit_waits_ends_the_commit(
    host: Host, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with zmq_link(host, kind=ArenaKind.KV) as link:
        grant, gate = await bound(link, host), asyncio.Event()
        sent = carrier_of(link)._socket.send_multipart

        async def held(parts: list[bytes], **_: object) -> None:
            await gate.wait()
            await sent(parts)

        carrier_of(link)._socket.send_multipart = held  # type: ignore[method-assign, assignment]
        writer = link.page_writer(grant, Pages(seed), EVENTS)
        moved = writer.copy([1, 2], 0)
        committing = asyncio.create_task(link.commit_kv(REF, grant, 9, moved, Token(0, 5), 0))
        await asyncio.sleep(0.02)
        assert not committing.done()
        await link.abort(REF, grant.grant_id, "given up")
        with pytest.raises(Aborted):
            await asyncio.wait_for(committing, 5)
        gate.set()
        await eventually(lambda: [entry[:2] for entry in host.kv.aborted] == [(REF, "grant-1")])
        assert not host.kv.landed


async def test_more_than_may_ever_be_on_its_way_fails_that_grant_only(
    host: Host, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_carrier, "MAX_IN_FLIGHT_BYTES", 2 * PAGES.page_bytes)
    async with zmq_link(host, kind=ArenaKind.KV) as link:
        first, second = await bound(link, host, "grant-1"), await bound(link, host, "grant-2")
        failures: list[TriptychError] = []
        early = link.page_writer(first, Pages(seed), EVENTS)
        late = link.page_writer(second, Pages(seed), WriterEvents(failures.append, lambda: None))
        moved = early.copy([0, 1, 2], 0)  # alone on the link it may be as large as it is
        assert late.copy([1], 0) == PAGES.page_bytes
        await link.commit_kv(REF, first, 9, moved, Token(0, 5), 0)
        with pytest.raises(NoRoom):
            await link.commit_kv(REF, second, 9, PAGES.page_bytes, Token(0, 5), 0)
        assert [type(error) for error in failures] == [NoRoom]
        assert list(host.kv.landed) == ["grant-1"]
