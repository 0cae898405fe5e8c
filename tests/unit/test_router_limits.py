"""What tenants may use: buckets and ledgers alone, and 429s of the API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from services.router.admission.bucket import Bucket
from services.router.admission.key_file import load_keyring
from services.router.admission.keyring import Keyring
from services.router.admission.ledger import Cost, Ledger, TooMuch
from services.router.admission.meter import LocalMeter
from services.router.admission.tenants import Rates, Tenant
from services.router.app import Model
from services.router.http import error_response
from services.router.pipeline import Answer
from services.router.settings import share_of
from tests.unit import router_house
from tests.unit.router_house import Api, error_of, picture, serve
from triptych.core.clock import SystemClock
from triptych.core.errors import NoRoom, RateLimited, RequestTooLarge

model = router_house.model
KEY_A, KEY_B = "tk-of-acme-0123456789", "tk-of-beta-0123456789"
A, B = ({"authorization": f"Bearer {key}"} for key in (KEY_A, KEY_B))

NO_RATES = Rates()

# --- buckets and ledgers ----------------------------------------------------------------------------------------------

steps = st.lists(st.tuples(st.floats(0, 30), st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=60)


@given(st.integers(50, 500), steps)
def test_no_minute_gives_more_than_burst_and_refill(per_minute: int, moves: list[tuple[float, int, int]]) -> None:
    """Over any stretch of time, what was taken less what was given back is at most one burst and what came in."""
    bucket, now_s, taken = Bucket(per_minute, 0.0), 0.0, [(0.0, 0.0)]
    for pause_s, amount, unused in moves:
        now_s += pause_s
        wait_s = bucket.wait_s(amount, now_s)
        if wait_s == 0:
            bucket.take(amount, now_s)
            bucket.give_back(min(unused, amount), now_s)
            taken.append((now_s, amount - min(unused, amount)))
        else:
            assert bucket.wait_s(amount, now_s + wait_s) < 1e-6, "who waits as long gets it"
            assert bucket.wait_s(amount, now_s + wait_s * 0.9 - 1e-6) > 0, "and not much sooner"
        assert -1e-6 <= bucket.level(now_s) <= per_minute
    for start in range(len(taken)):
        length_s = now_s - taken[start][0]
        used = sum(amount for _, amount in taken[start:])
        assert used <= per_minute * (1 + length_s / 60) + 1e-6


def ledger(rates: Rates = NO_RATES, max_concurrent: int | None = None) -> Ledger:
    return Ledger(Tenant("t", rates, max_concurrent), 0.0)


def test_a_charge_is_all_or_nothing() -> None:
    both = ledger(Rates(tokens_per_minute=100, pixels_per_minute=100))
    both.charge(Cost(60, 60), 0.0)
    for cost in (Cost(30, 60), Cost(60, 30)):
        with pytest.raises(TooMuch) as caught:
            both.charge(cost, 0.0)
        assert caught.value.retry_after_s == pytest.approx(12.0)
    both.charge(Cost(40, 40), 0.0)
    with pytest.raises(TooMuch):
        both.charge(Cost(1, 0), 0.0)
    both.settle(10, 0.0)
    both.charge(Cost(10, 0), 0.0)
    with pytest.raises(RequestTooLarge):
        both.charge(Cost(101, 0), 1e9)


def test_concurrency_counts_no_refused_request_and_comes_before_the_rate() -> None:
    two = ledger(Rates(requests_per_minute=3), max_concurrent=2)
    two.enter(0.0)
    two.enter(0.0)
    for _ in range(5):
        with pytest.raises(TooMuch, match="under way") as caught:
            two.enter(0.0)
        assert caught.value.reason == "concurrency"
    two.leave()
    two.enter(0.0)
    two.leave()
    with pytest.raises(TooMuch, match="requests a minute") as caught:
        two.enter(0.0)
    assert (caught.value.reason, two.num_under_way) == ("requests", 1)
    two.enter(20.0)


def test_less_than_one_request_a_minute_is_possible() -> None:
    rare = ledger(Rates(requests_per_minute=0.5))
    rare.enter(0.0)
    with pytest.raises(TooMuch):
        rare.enter(119.0)
    rare.enter(121.0)


# --- the API ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def keyring(tmp_path: Path) -> Callable[[str], Keyring]:
    def of(limits: str) -> Keyring:
        path = tmp_path / "keys.toml"
        path.write_text(f"[tenants.acme]\nkeys = ['{KEY_A}']\n{limits}\n[tenants.beta]\nkeys = ['{KEY_B}']\n")
        found = load_keyring(path, ())
        assert found is not None
        return found

    return of


def count(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


async def test_requests_beyond_the_rate_are_429_and_say_when(model: Model, keyring: Callable[[str], Keyring]) -> None:
    before = count("triptych_tenant_refusals_total", tenant="acme", reason="requests")
    async with serve(model, keyring=keyring("requests_per_minute = 3")) as api:
        assert [(await api.chat(headers=A)).status_code for _ in range(4)] == [200, 200, 200, 429]
        refused = await api.chat(headers=A)
        assert error_of(refused, 429)["type"] == "rate_limit_error"
        assert 15 <= int(refused.headers["retry-after"]) <= 20
        assert len(api.pipeline.plans) == 3
        assert (await api.chat(headers=B)).status_code == 200, "others have their own"
        assert (await api.client.get("/v1/models", headers=A)).status_code == 200
    assert count("triptych_tenant_refusals_total", tenant="acme", reason="requests") == before + 2


async def test_tokens_are_charged_whole_and_settled(model: Model, keyring: Callable[[str], Keyring]) -> None:
    async with serve(model, keyring=keyring("tokens_per_minute = 100")) as api:
        first = await api.chat(headers=A, max_tokens=60)
        used = first.json()["usage"]["total_tokens"]
        assert used < 40
        for _ in range((100 - 60 - used) // used):
            assert (await api.chat(headers=A, max_tokens=5)).status_code == 200, "only what was used stays charged"
        answers = [await api.chat(headers=A, max_tokens=60) for _ in range(3)]
        assert {answer.status_code for answer in answers[1:]} == {429}
        error_of(await api.chat(headers=A, max_tokens=101), 400)
        assert (await api.chat(headers=B, max_tokens=400)).status_code == 200


async def test_what_failed_before_its_first_token_costs_nothing(
    model: Model, keyring: Callable[[str], Keyring]
) -> None:
    async def full(_: Answer) -> None:
        raise NoRoom("no room")

    async with serve(model, keyring=keyring("tokens_per_minute = 100")) as api:
        api.pipeline.drive = full
        for _ in range(5):
            assert (await api.chat(headers=A, max_tokens=60)).status_code == 503
        api.pipeline.drive = api.pipeline.say
        assert (await api.chat(headers=A, max_tokens=60)).status_code == 200


async def test_pixels_have_their_rate(model: Model, keyring: Callable[[str], Keyring]) -> None:
    content = [picture(60, 40), {"type": "text", "text": "x"}]
    messages = [{"role": "user", "content": content}]
    async with serve(model, keyring=keyring("pixels_per_minute = 6000")) as api:
        statuses = [(await api.chat(headers=A, messages=messages)).status_code for _ in range(3)]
        assert statuses == [200, 200, 429]
        assert (await api.chat(headers=A)).status_code == 200, "text has no pixels"
        large = [{"role": "user", "content": [picture(100, 61)]}]
        error_of(await api.chat(headers=A, messages=large), 400)


async def test_requests_under_way_are_bounded_and_none_is_lost(model: Model, keyring: Callable[[str], Keyring]) -> None:
    go_on = asyncio.Event()

    async with serve(model, keyring=keyring("max_concurrent = 4")) as api:

        async def wait(answer: Answer) -> None:
            await go_on.wait()
            await api.pipeline.say(answer)

        api.pipeline.drive = wait
        asked = [asyncio.create_task(api.chat(headers=A)) for _ in range(20)]
        coming = asyncio.as_completed(asked)
        assert {(await next(coming)).status_code for _ in range(16)} == {429}
        go_on.set()
        statuses = [(await task).status_code for task in asked]
        assert sorted(statuses) == [200] * 4 + [429] * 16
        assert [(await api.chat(headers=A)).status_code for _ in range(5)] == [200] * 5, "all have left"


async def leaks(api: Api) -> bool:
    """Whether a tenant with room for one request cannot come again after errors and departures of every kind."""
    await api.chat(headers=A, messages="nonsense")
    await api.chat(headers=A, model="another")
    task = asyncio.create_task(api.chat(headers=A))
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.wait([task])
    return (await api.chat(headers=A)).status_code != 200


async def test_whoever_fails_or_goes_has_left(model: Model, keyring: Callable[[str], Keyring]) -> None:
    async with serve(model, keyring=keyring("max_concurrent = 1")) as api:
        assert not await leaks(api)


async def test_a_ledger_that_nobody_leaves_is_found(
    model: Model, keyring: Callable[[str], Keyring], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ledger, "leave", lambda self: None)
    async with serve(model, keyring=keyring("max_concurrent = 1")) as api:
        assert await leaks(api)


def test_retry_after_is_rounded_up() -> None:
    for wait_s, shown in ((0.0, "1"), (1.01, "2"), (19.2, "20"), (1e9, "3600")):
        assert error_response(RateLimited("x", retry_after_s=wait_s)).headers["retry-after"] == shown


def test_processes_of_one_router_share_a_tenants_limits() -> None:
    tenant = Tenant("a", Rates(60.0, 1000.0, None), max_concurrent=5)
    part = tenant.part(2)
    assert part == Tenant("a", Rates(30.0, 500.0, None), max_concurrent=2)
    assert tenant.part(1) == tenant
    assert tenant.part(16).max_concurrent == 1, "none would be a tenant that may not come in at all"
    assert [share_of(limit, 4) for limit in (256, 7, 1)] == [64, 1, 1]


async def test_each_process_lets_a_tenant_have_its_part() -> None:
    tenant = Tenant("a", max_concurrent=4)
    meter = LocalMeter(SystemClock(), num_processes=2)
    for number in range(2):
        await meter.enter(tenant, f"req-{number}")
    with pytest.raises(TooMuch):
        await meter.enter(tenant, "req-2")
