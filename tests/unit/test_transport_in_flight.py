"""The bound on what is on its way to one receiver."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.seed import IS_FULL
from tests.unit import link_house
from tests.unit.link_house import EMBEDDING_LAYOUT, SENDER, Host, eventually, sender_by
from triptych.core.errors import PeerLost
from triptych.obs import metrics
from triptych.transport.in_flight import InFlightLimit
from triptych.transport.receiver_link import ReceiverLink
from triptych.transport.types import ArenaKind

host = link_house.host


def gauges() -> tuple[float, float]:
    return metrics.EMBEDDING_IN_FLIGHT_BYTES._value.get(), metrics.EMBEDDING_PARKED_ITEMS._value.get()


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@dataclass(eq=False)
class Item:
    num_bytes: int
    entering: asyncio.Task[bool]

    @property
    def is_in(self) -> bool:
        return self.entering.done() and not self.entering.cancelled() and self.entering.exception() is None


async def test_what_fits_goes_at_once_and_the_rest_in_order() -> None:
    limit, before = InFlightLimit(100), gauges()
    assert not await limit.enter(60) and not await limit.enter(40)
    entered: list[str] = []

    async def enter(name: str, num_bytes: int) -> None:
        assert await limit.enter(num_bytes)
        entered.append(name)

    tasks = [asyncio.create_task(enter(name, size)) for name, size in (("large", 70), ("small", 1), ("next", 30))]
    await turns()
    assert entered == [] and gauges() == (before[0] + 100, before[1] + 3)
    limit.leave(40)
    await turns()
    assert entered == [], "the small one does not pass the large one, which would never get in"
    limit.leave(60)
    await turns()
    assert entered == ["large", "small"]
    limit.leave(70)
    await asyncio.gather(*tasks)
    assert entered == ["large", "small", "next"] and limit.num_bytes == 31
    limit.leave(1)
    limit.leave(30)
    assert gauges() == before


async def test_one_larger_than_all_of_it_goes_alone() -> None:
    limit = InFlightLimit(100)
    assert not await limit.enter(1000)
    other = asyncio.create_task(limit.enter(1))
    await turns()
    assert not other.done()
    limit.leave(1000)
    assert await other
    limit.leave(1)


@pytest.mark.parametrize("how", ["turn_away", "close"])
async def test_those_who_wait_for_a_receiver_that_is_given_up_are_refused(how: str) -> None:
    limit, before = InFlightLimit(100), gauges()
    await limit.enter(100)
    waiting = [asyncio.create_task(limit.enter(50)) for _ in range(3)]
    await turns()
    waiting[0].cancel()
    getattr(limit, how)("it takes nothing")
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(outcomes[0], asyncio.CancelledError) and all(isinstance(one, PeerLost) for one in outcomes[1:])
    limit.leave(100)
    assert gauges() == before
    if how == "close":
        with pytest.raises(PeerLost):
            await limit.enter(1)
    else:
        assert not await limit.enter(1)
        limit.leave(1)


STEPS = st.one_of(
    st.tuples(st.just("enter"), st.integers(1, 150)),
    st.tuples(st.sampled_from(["leave", "cancel", "let in and cancel", "turn_away", "pause"]), st.just(0)),
)


@given(st.lists(STEPS, max_size=40))
@settings(max_examples=2000 if IS_FULL else 100)
def test_the_bound_holds_and_nothing_is_lost_however_they_come_and_go(steps: list[tuple[str, int]]) -> None:
    async def run() -> None:
        limit, before, items = InFlightLimit(100), gauges(), list[Item]()
        for step, num_bytes in steps:
            inside = [item for item in items if item.is_in]
            waiting = [item for item in items if not item.entering.done()]
            match step:
                case "enter":
                    items.append(Item(num_bytes, asyncio.create_task(limit.enter(num_bytes))))
                case "leave" if inside:
                    items.remove(inside[0])
                    limit.leave(inside[0].num_bytes)
                case "cancel" if waiting:
                    waiting[0].entering.cancel()
                case "let in and cancel" if waiting and inside:
                    items.remove(inside[0])
                    limit.leave(inside[0].num_bytes)
                    waiting[0].entering.cancel()
                case "turn_away":
                    limit.turn_away("it takes nothing")
            await turns()
            held = [item.num_bytes for item in items if item.is_in]
            assert limit.num_bytes == sum(held) and (sum(held) <= 100 or len(held) == 1)
            first = next((item for item in items if not item.entering.done()), None)
            assert first is None or (held and sum(held) + first.num_bytes > 100), "room for the first, and it waits"
            assert limit.num_parked == sum(not item.entering.done() for item in items)
        for item in items:
            item.entering.cancel()
        results = await asyncio.gather(*(item.entering for item in items), return_exceptions=True)
        for item, result in zip(items, results, strict=True):
            if isinstance(result, bool):
                limit.leave(item.num_bytes)
        assert limit.num_bytes == limit.num_parked == 0 and gauges() == before

    asyncio.run(run())


# --- at a link -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["inproc", "shm", "zmq-tcp"])
async def test_a_link_that_ends_refuses_those_who_wait_for_it(host: Host, transport: str) -> None:
    pool = host.pool(sender_by(transport, host))
    link = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    await link.in_flight.enter(link.in_flight.max_bytes)
    waiting = asyncio.create_task(link.in_flight.enter(1))
    await turns()
    await pool.close()
    with pytest.raises(PeerLost):
        await waiting
    link.in_flight.leave(link.in_flight.max_bytes)


async def test_a_receiver_that_does_not_answer_keeps_nobody_waiting_behind_it(host: Host) -> None:
    """It is not asked again by all who wait, one timeout after the other."""
    link = ReceiverLink(SENDER, host.info.ref, ArenaKind.EMBEDDING, EMBEDDING_LAYOUT, in_flight=InFlightLimit(100))
    await link.in_flight.enter(100)
    waiting = asyncio.create_task(link.in_flight.enter(1))
    await turns()
    link._peer_failed("silent")
    await eventually(waiting.done)
    assert isinstance(waiting.exception(), PeerLost)
    link.in_flight.leave(100)
