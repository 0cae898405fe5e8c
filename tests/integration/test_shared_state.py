"""Limits that routers share through a Redis, a real one: over all of them, in one step, by Redis's clock. And when it
is gone, frozen, slow, emptied or full of nonsense: no request waits for it or fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from redis import Redis

from services.router.admission import shared_scripts as scripts
from services.router.admission.door import Door, LocalFailures
from services.router.admission.key_file import load_keyring
from services.router.admission.ledger import Cost, Ledger, TooMuch
from services.router.admission.meter import LocalMeter
from services.router.admission.shared_meter import SharedFailures, SharedMeter
from services.router.admission.shared_state import SharedState, connect
from services.router.admission.tenants import Rates, Tenant
from services.router.app import Model
from tests.certificates import Authority
from tests.redis_house import PASSWORD, RedisServer, running_redis
from tests.unit import router_house
from tests.unit.router_house import serve
from triptych.core.clock import ManualClock, SystemClock
from triptych.core.errors import RateLimited, RequestTooLarge, StartupError, Unauthenticated

model = router_house.model

PREFIX = "test"
TIMEOUT_S = 0.5
LEASE_S = 1.0
FEW = Tenant("acme", Rates(requests_per_minute=10))
MANY = Tenant("many", Rates(requests_per_minute=10))
TWO = Tenant("acme", max_concurrent=2)
BOTH = Tenant("acme", Rates(tokens_per_minute=100, pixels_per_minute=100))


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis(redis_server: RedisServer) -> Iterator[RedisServer]:
    """Empty, and running again whatever the test before did."""
    with Redis.from_url(redis_server.url) as client:
        client.flushall()
    yield redis_server
    redis_server.thaw()
    if redis_server.process.poll() is not None:
        redis_server.start_again()


class Router:
    """What one router keeps."""

    def __init__(self, state: SharedState, lease_s: float) -> None:
        self.state = state
        self.clock = SystemClock()
        self.local = LocalMeter(self.clock)
        self.meter = SharedMeter(state, self.local, PREFIX, lease_s)
        self.failures = SharedFailures(state, LocalFailures(3, self.clock), PREFIX, 3)

    async def enters(self, tenant: Tenant, request_id: str) -> bool:
        try:
            await self.meter.enter(tenant, request_id)
        except TooMuch:
            return False
        return True

    async def entered(self, tenant: Tenant, count: int, name: str = "req") -> int:
        """How many of so many at once."""
        return sum(await asyncio.gather(*(self.enters(tenant, f"{name}-{number}") for number in range(count))))


@contextlib.asynccontextmanager
async def router_at(url: str, **options: Any) -> AsyncIterator[Router]:
    state = connect(url, options.get("password_file"), options.get("ca_file"), options.get("timeout_s", 5.0))
    router = Router(state, options.get("lease_s", LEASE_S))
    tasks = [
        asyncio.create_task(state.probe_forever()),
        asyncio.create_task(router.meter.renew_forever(state.came_back)),
    ]
    try:
        yield router
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        state.close()
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def two_routers(url: str, **options: Any) -> AsyncIterator[tuple[Router, Router]]:
    async with router_at(url, **options) as one, router_at(url, **options) as other:
        yield one, other


async def until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110 - Redis tells nobody
            await asyncio.sleep(0.02)


def fallbacks() -> float:
    return REGISTRY.get_sample_value("triptych_fallbacks_total", {"reason": "shared_state"}) or 0.0


# --- over all routers -------------------------------------------------------------------------------------------------


async def test_a_rate_holds_over_two_routers_that_ask_at_once(redis: RedisServer) -> None:
    async with two_routers(redis.url) as (one, other):
        before = fallbacks()
        numbers = await asyncio.gather(one.entered(FEW, 40, "a"), other.entered(FEW, 40, "b"))
        assert sum(numbers) == 10
        for router in (one, other):
            with pytest.raises(TooMuch, match="10 requests a minute") as caught:
                await router.meter.enter(FEW, "late")
            assert (caught.value.reason, 4 < caught.value.retry_after_s <= 6.0) == ("requests", True)
        assert await one.enters(Tenant("beta", Rates(requests_per_minute=1)), "x"), "others have their own"
        assert fallbacks() == before


async def places_over_two(redis: RedisServer) -> list[int]:
    """How many of many got one of two places; how many when one of them has left; and how many when nobody has renewed
    the other's for longer than a lease."""
    async with two_routers(redis.url) as (one, other):
        numbers = await asyncio.gather(one.entered(TWO, 20, "a"), other.entered(TWO, 20, "b"))
        holder = one if one.meter._under_way else other
        held = next(iter(holder.meter._under_way))
        await holder.meter.leave(TWO, held)
        found = [sum(numbers), await other.entered(TWO, 5, "c")]
        for router in (one, other):
            router.meter._under_way.clear()  # as if killed
        await asyncio.sleep(LEASE_S * 1.3)
        return [*found, await other.entered(TWO, 5, "d")]


