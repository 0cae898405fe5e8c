"""What a fetch may take: bytes on the wire, bytes held, seconds, fetches at a time; and builds without a limit."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from services.router import fetch
from services.router.byte_budget import ByteBudget
from services.router.media_allowance import MAX_FETCHES_AT_A_TIME, MediaAllowance
from tests.picture_server import Say, body, endless, raw, redirect
from tests.unit.fetch_house import GOOD, House, house
from triptych.core.errors import MediaInvalid, Overloaded, PayloadTooLarge, TriptychError
from triptych.obs import metrics

URL = f"http://{GOOD}/"
MAX_BYTES = 100_000
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
WIRE_BYTES = MAX_BYTES * 5 // 4 + (1 << 20)
TIMEOUT_S = 0.5
# What a machine that is busy with other tests may take besides.
SLACK_S = 8.0


def sent(at: House) -> Callable[[Say], None]:
    return lambda say: at.server.answers.__setitem__("/", say)


@contextmanager
def counting_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The sizes of all that came over the wire."""
    sizes: list[int] = []
    real = fetch._CountedStream.read

    async def read(self: Any, max_bytes: int, timeout: float | None = None) -> bytes:
        data = await self._stream.read(max_bytes, timeout)
        sizes.append(len(data))
        self._stream, stream = _Once(data), self._stream
        try:
            return await real(self, max_bytes, timeout)
        finally:
            self._stream = stream

    monkeypatch.setattr(fetch._CountedStream, "read", read)
    yield sizes


class _Once:
    def __init__(self, data: bytes) -> None:
        self._data = data

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._data


FLOODS: dict[str, tuple[Say, type[TriptychError]]] = {
    "a body without end": (endless(OK + b"\r\n", bytes(65_536)), PayloadTooLarge),
    "chunks without end": (endless(CHUNKED, b"10000\r\n" + bytes(65_536) + b"\r\n"), PayloadTooLarge),
    "chunks that are all seam": (endless(CHUNKED, b"1;" + b"x" * 4000 + b"\r\na\r\n"), PayloadTooLarge),
    "a header without end": (endless(OK, b"x-a: " + b"b" * 4000 + b"\r\n"), MediaInvalid),
    "a line without end": (endless(b"HTTP/1.1 200 ", b"O" * 65_536), MediaInvalid),
    "continue without end": (endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000), PayloadTooLarge),
    "trailers without end": (endless(CHUNKED + b"0\r\n", b"x-a: " + b"b" * 4000 + b"\r\n"), MediaInvalid),
    "no HTTP": (endless(b"", bytes(65_536)), MediaInvalid),
    "a length that is too large": (raw(OK + b"content-length: 100001\r\n\r\n"), PayloadTooLarge),
    "one byte too many": (body(bytes(MAX_BYTES + 1)), PayloadTooLarge),
}


