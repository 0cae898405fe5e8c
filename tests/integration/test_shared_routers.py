"""Two routers as processes, and one Redis: a tenant's limits hold over both, and when one is killed its part comes
free."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from redis import Redis

from tests.integration.test_router_process import Router, until
from tests.redis_house import PASSWORD, RedisServer, running_redis

PATIENCE_S = 60.0
KEYS = {name: f"tk-of-{name}-0123456789" for name in ("rated", "placed")}
FILE = f"""
[tenants.rated]
keys = ["{KEYS["rated"]}"]
requests_per_minute = 6

[tenants.placed]
keys = ["{KEYS["placed"]}"]
max_concurrent = 1
"""


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    (tmp_path / "redis").mkdir()
    with running_redis(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def routers(tmp_path: Path, redis: RedisServer) -> Iterator[list[Router]]:
    """Without workers: a request that is let in is told so (503)."""
    keys, password = tmp_path / "keys.toml", tmp_path / "password"
    keys.write_text(FILE)
    password.write_text(PASSWORD)
    environ = {"TRIPTYCH_REDIS_URL": f"redis://127.0.0.1:{redis.port}/0", "TRIPTYCH_API_KEYS_FILE": str(keys)}
    started = []
    try:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            flags = ("--port", "0", "--redis-password-file", str(password), "--redis-timeout-s", "5")
            started.append(Router(tmp_path / name, *flags, environ=environ))
        yield started
    finally:
        for router in started:
            router.process.kill()
            router.process.wait()


def ask(url: str, key: str) -> int:
    headers = {"authorization": f"Bearer {key}"}
    body = {"messages": [{"role": "user", "content": "x"}]}
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=30).status_code


def begun(url: str, key: str) -> socket.socket:
    """A request whose body does not end: it is under way as long as the connection is open."""
    host, _, port = url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)))
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", "Content-Length: 99"]
    connection.sendall("\r\n".join([*lines, "", "{"]).encode())
    return connection


def num_places_taken(redis: RedisServer) -> int:
    with Redis.from_url(redis.url) as client:
        return int(client.zcard("triptych:{placed}:running"))


@pytest.mark.timeout(240)
def test_limits_hold_over_two_processes_and_a_killed_ones_part_comes_back(
    routers: list[Router], redis: RedisServer
) -> None:
    for router in routers:
        until(lambda log=router.log: "the API listens" in log.read_text(), PATIENCE_S)  # type: ignore[misc]
    first, second = (router.url() for router in routers)
    began = time.monotonic()
    statuses = [ask(url, KEYS["rated"]) for _ in range(5) for url in (first, second)]
    refilled = (time.monotonic() - began) * 6 / 60
    assert 6 <= statuses.count(503) <= 6 + refilled, "apart each would let in all five of its own"
    assert set(statuses) == {429, 503}

    with begun(first, KEYS["placed"]):
        until(lambda: num_places_taken(redis) == 1, PATIENCE_S)
        assert ask(second, KEYS["placed"]) == 429
        assert ask(first, KEYS["placed"]) == 429
    until(lambda: num_places_taken(redis) == 0, PATIENCE_S)
    assert ask(second, KEYS["placed"]) == 503

    held = begun(first, KEYS["placed"])
    until(lambda: num_places_taken(redis) == 1, PATIENCE_S)
    routers[0].process.kill()
    held.close()
    assert ask(second, KEYS["placed"]) == 429
    with Redis.from_url(redis.url) as client:
        (lease,) = client.zrange("triptych:{placed}:running", 0, -1, withscores=True)
        assert 0 < lease[1] / 1000 - time.time() <= 30.0
        client.zadd("triptych:{placed}:running", {lease[0]: time.time() * 1000 - 1})  # as if 30 s had passed
    assert ask(second, KEYS["placed"]) == 503

    for router in routers:
        log = router.log.read_text()
        assert PASSWORD not in log and f":{redis.port}" not in log
