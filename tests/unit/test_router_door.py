"""The door, whatever is knocked at: every route that the application has, however it is spelt; and who knocks too
often."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import Response
from starlette.routing import Mount, Route, WebSocketRoute

from services.router.admission.door import MAX_ACQUAINTANCES, Door, LocalFailures
from services.router.admission.key_file import load_keyring
from services.router.admission.keyring import Keyring
from services.router.admission.strangers import Strangers, caller_of
from services.router.admission.tenants import ANYBODY, Tenant
from services.router.app import Model
from services.router.guard import OPEN_PATHS, Guard
from services.router.headers import MAX_HEADER_BYTES, HttpProtocol
from tests.unit import router_house
from tests.unit.router_house import Api, ask, serve
from triptych.core.clock import ManualClock

model = router_house.model

KEY, OTHER = "tk-of-acme-0123456789", "tk-of-beta-0123456789"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "get", "")


@pytest.fixture
def keyring() -> Keyring:
    found = load_keyring(None, (f"acme:{KEY}", f"beta:{OTHER}"))
    assert found is not None
    return found


# --- every route ------------------------------------------------------------------------------------------------------


def paths_of(routes: Any, before: str = "") -> Iterator[str]:
    """Of an application's routes and of what is mounted in it, with something in the place of each parameter."""
    for route in routes:
        path = before + getattr(route, "path", "")
        plain = "".join("x" if index % 2 else part for index, part in enumerate(path.replace("}", "{").split("{")))
        yield plain or "/"
        yield from paths_of(getattr(route, "routes", None) or (), path)


def spellings(path: str) -> Iterator[str]:
    """Ways to write a path that some part between caller and route may take for another one."""
    yield path
    for other in OPEN_PATHS:
        yield from (f"{other}/..{path}", f"{path}?{other}", f"{path};{other}", f"{path}/../..{other}", f"{other}{path}")
    yield from ("/" + path, path + "/", path + "//", "/." + path, path.upper(), path + "%00", path + "%2f", path + ".")
    yield from (
        f"http://x{path}",
        f"/%2e%2e{path}",
        path.replace("/", "\\"),
        path.replace("/", "//"),
        path + "#/health",
    )


async def answered(app: Any) -> list[tuple[str, str, int]]:
    """What answers a stranger with anything but 401, by method, path and status; health itself apart."""
    known = sorted({*paths_of(app.routes), "/docs", "/redoc", "/docs/oauth2-redirect", "/debug/plan", "/", "*", ""})
    asked = {(method, spelt) for path in known for spelt in spellings(path) for method in METHODS}
    asked |= {(method, spelt) for path in OPEN_PATHS for spelt in spellings(path) for method in METHODS}
    asked = {(method, spelt) for method, spelt in asked if spelt.partition("?")[0].partition("#")[0] not in OPEN_PATHS}
    found = [(method, path, await ask(app, path, method=method)) for method, path in sorted(asked)]
    return [row for row in found if row[2] != 401]


async def test_every_route_but_health_is_401_without_a_key_however_it_is_spelt(model: Model, keyring: Keyring) -> None:
    async with serve(model, keyring=keyring) as api:
        known = set(paths_of(api.app.routes))
        assert known >= {"/v1/chat/completions", "/v1/models", "/v1/models/x", "/ready", "/metrics", "/openapi.json"}
        assert await answered(api.app) == []
        statuses = {
            (path, method): await ask(api.app, path, method=method) for path in OPEN_PATHS for method in METHODS
        }
    for (path, method), status in statuses.items():
        assert status == (200 if method in ("GET", "HEAD") else 405), (path, method)


async def _open(_: Any) -> Response:
    return Response("anybody's")


NEW = {
    "a route": Route("/new/{name:path}", _open),
    "one that takes a tail of health": Route("/health/{rest:path}", _open),
    "routes that are mounted": Mount("/inner", routes=[Route("/new", _open)]),
}


