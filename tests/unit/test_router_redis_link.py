"""Replies of a Redis, and of what is none: read whole or refused, each by who asked for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.admission.redis_link import (
    MAX_REPLY_BYTES,
    RedisAddress,
    RedisLink,
    RedisRefused,
    encoded,
    parse_address,
    read_reply,
)
from tests.redis_house import REQUIRED, redis_binary


async def read(data: bytes) -> object:
    reader = asyncio.StreamReader(limit=MAX_REPLY_BYTES)
    reader.feed_data(data)
    reader.feed_eof()
    return await read_reply(reader)


def written(value: object) -> bytes:
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, bytes):
        return b"$%d\r\n%b\r\n" % (len(value), value)
    assert isinstance(value, list)
    return b"*%d\r\n" % len(value) + b"".join(written(entry) for entry in value)


scalars = st.none() | st.integers(-(2**63), 2**63 - 1) | st.binary(max_size=200)
replies = scalars | st.lists(scalars | st.lists(scalars, max_size=3), max_size=6)


@given(replies)
def test_what_a_redis_says_is_read_as_it_is(value: object) -> None:
    assert asyncio.run(read(written(value))) == value


@given(st.binary(max_size=60))
def test_what_is_no_reply_is_refused_and_nothing_else_happens(data: bytes) -> None:
    with contextlib.suppress(ValueError, EOFError, asyncio.LimitOverrunError):
        asyncio.run(read(data))


@pytest.mark.parametrize(
    "data",
    [
        b"$%d\r\n" % (MAX_REPLY_BYTES + 1),
        b"*1025\r\n",
        b"$-2\r\n",
        b"*-7\r\n",
        b"*1\r\n" * 9 + b":1\r\n",
        b":x\r\n",
        b"!3\r\n",
        b"\r\n",
        b"\x80\x04\x95\r\n",
    ],
)
async def test_sizes_and_depths_are_bounded(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        await read(data)


def test_commands_are_written_with_their_lengths() -> None:
    assert encoded(["SET", "k\r\n", 7, b"\xff"]) == b"*4\r\n$3\r\nSET\r\n$3\r\nk\r\n\r\n$1\r\n7\r\n$1\r\n\xff\r\n"


@contextlib.asynccontextmanager
async def talking_to(*says: bytes) -> AsyncIterator[RedisLink]:
    """One that says so to each command, and then hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for say in says:
            await reader.readuntil(b"PING\r\n")
            writer.write(say)
        await reader.readuntil(b"PING\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    link = await RedisLink.open(RedisAddress("127.0.0.1", server.sockets[0].getsockname()[1]))
    try:
        yield link
    finally:
        link.abort()
        server.close()
        await asyncio.sleep(0.01)


async def test_who_gives_up_leaves_nothing_to_the_next() -> None:
    async with talking_to(b"", b":1\r\n:2\r\n", b"-WRONGTYPE no\r\n") as link:
        first = asyncio.create_task(link.ask("PING"))
        await asyncio.sleep(0.01)
        first.cancel()
        assert await link.ask("PING") == 2
        with pytest.raises(RedisRefused) as refused:
            await link.ask("PING")
        assert refused.value.kind == "WRONGTYPE"
        for _ in range(2):
            with pytest.raises(OSError):  # noqa: PT011 - whichever it is
                await link.ask("PING")
        assert link.is_lost


@pytest.mark.parametrize("nonsense", [b"nonsense\r\n", b":1\r\n:2\r\n", b"*9999999\r\n", b"x" * (2 * MAX_REPLY_BYTES)])
async def test_nonsense_ends_the_connection(nonsense: bytes) -> None:
    async with talking_to(nonsense) as link:
        with contextlib.suppress(OSError):
            await link.ask("PING")
        async with asyncio.timeout(5):
            while not link.is_lost:  # noqa: ASYNC110 - it tells who asks
                await asyncio.sleep(0.01)


def test_addresses() -> None:
    assert parse_address("redis://h", None, None) == RedisAddress("h")
    full = parse_address("redis://me:p%40ss@[::1]:7/3", None, None)
    assert full == RedisAddress("::1", 7, "", 3, "me", "p@ss")
    assert parse_address("redis://:old@h:7", "new", None).password == "new"
    assert parse_address("unix:///run/redis.sock", None, None) == RedisAddress(path="/run/redis.sock")
    tls = parse_address("rediss://h", None, None).tls
    assert tls is not None and tls.check_hostname
    assert "p@ss" not in repr(full)


def test_a_file_that_is_no_authority(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("x")
    with pytest.raises(OSError, match=r"."):
        parse_address("rediss://h", None, tmp_path / "ca.pem")


def test_in_ci_the_tests_of_a_real_redis_do_not_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    for required, outcome in (("", pytest.skip.Exception), ("required", pytest.fail.Exception)):
        monkeypatch.setenv(REQUIRED, required)
        with pytest.raises(outcome, match="redis-server"):
            redis_binary()
    assert f"export {REQUIRED}=required" in (Path(__file__).parents[2] / ".ci" / "run").read_text()