async def test_places_hold_over_two_routers_and_those_of_a_dead_one_come_back(redis: RedisServer) -> None:
    assert await places_over_two(redis) == [2, 1, 2]


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text.replace("redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)", "").replace(
            "redis.call('PEXPIRE', KEYS[1], ARGV[2])", ""
        ),
        lambda text: text.replace("redis.call('ZADD', KEYS[1], now + tonumber(ARGV[2]), ARGV[1])", ""),
        lambda text: text.replace(">= most", "> most"),
    ],
    ids=["leases that never end", "nobody is counted", "one too many"],
)
async def test_broken_leases_are_found(
    edit: Callable[[str], str], redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = edit(scripts.ENTER)
    assert broken != scripts.ENTER
    monkeypatch.setattr(scripts, "ENTER", broken)
    assert await places_over_two(redis) != [2, 1, 2]


async def test_who_takes_long_keeps_its_place(redis: RedisServer) -> None:
    async with two_routers(redis.url, lease_s=2.0) as (one, other):
        assert await one.entered(TWO, 2) == 2
        for _ in range(4):
            await asyncio.sleep(0.7)
            assert not await other.enters(TWO, "x")


async def test_a_charge_is_all_or_nothing_and_what_was_not_used_comes_back(redis: RedisServer) -> None:
    async with two_routers(redis.url) as (one, other):
        await one.meter.charge(BOTH, Cost(60, 60))
        for cost, reason in ((Cost(30, 60), "pixels"), (Cost(60, 30), "tokens")):
            with pytest.raises(TooMuch) as caught:
                await other.meter.charge(BOTH, cost)
            assert caught.value.reason == reason
            assert 10 < caught.value.retry_after_s <= 12.0
        await other.meter.charge(BOTH, Cost(40, 39))
        with pytest.raises(TooMuch):
            await one.meter.charge(BOTH, Cost(10, 0))
        await one.meter.settle(BOTH, 30)
        await other.meter.charge(BOTH, Cost(30, 0))
        with pytest.raises(RequestTooLarge):
            await one.meter.charge(BOTH, Cost(101, 0))


steps = st.lists(
    st.one_of(
        st.tuples(st.just("charge"), st.integers(0, 60), st.integers(0, 60)),
        st.tuples(st.just("settle"), st.integers(0, 30), st.just(0)),
        st.tuples(st.sampled_from(["enter", "leave"]), st.just(0), st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves=steps)
def test_redis_decides_as_a_ledger_does(moves: list[tuple[str, int, int]], redis_server: RedisServer) -> None:
    """The same steps by both, within so little time that no bucket gains anything."""
    tenant = Tenant("model", Rates(8, 100, 100), max_concurrent=3)
    with Redis.from_url(redis_server.url) as client:
        client.flushall()

    async def both() -> None:
        ledger = Ledger(tenant, 0.0)
        async with router_at(redis_server.url, timeout_s=5.0) as router:
            under_way: list[str] = []
            for number, (kind, tokens, pixels) in enumerate(moves):
                cost, name = Cost(tokens, pixels), f"req-{number}"
                if kind == "leave":
                    if under_way:
                        await router.meter.leave(tenant, under_way.pop())
                        ledger.leave()
                    continue
                expected = await outcome_of(lambda: _now(_asked(ledger, kind, cost)))  # noqa: B023
                found = await outcome_of(lambda: _shared(router, tenant, kind, cost, name))  # noqa: B023
                assert found == expected, (number, moves)
                if kind == "enter" and found is None:
                    under_way.append(name)

    asyncio.run(both())


def _asked(ledger: Ledger, kind: str, cost: Cost) -> Callable[[], None]:
    if kind == "enter":
        return lambda: ledger.enter(0.0)
    return (lambda: ledger.charge(cost, 0.0)) if kind == "charge" else lambda: ledger.settle(cost.tokens, 0.0)


async def _now(step: Callable[[], None]) -> None:
    step()


async def _shared(router: Router, tenant: Tenant, kind: str, cost: Cost, name: str) -> None:
    if kind == "enter":
        await router.meter.enter(tenant, name)
    elif kind == "charge":
        await router.meter.charge(tenant, cost)
    else:
        await router.meter.settle(tenant, cost.tokens)


async def outcome_of(step: Callable[[], Awaitable[None]]) -> str | None:
    try:
        await step()
    except TooMuch as error:
        return error.reason
    return None


async def test_unknown_keys_count_over_two_routers(redis: RedisServer) -> None:
    keyring = load_keyring(None, ("acme:tk-of-acme-0123456789",))
    assert keyring is not None
    async with two_routers(redis.url) as (one, other):
        doors = [Door(keyring, router.failures) for router in (one, other)]
        wrong = [(b"authorization", b"Bearer wrong")]
        for door in (*doors, doors[0]):
            with pytest.raises(Unauthenticated):
                await door.tenant_of(wrong, "10.0.0.1")
        for door in doors:
            with pytest.raises(RateLimited) as caught:
                await door.tenant_of(wrong, "10.0.0.1")
            assert caught.value.retry_after_s is not None and 10 < caught.value.retry_after_s <= 20
            with pytest.raises(Unauthenticated):
                await door.tenant_of(wrong, "10.0.0.2" if door is doors[0] else "10.0.0.3")


async def test_time_is_rediss_own(redis: RedisServer) -> None:
    """A router whose clock stands still sees a bucket fill, which only Redis's can do."""
    fast = Tenant("fast", Rates(requests_per_minute=600))
    async with router_at(redis.url) as router:
        router.meter._local = LocalMeter(ManualClock())
        assert await router.entered(fast, 620) >= 600
        await asyncio.sleep(0.25)
        assert await router.enters(fast, "later")


async def test_every_key_expires(redis: RedisServer) -> None:
    everything = Tenant("acme", Rates(5, 100, 100), max_concurrent=3)
    async with router_at(redis.url) as router:
        await router.meter.enter(everything, "req-1")
        await router.meter.charge(everything, Cost(10, 10))
        await router.meter.settle(everything, 10)
        await router.failures.failed("10.0.0.1")
        with Redis.from_url(redis.url) as client:
            keys = client.keys("*")
            assert len(keys) == 5
            assert all(key.startswith(b"test:") for key in keys)
            assert all(0 < client.pttl(key) <= 61_000 for key in keys)


# --- when it does not answer ------------------------------------------------------------------------------------------


async def within(router: Router, tenant: Tenant, seconds: float, count: int = 1, name: str = "req") -> int:
    """How many were let in; fails when that took longer."""
    began = time.monotonic()
    number = await router.entered(tenant, count, name)
    assert time.monotonic() - began < seconds
    return number


@pytest.mark.parametrize("trouble", ["frozen", "killed"])
async def test_while_it_is_gone_routers_decide_alone_and_when_it_is_back_together(
    trouble: str, redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with two_routers(redis.url, timeout_s=TIMEOUT_S) as (one, other):
        assert await one.enters(TWO, "first")
        redis.freeze() if trouble == "frozen" else redis.kill()
        before = fallbacks()
        assert await within(one, TWO, TIMEOUT_S + 2.0, 5, "a") == 1, "it knows of the one that it let in before"
        assert not one.state.is_up
        assert await within(other, TWO, TIMEOUT_S + 2.0, 5, "b") == 2, "the other knows nothing of that"
        assert await within(one, MANY, 0.5, 50, "more") == 10, "and nobody asks again"
        assert fallbacks() >= before + 60
        redis.thaw() if trouble == "frozen" else redis.start_again()
        await until(lambda: one.state.is_up and other.state.is_up)
        with Redis.from_url(redis.url) as client:
            await until(lambda: client.zcard("test:{acme}:running") >= 4)
        assert not await one.enters(TWO, "x") and not await other.enters(TWO, "x"), "all four are known again"
        for router in (one, other):
            for request_id in list(router.meter._under_way):
                await router.meter.leave(TWO, request_id)
        await asyncio.sleep(LEASE_S * 1.2)  # what was asked of a frozen one it does when it thaws; a lease ends that
        assert await one.enters(TWO, "x") and await other.enters(TWO, "y") and not await one.enters(TWO, "z")
    lines = [record.getMessage() for record in caplog.records]
    assert sum("does not answer" in line for line in lines) == 2, "one line each"
    assert sum("answers again" in line for line in lines) == 2


async def test_requests_of_the_api_neither_wait_nor_fail(redis: RedisServer, model: Model, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    key = "tk-of-acme-0123456789"
    path.write_text(
        f"[tenants.acme]\nkeys=['{key}']\nrequests_per_minute=1000\ntokens_per_minute=1e6\nmax_concurrent=50\n"
    )
    keyring = load_keyring(path, ())
    assert keyring is not None
    async with router_at(redis.url, timeout_s=TIMEOUT_S) as router:
        door = Door(keyring, router.failures)
        async with serve(model, meter=router.meter, door=door) as api:
            headers = {"authorization": f"Bearer {key}"}
            assert (await api.chat(headers=headers)).status_code == 200
            redis.freeze()
            began = time.monotonic()
            answers = await asyncio.gather(*(api.chat(headers=headers) for _ in range(10)))
            assert {answer.status_code for answer in answers} == {200}
            assert time.monotonic() - began < 3.0
            redis.thaw()
            await until(lambda: router.state.is_up)
            assert (await api.chat(headers=headers)).status_code == 200
            assert router.local.ledger(keyring.tenants[0]).num_under_way == 0


async def test_a_redis_that_forgets_all_learns_again_who_is_under_way(redis: RedisServer) -> None:
    async with two_routers(redis.url) as (one, other):
        assert await one.entered(TWO, 2) == 2
        with Redis.from_url(redis.url) as client:
            client.flushall()
            client.script_flush()
            await until(lambda: client.zcard("test:{acme}:running") == 2)
        assert not await other.enters(TWO, "x")
        assert one.state.is_up and other.state.is_up


async def waits_for(router: Router, redis: RedisServer) -> bool:
    """Whether a request stands still with a Redis that does."""
    assert await router.enters(FEW, "first")
    redis.freeze()
    try:
        async with asyncio.timeout(TIMEOUT_S * 4):
            await router.enters(FEW, "second")
    except TimeoutError:
        return True
    return False


async def test_a_router_that_waits_is_found(redis: RedisServer) -> None:
    async with router_at(redis.url, timeout_s=TIMEOUT_S) as router:
        assert not await waits_for(router, redis)
    redis.thaw()
    async with router_at(redis.url, timeout_s=3600.0) as router:
        assert await waits_for(router, redis)


async def test_a_router_that_counts_only_there_is_found(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it must decide alone it knows nothing of those that it has let in."""

    async def let_in_after_a_loss() -> int:
        async with router_at(redis.url, timeout_s=TIMEOUT_S) as router:
            assert await router.entered(TWO, 2, "before") == 2
            redis.kill()
            number = await router.entered(TWO, 2, "after")
            redis.start_again()
            return number

    assert await let_in_after_a_loss() == 0
    monkeypatch.setattr(Ledger, "entered_elsewhere", lambda self, now_s: None)
    assert await let_in_after_a_loss() == 2


@contextlib.asynccontextmanager
async def slow_way_to(port: int, delay_s: float) -> AsyncIterator[int]:
    """A port behind which everything comes later."""

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                while data := await reader.read(65536):
                    await asyncio.sleep(delay_s)
                    writer.write(data)
        finally:
            writer.transport.abort()

    tasks: list[asyncio.Task[None]] = []

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        tasks.extend(asyncio.create_task(one) for one in (pipe(reader, back), pipe(there, writer)))

    server = await asyncio.start_server(serve_one, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)


async def test_a_slow_one_is_not_waited_for(redis: RedisServer) -> None:
    async with (
        slow_way_to(redis.port, 1.0) as port,
        router_at(f"redis://:{PASSWORD}@127.0.0.1:{port}/0", timeout_s=TIMEOUT_S) as router,
    ):
        assert await within(router, FEW, TIMEOUT_S + 2.0, 20) == 10
        assert await within(router, FEW, TIMEOUT_S, 20, "more") == 0
        await asyncio.sleep(1.2)
        assert not router.state.is_up, "a probe that takes as long is no answer"


NONSENSE: dict[str, Callable[[Any], object]] = {
    "a text": lambda client: client.set("test:{acme}:requests", b"\x80\x04\x95cos\nsystem\n"),
    "a list": lambda client: client.rpush("test:{acme}:requests", "x"),
    "a level that is none": lambda client: client.hset("test:{acme}:requests", mapping={"level": "x", "at": "y"}),
    "a time to come": lambda client: client.hset("test:{acme}:requests", mapping={"level": "5", "at": str(2**52)}),
    "a pickle for a level": lambda client: client.hset("test:{acme}:requests", "level", b"\x80\x04\x95."),
    "a text for a set": lambda client: client.set("test:{acme}:running", "x"),
}


@pytest.mark.parametrize("name", NONSENSE)
async def test_nonsense_in_it_fails_no_request(name: str, redis: RedisServer) -> None:
    tenant = Tenant("acme", Rates(requests_per_minute=10), max_concurrent=20)
    with Redis.from_url(redis.url) as client:
        NONSENSE[name](client)
    async with router_at(redis.url) as router:
        assert 1 <= await router.entered(tenant, 30) <= 10
        assert router.state.is_up


@pytest.mark.parametrize(
    "body", ["return 'x'", "return {1}", "return {}", "return {1, 'requests', 'x'}", "return {'x'}", "return nil", "x"]
)
async def test_an_answer_of_another_kind_is_a_refusal(
    body: str, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts, "ENTER", body)
    async with router_at(redis.url) as router:
        assert await router.enters(FEW, "req")
        assert router.state.is_up


# --- how it is reached ------------------------------------------------------------------------------------------------


async def test_a_password_from_a_file(redis: RedisServer, tmp_path: Path) -> None:
    url = f"redis://127.0.0.1:{redis.port}/0"
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text(PASSWORD + "\n")
    wrong.write_text("another")
    for file, is_up in ((right, True), (wrong, False), (None, False)):
        async with router_at(url, password_file=file) as router:
            assert await router.enters(FEW, "req")
            assert router.state.is_up is is_up, file


async def test_over_tls_and_not_to_one_whom_another_authority_knows(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path), Authority(tmp_path, "another")
    files = ours.issue(names="IP:127.0.0.1")
    flags = ("--tls-cert-file", str(files.cert), "--tls-key-file", str(files.key), "--tls-ca-cert-file", str(ours.path))
    flags += ("--tls-auth-clients", "no")
    with running_redis(tmp_path, *flags) as server:
        url = server.url.replace("redis://", "rediss://")
        for authority, is_up in ((ours, True), (theirs, False)):
            async with router_at(url, ca_file=authority.path, timeout_s=1.0) as router:
                assert await router.enters(FEW, "req")
                assert router.state.is_up is is_up


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://SECRET",
        "SECRET",
        "redis://:SECRET@host:port/0",
        "redis://:SECRET@host:1/0?ssl_cert_reqs=none",
        "redis://:SECRET@host:1/x",
        "unix://:SECRET@host/x",
    ],
)
def test_a_url_that_is_none_stops_the_start_and_is_not_repeated(url: str) -> None:
    with pytest.raises(StartupError, match="redis_url") as caught:
        connect(url, None, None, 0.1)
    assert "SECRET" not in caught.value.message
    assert caught.value.__cause__ is None


def test_a_file_without_a_password_stops_the_start(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for path in (empty, tmp_path / "none"):
        with pytest.raises(StartupError, match="redis_password_file"):
            connect("redis://127.0.0.1:1/0", path, None, 0.1)


async def test_address_and_password_are_in_no_log(redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with router_at(f"redis://:SECRET-pw@127.0.0.1:{redis.port}/0") as router:
        await router.enters(FEW, "req")
    async with router_at("redis://:SECRET-pw@127.0.0.1:1/0") as router:
        await router.enters(FEW, "req")
    written = "\n".join(f"{record.getMessage()} {record.__dict__}" for record in caplog.records)
    assert "does not answer" in written
    for secret in ("SECRET-pw", f"127.0.0.1:{redis.port}", "127.0.0.1:1"):
        assert secret not in written