@pytest.mark.parametrize("name", FLOODS)
async def test_a_flood_is_cut_off(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    say, error = FLOODS[name]
    with counting_reads(monkeypatch) as sizes:
        async with house(max_bytes=MAX_BYTES) as at:
            sent(at)(say)
            with pytest.raises(error) as caught:
                await at.fetch(URL)
    assert caught.value.param == "messages.0"
    assert sum(sizes) <= WIRE_BYTES + 65_536
    assert sum(at.held) <= MAX_BYTES + 65_536


@pytest.mark.parametrize("size", [0, 1, MAX_BYTES])
async def test_the_limit_is_exact(size: int) -> None:
    async with house(max_bytes=MAX_BYTES) as at:
        sent(at)(body(bytes(size)))
        assert await at.fetch(URL) == bytes(size)
        assert sum(at.held) == size


SLOW: dict[str, Say] = {
    "one byte at a time": endless(OK + b"\r\n", b"x", pause_s=0.05),
    "a header, one byte at a time": endless(OK, b"x", pause_s=0.05),
    "nothing": endless(b"", b"", pause_s=0.05),
    "a head and nothing": endless(OK + b"content-length: 9\r\n\r\n", b"", pause_s=0.05),
}


@pytest.mark.parametrize("name", SLOW)
async def test_a_server_that_drips_is_left(name: str) -> None:
    async with house(timeout_s=TIMEOUT_S) as at:
        sent(at)(SLOW[name])
        start = time.monotonic()
        with pytest.raises(MediaInvalid, match="in time"):
            await at.fetch(URL)
        assert TIMEOUT_S <= time.monotonic() - start < TIMEOUT_S + SLACK_S


async def test_redirects_share_the_time_of_one_url() -> None:
    async def late(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.35)
        await redirect("/")(writer)

    async with house(timeout_s=TIMEOUT_S) as at:
        sent(at)(late)
        with pytest.raises(MediaInvalid, match="in time"):
            await at.fetch(URL)
        assert len(at.network.called) <= 2


async def test_all_urls_of_a_request_share_its_time() -> None:
    async with house(timeout_s=60.0) as at:
        sent(at)(SLOW["nothing"])
        allowance = MediaAllowance(10**9, TIMEOUT_S, at.held.append)
        start = time.monotonic()
        fetches = [at.fetcher(URL, allowance, "p") for _ in range(3 * MAX_FETCHES_AT_A_TIME)]
        results = await asyncio.gather(*fetches, return_exceptions=True)
        assert all(isinstance(each, MediaInvalid) for each in results)
        assert time.monotonic() - start < TIMEOUT_S + SLACK_S
        assert len(at.network.called) == MAX_FETCHES_AT_A_TIME


async def test_when_all_fetches_are_taken_others_are_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MAX_FETCHES", 2)
    async with house(timeout_s=TIMEOUT_S) as at:
        sent(at)(SLOW["nothing"])
        results = await asyncio.gather(*(at.fetch(URL) for _ in range(6)), return_exceptions=True)
        assert {type(each) for each in results} == {MediaInvalid, Overloaded}
        sent(at)(body(b"picture"))
        assert await asyncio.gather(*(at.fetch(URL) for _ in range(6))) == [b"picture"] * 6


async def test_a_name_server_that_says_nothing_is_left() -> None:
    async def silent(host: str, port: int) -> Any:
        await asyncio.sleep(60)

    async with house(timeout_s=TIMEOUT_S) as at:
        at.fetcher._pool._network_backend._resolve = silent  # type: ignore[attr-defined]
        with pytest.raises(MediaInvalid, match="in time"):
            await at.fetch(URL)


async def test_nothing_is_unpacked() -> None:
    bomb = gzip.compress(bytes(10_000_000))
    async with house() as at:
        head = OK + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(bomb)
        sent(at)(raw(head + bomb))
        with pytest.raises(MediaInvalid, match="packed"):
            await at.fetch(URL)
        assert at.held == []
        sent(at)(raw(OK + b"content-encoding: identity\r\ncontent-length: 2\r\n\r\nok"))
        assert await at.fetch(URL) == b"ok"


async def test_bytes_are_held_as_they_come_and_no_more_than_there_are() -> None:
    """The router holds them for as long as the request lasts: it must not find out afterwards that there is no room."""
    budget = ByteBudget(50_000)
    lease = budget.lease()
    async with house(max_bytes=10**9) as at:
        sent(at)(endless(OK + b"\r\n", bytes(10_000)))
        allowance = MediaAllowance(10**9, 20.0, lease.take)
        with pytest.raises(Overloaded):
            await at.fetcher(URL, allowance, "p")
        assert budget.num_held <= 50_000
        lease.release()
        assert budget.num_held == 0


async def test_a_request_has_one_allowance_for_all_its_media() -> None:
    async with house(max_bytes=MAX_BYTES) as at:
        sent(at)(body(bytes(60_000)))
        allowance = MediaAllowance(100_000, 20.0, at.held.append)
        assert len(await at.fetcher(URL, allowance, "p")) == 60_000
        with pytest.raises(PayloadTooLarge, match="together"):
            await at.fetcher(URL, allowance, "q")
        assert sum(at.held) <= 100_000


STATUS = ["204 No Content", "206 Partial", "300 Many", "304 Same", "404 Not Found", "418 Teapot", "500 Error"]


@pytest.mark.parametrize("status", STATUS)
async def test_only_a_200_has_a_body_for_us(status: str) -> None:
    async with house() as at:
        sent(at)(body(b"picture", status=status))
        with pytest.raises(MediaInvalid, match=status[:3]):
            await at.fetch(URL)


BROKEN: dict[str, Say] = {
    "hung up": raw(b""),
    "cut in the body": raw(OK + b"content-length: 100\r\n\r\nshort"),
    "cut in a chunk": raw(CHUNKED + b"64\r\nshort"),
    "nonsense": raw(b"220 mail.example ESMTP\r\n"),
    "two lengths": raw(OK + b"content-length: 5\r\ncontent-length: 6\r\n\r\nabcdef"),
    "a negative length": raw(OK + b"content-length: -5\r\n\r\nabcde"),
    "switching": raw(b"HTTP/1.1 101 Switching\r\nupgrade: x\r\n\r\n"),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_answer_is_the_callers_error(name: str) -> None:
    """Never half a body, never an error of ours."""
    async with house(timeout_s=2.0) as at:
        sent(at)(BROKEN[name])
        with pytest.raises(MediaInvalid) as caught:
            await at.fetch(URL)
        assert "example" not in caught.value.message
        sent(at)(body(b"picture"))
        assert await at.fetch(URL) == b"picture"


async def test_what_became_of_fetches_is_counted() -> None:
    def counts() -> dict[str, float]:
        names = ("fetched", "forbidden", "failed", "late", "too_large", "overloaded")
        return {name: metrics.MEDIA_FETCHES.labels(name)._value.get() for name in names}

    before = counts()
    async with house({"in.example": [["10.0.0.1"]]}, timeout_s=TIMEOUT_S, max_bytes=10) as at:
        at.server.answers = {"/": body(b"picture"), "/slow": SLOW["nothing"], "/large": body(bytes(11))}
        await at.fetch(URL)
        for url in ("http://in.example/", f"{URL}none", "http://a b/", f"{URL}slow", f"{URL}large"):
            with pytest.raises(TriptychError):
                await at.fetch(url)
    after = counts()
    assert {name: after[name] - before[name] for name in after} == {
        "fetched": 1,
        "forbidden": 1,
        "failed": 2,
        "late": 1,
        "too_large": 1,
        "overloaded": 0,
    }


# --- builds without a limit -------------------------------------------------------------------------------------------


async def _floods_through(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The floods that are not cut off within the bytes that there are."""
    through = []
    for name, (say, _) in FLOODS.items():
        with monkeypatch.context() as patched, counting_reads(patched) as sizes:
            async with house(max_bytes=MAX_BYTES, timeout_s=1.0) as at:
                sent(at)(say)
                try:
                    await at.fetch(URL)
                    through.append(name)
                except TriptychError:
                    if sum(sizes) > WIRE_BYTES + 65_536 or sum(at.held) > MAX_BYTES + 65_536:
                        through.append(name)
    return through


async def test_a_build_that_counts_no_bytes_on_the_wire_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_OVERHEAD_BYTES", 1 << 40)
    assert "chunks that are all seam" in await _floods_through(monkeypatch)


async def test_a_build_that_counts_no_bytes_of_bodies_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(self: Any, response: Any, allowance: MediaAllowance, param: str) -> bytes:
        data = b""
        async for piece in response.aiter_stream():
            allowance.count_fetched(len(piece), param)
            data += piece
        return data

    monkeypatch.setattr(fetch.UrlFetcher, "_read", read)
    assert {"one byte too many", "a body without end"} <= set(await _floods_through(monkeypatch))


async def test_a_build_that_holds_bytes_afterwards_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    held = MediaAllowance.count_fetched
    pieces = itertools.count()

    def late(self: MediaAllowance, num_bytes: int, param: str) -> None:
        if next(pieces) < 0:
            held(self, num_bytes, param)

    monkeypatch.setattr(MediaAllowance, "count_fetched", late)
    with pytest.raises((AssertionError, pytest.fail.Exception, PayloadTooLarge)):
        await asyncio.wait_for(test_a_request_has_one_allowance_for_all_its_media(), 20)


async def test_a_build_without_a_time_limit_is_found() -> None:
    async with house(timeout_s=30.0) as at:
        sent(at)(SLOW["one byte at a time"])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(at.fetch(URL), 2 * TIMEOUT_S)
