"""The end of a router: nobody new, and those under way end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from services.router.app import Model
from services.router.drain import Drain
from services.router.pipeline import Answer
from tests.unit import router_house
from tests.unit.router_house import error_of, serve

model = router_house.model


async def answers_under_a_stop(model: Model, drain: Drain) -> tuple[list[int], list[int], bool]:
    """Statuses of requests under way when it began, of those that came later, and whether all had ended at its end."""
    go_on = asyncio.Event()
    async with serve(model, drain=drain) as api:

        async def wait(answer: Answer) -> None:
            await go_on.wait()
            await api.pipeline.say(answer)

        api.pipeline.drive = wait
        before = [asyncio.create_task(api.chat(stream=stream)) for stream in (False, True)]
        while len(api.pipeline.plans) < 2:  # noqa: ASYNC110 - the requests come through threads
            await asyncio.sleep(0.01)
        drain.begin()
        end = asyncio.create_task(drain.finished(5))
        late = asyncio.create_task(api.chat())
        for path in ("/ready", "/health/ready"):
            answer = await api.client.get(path)
            assert (answer.status_code, answer.json()["status"]) == (503, "stopping")
        assert (await api.client.get("/health")).status_code == 200, "it lives"
        await asyncio.sleep(0.05)
        is_early = end.done()
        go_on.set()
        statuses = [(await task).status_code for task in before]
        left = await end
        return statuses, [(await late).status_code], not left and not is_early


async def test_those_under_way_end_and_nobody_new_comes(model: Model) -> None:
    assert await answers_under_a_stop(model, Drain()) == ([200, 200], [503], True)


class LetsIn(Drain):
    @contextmanager
    def under_way(self) -> Iterator[None]:
        self._count(1)
        yield
        self._count(-1)


class CountsNobody(Drain):
    def _count(self, change: int) -> None:
        pass


@pytest.mark.parametrize("broken", [LetsIn, CountsNobody])
async def test_a_broken_drain_is_found(broken: type[Drain], model: Model) -> None:
    assert await answers_under_a_stop(model, broken()) != ([200, 200], [503], True)


async def test_what_is_refused_says_so_and_when_to_come_again(model: Model) -> None:
    drain = Drain()
    drain.begin()
    async with serve(model, drain=drain) as api:
        refused = await api.chat()
        assert error_of(refused, 503)["code"] == "unavailable"
        assert refused.headers["retry-after"] == "1"
    assert await drain.finished(5) == 0


async def test_what_does_not_end_is_counted_at_the_end_of_its_time() -> None:
    drain = Drain()
    with drain.under_way():
        drain.begin()
        assert await drain.finished(0.01) == 1
    assert drain.num_under_way == 0
