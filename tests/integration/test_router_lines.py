"""Lines between router and workers of one host: what is theirs alone. What they share with gRPC's calls, the tests of
the router's pipeline look at by both ways."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc.aio import EOF  # type: ignore[attr-defined]

from tests.integration import fake_workers as fake
from tests.integration.fake_requests import ask, expected, plan_of
from tests.integration.fake_workers import HOST, TOKEN, Call, FakeCluster, Script, fake_cluster, running, until_lined
from triptych.core.ids import AttemptRef
from triptych.core.plan import Plan, Sampling
from triptych.core.worker import Role, WorkerInfo
from triptych.rpc import convert, line_frames
from triptych.rpc.client import lines_stub
from triptych.rpc.line_client import Line, LineCall, LinedChannels
from triptych.rpc.line_frames import Method
from triptych.rpc.server import MAX_MESSAGE_BYTES
from triptych.transport.control_wire import knock
from triptych.wire.v1 import decode_pb2, lines_pb2

DECODE_ONLY = ("d-0", [Role.DECODE])


@pytest.fixture(autouse=True)
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(fake, "lines_folder", Path(folder))
        yield


def generate(line: Line, name: str, timeout_s: float = 10.0, num_ids: int = 3) -> LineCall:
    plan = Plan(tuple(range(1, num_ids + 1)), (), Sampling(5, seed=1), timeout_s)
    request = decode_pb2.GenerateRequest(ref=convert.ref_to_proto(AttemptRef(name)), plan=convert.plan_to_proto(plan))
    return line.call(Method.GENERATE, request, decode_pb2.GenerateResponse.FromString, timeout_s)


async def status_of(call: LineCall) -> grpc.StatusCode:
    try:
        while await call.read() is not EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@asynccontextmanager
async def lined(script: Script) -> AsyncIterator[tuple[FakeCluster, LinedChannels, WorkerInfo]]:
    async with fake_cluster(DECODE_ONLY, script=script) as cluster:
        channels, (worker,) = LinedChannels(TOKEN, None, HOST), cluster.infos
        try:
            await until_lined(channels, [worker])
            yield cluster, channels, worker
        finally:
            await channels.close()


def held(channels: LinedChannels, worker: WorkerInfo) -> Line:
    line = channels.line(worker)
    assert line is not None
    return line


async def grant_and_wait(call: Call) -> AsyncIterator[Any]:
    yield fake.grant(call.worker)
    await fake.for_ever()


async def test_answers_come_by_the_line_and_media_by_gRPC() -> None:  # noqa: N802
    media = [bytes(3 * 2**20)]
    async with running() as (cluster, pipeline):
        assert await ask(pipeline, plan_of(media), media) == expected(5)
        by_line = {type(call.request).__name__ for call in cluster.hub.calls if call.by_line}
        assert by_line == {"GenerateRequest", "PrefillRequest"}


async def test_a_call_that_is_given_up_is_cancelled_at_the_worker_and_others_go_on() -> None:
    async with lined(Script(decode=grant_and_wait)) as (cluster, channels, worker):
        line = held(channels, worker)
        calls = [generate(line, f"req-{number}") for number in range(3)]
        for call in calls:
            assert (await call.read()).HasField("granted")
        calls[1].cancel()
        assert await status_of(calls[1]) is grpc.StatusCode.CANCELLED
        async with asyncio.timeout(5):
            while [call.outcome for call in cluster.hub.calls] != ["running", "cancelled", "running"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not line.over.is_set()


async def test_the_deadline_holds_at_both_ends() -> None:
    """The worker is told; and a worker that says nothing (frozen, say) keeps nobody."""
    async with lined(Script(decode=grant_and_wait)) as (cluster, channels, worker):
        call = generate(held(channels, worker), "req-1", timeout_s=0.2)
        assert await status_of(call) is grpc.StatusCode.DEADLINE_EXCEEDED
        await cluster.hub.until_all_ended()


async def test_who_does_not_read_holds_up_nobody() -> None:
    async def much(call: Call) -> AsyncIterator[Any]:
        yield fake.grant(call.worker)
        for _ in range(2_000):
            yield fake.tokens(*range(1, 200))

    async with lined(Script(decode=much)) as (_, channels, worker):
        line = held(channels, worker)
        unread, read = generate(line, "req-1"), generate(line, "req-2")
        count = 0
        async with asyncio.timeout(20):
            while await read.read() is not EOF:
                count += 1
        assert count == 2_001
        unread.cancel()


async def test_a_request_above_the_limit_is_refused_before_it_is_sent() -> None:
    async with lined(Script(decode=grant_and_wait)) as (cluster, channels, worker):
        call = generate(held(channels, worker), "req-1", num_ids=MAX_MESSAGE_BYTES)
        assert await status_of(call) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not cluster.hub.calls and not held(channels, worker).over.is_set()


async def test_when_a_line_is_lost_its_calls_fail_and_there_is_another() -> None:
    async with lined(Script(decode=grant_and_wait)) as (cluster, channels, worker):
        line = held(channels, worker)
        call = generate(line, "req-1")
        await call.read()
        line.close()
        assert await status_of(call) is grpc.StatusCode.UNAVAILABLE
        await cluster.hub.until_all_ended()
        await until_lined(channels, [worker])
        assert held(channels, worker) is not line


async def test_a_worker_that_stops_lets_calls_end_and_takes_no_new_ones() -> None:
    end = asyncio.Event()

    async def decode(call: Call) -> AsyncIterator[Any]:
        yield fake.grant(call.worker)
        await end.wait()
        yield fake.generate_done(call, 1)

    async with lined(Script(decode=decode)) as (cluster, channels, worker):
        line = held(channels, worker)
        call = generate(line, "req-1")
        await call.read()
        stopping = asyncio.create_task(cluster.servers[0].stop(10))
        while (status := await status_of(generate(line, "req-2", timeout_s=0.05))) is not grpc.StatusCode.UNAVAILABLE:
            assert status is grpc.StatusCode.DEADLINE_EXCEEDED, "it has not begun to stop yet"
        end.set()
        assert (await call.read()).HasField("generate_done")
        assert await call.read() is EOF
        async with asyncio.timeout(5):
            await stopping


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x01",
        line_frames.end_frame(1, 0),
        line_frames.HEAD.pack(9, 1),
        line_frames.HEAD.pack(1, 1),
        line_frames.open_frame(1, 77, 1.0, b""),  # type: ignore[arg-type]
    ],
)
async def test_what_is_no_frame_of_a_caller_ends_that_line_alone(frame: bytes) -> None:
    async with lined(Script(decode=grant_and_wait)) as (_, channels, worker):
        hold: Any = lines_stub(channels, worker).Hold(lines_pb2.HoldRequest())
        address = await hold.read()
        wire = await knock(address.socket_path, address.session, address.key)
        gone = asyncio.Event()
        wire.lost = gone.set
        wire.write(frame)
        async with asyncio.timeout(5):
            await gone.wait()
        assert await hold.read() is EOF
        assert not held(channels, worker).over.is_set()


async def test_a_request_that_is_no_message_is_the_callers_fault() -> None:
    async with lined(Script(decode=grant_and_wait)) as (_, channels, worker):
        nonsense = lines_pb2.HoldResponse(socket_path="\x01", session=2**60)
        call = held(channels, worker).call(Method.GENERATE, nonsense, decode_pb2.GenerateResponse.FromString, 5.0)
        assert await status_of(call) is grpc.StatusCode.INVALID_ARGUMENT


async def test_without_the_token_there_is_no_line() -> None:
    async with lined(Script()) as (_, _, worker):
        stranger = LinedChannels("another-token-altogether", None, HOST)
        try:
            call: Any = lines_stub(stranger, worker).Hold(lines_pb2.HoldRequest())
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call.read()
            assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        finally:
            await stranger.close()
