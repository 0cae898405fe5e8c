"""A cluster that is full is a 503 that says when to come again, as fast as the line has moved; a tenant that has had
its share is a 429."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.admission.fair_line import Ticket
from services.router.admission.key_file import load_keyring
from services.router.admission.turnover import NUM_GAPS, Turnover
from services.router.app import Model
from services.router.pipeline import Answer
from services.router.queue import AdmissionQueue
from tests.unit import router_house
from tests.unit.router_house import error_of, serve
from triptych.core.errors import NoRoom, Saturated, TriptychError

model = router_house.model
KEY = "tk-of-acme-0123456789"

# --- how fast the line moves ------------------------------------------------------------------------------------------


def moved(gaps_s: list[float]) -> tuple[Turnover, float]:
    turnover, now_s = Turnover(), 100.0
    turnover.waiting(now_s)
    for gap_s in gaps_s:
        now_s += gap_s
        turnover.served(now_s)
        turnover.waiting(now_s)
    return turnover, now_s


@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=200), st.integers(0, 1000))
def test_a_line_takes_its_length_times_the_mean_of_the_last_gaps(gaps_s: list[float], num_waiting: int) -> None:
    turnover, now_s = moved(gaps_s)
    last = gaps_s[-NUM_GAPS:]
    assert turnover.wait_s(num_waiting, now_s) == pytest.approx(num_waiting * sum(last) / len(last))


def test_time_in_which_nobody_waits_is_none() -> None:
    turnover, now_s = moved([2.0, 2.0])
    turnover.nobody_waits()
    assert turnover.wait_s(3, now_s + 1000) == pytest.approx(6.0)
    turnover.waiting(now_s + 1000)
    turnover.served(now_s + 1002)
    assert turnover.wait_s(3, now_s + 1002) == pytest.approx(6.0)


def test_a_line_that_stands_still_is_slower_by_the_second() -> None:
    turnover, now_s = moved([1.0, 1.0])
    waits = [turnover.wait_s(1, now_s + seconds) for seconds in (0.0, 0.5, 1.0, 10.0, 100.0)]
    assert waits[:3] == [1.0, 1.0, 1.0]
    assert waits[3:] == pytest.approx([4.0, 34.0])
    nothing = Turnover()
    assert nothing.wait_s(9, 5.0) == 0.0
    nothing.waiting(5.0)
    assert nothing.wait_s(9, 7.0) == pytest.approx(18.0)


class Forever:
    """A cluster with as many places as it is given."""

    def __init__(self) -> None:
        self.free = 0

    async def ask(self) -> str | None:
        await asyncio.sleep(0)
        if not self.free:
            return None
        self.free -= 1
        return "room"


async def refused_after(num_served: int, each_s: float) -> float:
    """What a newcomer to a full line of four is told, when places have come free so fast."""
    now = [0.0]
    queue, room = AdmissionQueue(4, lambda: now[0]), Forever()
    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(queue.admit(room.ask)) for _ in range(4)]
        await asyncio.sleep(0.01)
        for number in range(num_served):
            now[0] += each_s
            room.free += 1
            queue.room_may_be_free()
            await waiting[number]
            waiting.append(group.create_task(queue.admit(room.ask)))
            await asyncio.sleep(0.01)
        with pytest.raises(Saturated) as caught:
            await queue.admit(room.ask)
        for task in waiting:
            task.cancel()
    assert caught.value.retry_after_s is not None
    return caught.value.retry_after_s


async def test_who_finds_the_line_full_hears_how_long_it_will_take() -> None:
    assert await refused_after(6, 0.5) == pytest.approx(4 * 0.5)
    assert await refused_after(6, 20.0) == pytest.approx(4 * 20.0)


async def test_who_loses_its_place_to_others_hears_it_too() -> None:
    queue, room = AdmissionQueue(2), Forever()
    first = [asyncio.create_task(queue.admit(room.ask, Ticket("a"))) for _ in range(2)]
    await asyncio.sleep(0.05)
    other = asyncio.create_task(queue.admit(room.ask, Ticket("b")))
    with pytest.raises(Saturated) as caught:
        await first[1]
    assert caught.value.http_status == 503
    assert caught.value.retry_after_s is not None and caught.value.retry_after_s > 0
    for task in (*first, other):
        task.cancel()


# --- 429 or 503 -------------------------------------------------------------------------------------------------------


def failing(error: TriptychError) -> Callable[[Answer], object]:
    async def fail(_: Answer) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("retry_after_s", "shown"), [(None, 1), (0.0, 1), (0.2, 1), (7.01, 8), (1e9, 3600), (math.inf, 3600)]
)
@pytest.mark.parametrize("kind", [NoRoom, Saturated])
async def test_a_full_cluster_is_503_and_says_when(
    kind: type[NoRoom], retry_after_s: float | None, shown: int, model: Model
) -> None:
    async with serve(model) as api:
        api.pipeline.drive = failing(kind("full", retry_after_s=retry_after_s))
        for stream in (False, True):
            refused = await api.chat(stream=stream)
            assert error_of(refused, 503)["type"] == "service_unavailable_error"
            assert refused.headers["retry-after"] == str(shown)


async def test_one_tenant_meets_its_own_limit_and_the_clusters(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f"[tenants.acme]\nkeys = ['{KEY}']\nrequests_per_minute = 3\n")
    async with serve(model, keyring=load_keyring(path, ())) as api:
        headers = {"authorization": f"Bearer {KEY}"}
        api.pipeline.drive = failing(Saturated("full", retry_after_s=9.0))
        answers = [await api.chat(headers=headers) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [503, 503, 503, 429]
    assert [error_of(answer, answer.status_code)["code"] for answer in answers[2:]] == ["saturated", "rate_limited"]
    assert answers[0].headers["retry-after"] == "9"
    assert 15 <= int(answers[3].headers["retry-after"]) <= 20