@pytest.mark.parametrize("kind", NEW)
async def test_a_new_route_is_walked_without_being_named_here(
    kind: str, model: Model, keyring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Guard._tenant

    async def forgetful(self: Guard, scope: Any) -> Tenant:
        is_old = scope["path"].startswith(("/v1", "/metrics", "/ready", "/openapi", "/debug"))
        return await honest(self, scope) if is_old else ANYBODY

    async with serve(model, keyring=keyring) as api:
        api.app.router.routes.append(NEW[kind])
        assert await answered(api.app) == []
        monkeypatch.setattr(Guard, "_tenant", forgetful)
        assert any(status == 200 for _, _, status in await answered(api.app))


async def test_a_websocket_is_turned_away_from_every_route(model: Model, keyring: Keyring) -> None:
    async def never(_: Any) -> None:
        raise AssertionError("it came in")

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async with serve(model, keyring=keyring) as api:
        api.app.router.routes.insert(0, WebSocketRoute("/{path:path}", never))
        for path in {*paths_of(api.app.routes), "/new"}:
            sent: list[Any] = []

            async def send(message: Any, sent: list[Any] = sent) -> None:
                sent.append(message)

            await api.app({"type": "websocket", "path": path, "headers": []}, receive, send)
            assert [message["type"] for message in sent] == ["websocket.close"], path


# --- past a socket ----------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def listening(api: Api) -> AsyncIterator[int]:
    """The port at which the application is served as the router serves it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            api.app,
            http=HttpProtocol,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            log_config=None,
            proxy_headers=False,
        )
        server = uvicorn.Server(config)
        task = asyncio.create_task(server._serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await task


async def status_line(port: int, *lines: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write("\r\n".join((*lines, "", "")).encode())
        return (await reader.readline()).decode()
    finally:
        writer.close()


UPGRADE = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZQ==",
    "Sec-WebSocket-Version: 13",
)
REQUESTS: list[tuple[str, ...]] = [
    ("GET /metrics HTTP/1.1", "Host: x"),
    ("GET /metrics HTTP/1.1", "Host: x/health"),
    ("GET /metrics HTTP/1.1", "Host: health"),
    ("GET /metrics HTTP/1.0",),
    ("GET //health HTTP/1.1", "Host: x"),
    ("GET /health/../metrics HTTP/1.1", "Host: x"),
    ("GET /v1/../health HTTP/1.1", "Host: x"),
    ("GET /%68ealth/ HTTP/1.1", "Host: x"),
    ("GET http://x/health/../metrics HTTP/1.1", "Host: x"),
    ("GET http://health/metrics HTTP/1.1", "Host: health"),
    ("GET /metrics?/health HTTP/1.1", "Host: x"),
    ("GET /openapi.json HTTP/1.1", "Host: x", "X-Original-URL: /health", "X-Rewrite-URL: /health"),
    ("GET /metrics HTTP/1.1", "Host: x", "X-HTTP-Method-Override: HEAD", "X-Forwarded-Prefix: /health"),
    ("OPTIONS * HTTP/1.1", "Host: x"),
    ("OPTIONS /v1/models HTTP/1.1", "Host: x", "Origin: http://x", "Access-Control-Request-Method: GET"),
    ("HEAD /v1/models HTTP/1.1", "Host: x"),
    ("TRACE /metrics HTTP/1.1", "Host: x"),
    ("GET /v1/models HTTP/1.1", "Host: x", *UPGRADE),
    ("GET /health/x HTTP/1.1", "Host: x", *UPGRADE),
    ("GET /metrics HTTP/1.1", "Host: x", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAA"),
]


async def test_past_a_real_socket_nothing_but_health_is_answered(model: Model, keyring: Keyring) -> None:
    async with serve(model, keyring=keyring) as api, listening(api) as port:
        for lines in REQUESTS:
            assert " 401 " in await status_line(port, *lines), lines
        for lines in (("PRI * HTTP/2.0",), ("GET /metrics HTTP/1.1", "Host: a", "Host: b"), ("GET /metrics",)):
            assert (await status_line(port, *lines)).split(" ")[1] in ("400", "401"), lines
        for lines in (("GET /health HTTP/1.1", "Host: x"), ("HEAD /health HTTP/1.1", "Host: /metrics")):
            assert " 200 " in await status_line(port, *lines)


# --- who knocks too often ---------------------------------------------------------------------------------------------


async def statuses(api: Api, *asked: tuple[str, str]) -> list[int]:
    """By (key, address)."""
    return [await ask(api.app, "/v1/models", key=key, address=address) for key, address in asked]


async def knocks(api: Api) -> list[int]:
    """Of one address that may be wrong three times: five wrong keys, the right one; and those of another address."""
    wrong = [(f"tk-that-nobody-knows-{number}", "10.0.0.1") for number in range(5)]
    return await statuses(api, *wrong, (KEY, "10.0.0.1"), ("", "10.0.0.1"), (KEY, "10.0.0.2"), ("wrong", "10.0.0.2"))


EXPECTED = [401, 401, 401, 429, 429, 429, 401, 200, 401]


async def test_an_address_that_is_wrong_too_often_is_429_and_says_when(model: Model, keyring: Keyring) -> None:
    async with serve(model, keyring=keyring, failed_keys_per_minute=3) as api:
        assert await knocks(api) == EXPECTED
        answer = await api.chat(headers={"authorization": "Bearer wrong"})  # httpx's address is 127.0.0.1
        assert answer.status_code == 401
        for _ in range(3):
            answer = await api.chat(headers={"authorization": f"Bearer {KEY}x"})
        assert router_house.error_of(answer, 429)["type"] == "rate_limit_error"
        assert 15 <= int(answer.headers["retry-after"]) <= 20
        health = await api.client.get("/health")
        assert health.status_code == 200


async def test_who_was_right_before_is_not_locked_out_by_others_of_its_address(model: Model, keyring: Keyring) -> None:
    async with serve(model, keyring=keyring, failed_keys_per_minute=3) as api:
        assert await statuses(api, (KEY, "10.0.0.1")) == [200]
        assert await statuses(api, *[("wrong", "10.0.0.1")] * 5) == [401, 401, 401, 429, 429]
        assert await statuses(api, (KEY, "10.0.0.1"), (OTHER, "10.0.0.1"), (OTHER, "10.0.0.2")) == [200, 429, 200]


@pytest.mark.parametrize("fault", ["counts nothing", "looks at nothing", "counts all as one"])
async def test_a_door_that_does_not_count_is_found(
    fault: str, model: Model, keyring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(self: Any, caller: str) -> float:
        return 0.0

    if fault == "counts all as one":
        monkeypatch.setattr("services.router.guard.caller_of", lambda host: "")
    else:
        monkeypatch.setattr(LocalFailures, "failed" if fault == "counts nothing" else "wait_s", nothing)
    async with serve(model, keyring=keyring, failed_keys_per_minute=3) as api:
        assert await knocks(api) != EXPECTED


@pytest.mark.parametrize(
    ("host", "caller"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:2::1", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
        ("::1", "::"),
        ("", ""),
        (None, ""),
        ("no address", ""),
    ],
)
def test_what_failures_are_counted_by(host: str | None, caller: str) -> None:
    assert caller_of(host) == caller


@given(st.lists(st.tuples(st.integers(0, 40), st.floats(0, 30)), max_size=200))
def test_the_table_is_bounded_and_no_address_has_more_than_its_share(moves: list[tuple[int, float]]) -> None:
    strangers, now_s, tried = Strangers(3, max_addresses=50), 0.0, dict[str, list[float]]()
    for number, pause_s in moves:
        now_s, caller = now_s + pause_s, f"10.0.0.{number}"
        if strangers.wait_s(caller, now_s) == 0:
            tried.setdefault(caller, []).append(now_s)
            strangers.failed(caller, now_s)
    assert len(strangers) <= 50
    for times in tried.values():
        for first, last in itertools.combinations(range(len(times)), 2):
            assert last - first + 1 <= 3 * (1 + (times[last] - times[first]) / 60) + 1e-6


def test_a_crowd_of_addresses_takes_bounded_memory() -> None:
    strangers = Strangers(3, max_addresses=100)
    for number in range(1000):
        strangers.failed(f"10.0.{number // 256}.{number % 256}", float(number))
    assert len(strangers) == 100
    assert strangers.wait_s("10.0.0.0", 1000.0) == 0, "forgotten"


async def test_acquaintances_are_bounded_too(keyring: Keyring) -> None:
    door = Door(keyring, LocalFailures(3, ManualClock()))
    headers = [(b"authorization", f"Bearer {KEY}".encode())]
    for number in range(MAX_ACQUAINTANCES + 5):
        await door.tenant_of(headers, str(number))
    assert len(door._acquainted) == MAX_ACQUAINTANCES
