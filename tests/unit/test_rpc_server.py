"""The gRPC server and its clients on loopback: token, health, limits, errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from triptych.core.errors import (
    ERRORS_BY_CODE,
    Aborted,
    DeadlineExceeded,
    InvalidRequest,
    NoRoom,
    PeerLost,
    RequestTooLarge,
    StartupError,
    TriptychError,
    Unauthenticated,
)
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.rpc import server as server_module
from triptych.rpc.client import ChannelPool, decode_stub, health_stub, registry_stub
from triptych.rpc.convert import worker_from_proto
from triptych.rpc.errors import INTERNAL_MESSAGE, AbortOnError, error_from_rpc
from triptych.rpc.server import MAX_MESSAGE_BYTES, TOKEN_METADATA_KEY, RpcServer, add_describe
from triptych.wire.v1 import decode_pb2, decode_pb2_grpc, encoder_pb2, encoder_pb2_grpc, registry_pb2

TOKEN = "a-token-for-tests"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Decode(decode_pb2_grpc.DecodeServicer):
    """Raises what it is told to, after one answer."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.started = asyncio.Event()
        self.ended = asyncio.Event()

    async def Generate(  # noqa: N802 - the name in the proto
        self, request: decode_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[decode_pb2.GenerateResponse]:
        async with AbortOnError(context):
            try:
                yield decode_pb2.GenerateResponse()
                self.started.set()
                if self.error is None:
                    await asyncio.sleep(60)
                else:
                    raise self.error
            finally:
                self.ended.set()


class Worker:
    def __init__(self) -> None:
        self.decode = Decode()
        self.progressing = True
        self.server = RpcServer("127.0.0.1", 0, token=TOKEN, progress=lambda: self.progressing)
        self.server.add(decode_pb2_grpc.add_DecodeServicer_to_server, self.decode)
        self.server.add(encoder_pb2_grpc.add_EncoderServicer_to_server, Encoder())
        add_describe(self.server, lambda: self.info)
        self.channels = ChannelPool(TOKEN)
        self.info = WorkerInfo("decode-1", 5, frozenset({Role.DECODE}), WorkerState.READY, "127.0.0.1:1")

    async def generate(self, timeout: float = 10.0) -> None:
        call = decode_stub(self.channels, self.info).Generate(decode_pb2.GenerateRequest(), timeout=timeout)
        async for _ in call:
            pass

    async def failure(self, timeout: float = 10.0) -> TriptychError:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await self.generate(timeout)
        return error_from_rpc(raised.value)

    async def health(self) -> int:
        return (await health_stub(self.channels, self.info).Check(health_pb2.HealthCheckRequest(), timeout=5)).status


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker()
    port = await worker.server.start()
    worker.info = replace(worker.info, grpc_address=f"127.0.0.1:{port}")
    yield worker
    await worker.channels.close()
    await worker.server.stop(0)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", sorted(ERRORS_BY_CODE))
async def test_every_error_of_the_tree_crosses_the_wire(worker: Worker, code: str) -> None:
    worker.decode.error = ERRORS_BY_CODE[code]("a sentence, with ünïcode", param="top_p")
    error = await worker.failure()
    assert type(error) is ERRORS_BY_CODE[code]
    assert (error.message, error.param) == ("a sentence, with ünïcode", "top_p")


async def test_an_unknown_exception_tells_nothing_but_is_logged(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    worker.decode.error = RuntimeError("secret /path")
    with caplog.at_level(logging.ERROR):
        error = await worker.failure()
    assert type(error) is TriptychError and error.message == INTERNAL_MESSAGE
    assert "secret /path" in caplog.text


async def test_a_group_of_known_errors_counts_as_its_first(worker: Worker) -> None:
    worker.decode.error = ExceptionGroup("tasks", [NoRoom("full"), ExceptionGroup("more", [Aborted("too")])])
    assert type(await worker.failure()) is NoRoom
    worker.decode.error = ExceptionGroup("tasks", [NoRoom("full"), ValueError("bug")])
    assert type(await worker.failure()) is TriptychError


async def test_a_very_long_message_is_cut(worker: Worker) -> None:
    worker.decode.error = InvalidRequest("x" * 100_000)
    error = await worker.failure()
    assert type(error) is InvalidRequest and len(error.message) == 1024


async def test_failures_without_detail_have_a_type_too(worker: Worker) -> None:
    assert type(await worker.failure(timeout=0.1)) is DeadlineExceeded
    gone = replace(worker.info, worker_id="gone", grpc_address="127.0.0.1:1")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await registry_stub(worker.channels, gone).Describe(registry_pb2.DescribeRequest(), timeout=5)
    lost = error_from_rpc(raised.value)
    assert type(lost) is PeerLost and "127.0.0.1" not in lost.message


# --- malformed messages ----------------------------------------------------------------------------------------------

GARBAGE = b"\xff\xff\xff\xff\xff"
METHODS = [
    ("/triptych.wire.v1.Decode/Generate", "unary_stream"),
    ("/triptych.wire.v1.Encoder/Encode", "stream_stream"),
    ("/triptych.wire.v1.WorkerRegistry/Describe", "unary_unary"),
    ("/grpc.health.v1.Health/Check", "unary_unary"),
    ("/grpc.health.v1.Health/Watch", "unary_stream"),
]


class Encoder(encoder_pb2_grpc.EncoderServicer):
    """Answers each request, in a task that reads beside, as the real one does."""

    async def Encode(  # noqa: N802 - the name in the proto
        self, requests: AsyncIterator[encoder_pb2.EncodeRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[encoder_pb2.EncodeResponse]:
        async with AbortOnError(context):
            first = await anext(aiter(requests))
            yield encoder_pb2.EncodeResponse(need_bytes=encoder_pb2.NeedBytes(item_index=first.chunk.item_index))
            async for request in requests:
                yield encoder_pb2.EncodeResponse(need_bytes=encoder_pb2.NeedBytes(item_index=request.chunk.item_index))


async def answers(worker: Worker, method: str, kind: str, *messages: bytes) -> list[bytes]:
    """Raw answers to raw messages."""
    call = getattr(worker.channels.channel(worker.info), kind)(method, None, None)
    metadata = ((TOKEN_METADATA_KEY, TOKEN),)

    async def sent() -> AsyncIterator[bytes]:
        for message in messages:
            yield message

    if kind == "stream_stream":
        return [answer async for answer in call(sent(), metadata=metadata, timeout=5)]
    if kind == "unary_stream":
        return [answer async for answer in call(messages[0], metadata=metadata, timeout=5)]
    return [await call(messages[0], metadata=metadata, timeout=5)]


@pytest.mark.parametrize(("method", "kind"), METHODS)
async def test_a_message_that_is_no_protobuf_is_the_callers_fault_and_no_traceback(
    worker: Worker, method: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG), pytest.raises(grpc.aio.AioRpcError) as raised:
        await answers(worker, method, kind, GARBAGE)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    error = error_from_rpc(raised.value)
    assert type(error) is InvalidRequest and "cannot be read" in error.message
    assert "Traceback" not in caplog.text and "DecodeError" not in caplog.text
    assert not worker.decode.started.is_set()
    assert await worker.health() == NOT_SERVING  # it answers


async def test_a_stream_ends_at_the_first_message_that_is_no_protobuf(worker: Worker) -> None:
    good = encoder_pb2.EncodeRequest(chunk=encoder_pb2.MediaChunk(item_index=7)).SerializeToString()
    method, kind = METHODS[1]
    assert len(await answers(worker, method, kind, good, good, good)) == 3
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await answers(worker, method, kind, good, good, GARBAGE, good)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_without_the_token_not_even_that_is_told(worker: Worker) -> None:
    call = worker.channels.channel(worker.info).unary_unary("/triptych.wire.v1.WorkerRegistry/Describe", None, None)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(GARBAGE, metadata=((TOKEN_METADATA_KEY, "wrong"),), timeout=5)
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_caller_who_leaves_ends_the_method_behind_the_guard_at_once(worker: Worker) -> None:
    """Its clean-up must not wait for a garbage collector."""
    call = decode_stub(worker.channels, worker.info).Generate(decode_pb2.GenerateRequest(), timeout=30)
    await worker.decode.started.wait()
    call.cancel()
    async with asyncio.timeout(5):
        await worker.decode.ended.wait()


# --- token -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x", TOKEN[:-1]])
async def test_without_the_token_only_health_answers(worker: Worker, token: str | None) -> None:
    right, worker.channels = worker.channels, ChannelPool(token)
    assert type(await worker.failure()) is Unauthenticated
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await registry_stub(worker.channels, worker.info).Describe(registry_pb2.DescribeRequest(), timeout=5)
    assert type(error_from_rpc(raised.value)) is Unauthenticated
    assert await worker.health() == NOT_SERVING
    await worker.channels.close()
    worker.channels = right
    assert not worker.decode.started.is_set()


async def test_describe_answers_the_record(worker: Worker) -> None:
    answer = await registry_stub(worker.channels, worker.info).Describe(registry_pb2.DescribeRequest(), timeout=5)
    assert worker_from_proto(answer.worker) == worker.info


# --- binding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "token", "insecure_network", "sentence"),
    [
        ("0.0.0.0", None, True, "without a cluster token"),
        ("0.0.0.0", TOKEN, False, "--insecure-network"),
        ("::", TOKEN, False, "--insecure-network"),
        ("192.0.2.1", TOKEN, False, "--insecure-network"),
        ("worker.example", None, False, "without a cluster token"),
        ("127.0.0.1", "", False, "token is empty"),
    ],
)
async def test_a_binding_that_is_not_safe_is_refused(
    host: str, token: str | None, insecure_network: bool, sentence: str
) -> None:
    with pytest.raises(StartupError, match=sentence):
        RpcServer(host, 0, token=token, insecure_network=insecure_network)


async def test_beyond_loopback_when_told_so_and_loopback_without_a_token() -> None:
    for server in (
        RpcServer("0.0.0.0", 0, token=TOKEN, insecure_network=True),
        RpcServer("127.0.0.1", 0, token=None),
        RpcServer("localhost", 0, token=None),
    ):
        assert await server.start() > 0
        await server.stop(0)


async def test_a_port_in_use_is_a_startup_error(worker: Worker) -> None:
    port = int(worker.info.grpc_address.rsplit(":", 1)[1])
    second = RpcServer("127.0.0.1", port, token=None)
    with pytest.raises(StartupError, match="cannot listen"):
        await second.start()
    await second.stop(0)


# --- health ----------------------------------------------------------------------------------------------------------


async def until(check: Callable[[], Any], expected: int) -> None:
    async with asyncio.timeout(5):
        while await check() != expected:  # noqa: ASYNC110 - what is waited for is the server's
            await asyncio.sleep(0.01)


async def test_health_means_progress(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "PROGRESS_POLL_S", 0.02)
    await worker.server.stop(0)
    await worker.channels.close()
    fresh = Worker()
    port = await fresh.server.start()
    fresh.info = replace(fresh.info, grpc_address=f"127.0.0.1:{port}")
    assert await fresh.health() == NOT_SERVING
    await fresh.server.set_serving(True)
    assert await fresh.health() == SERVING
    fresh.progressing = False
    await until(fresh.health, NOT_SERVING)
    fresh.progressing = True
    await until(fresh.health, SERVING)
    await fresh.server.set_serving(False)
    assert await fresh.health() == NOT_SERVING
    await fresh.channels.close()
    await fresh.server.stop(0)


async def test_a_progress_check_that_fails_is_no_progress(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> bool:
        raise RuntimeError("bug")

    server = RpcServer("127.0.0.1", 0, token=None, progress=broken)
    worker = Worker()
    worker.info = replace(worker.info, grpc_address=f"127.0.0.1:{await server.start()}")
    await server.set_serving(True)
    assert await worker.health() == NOT_SERVING
    assert "progress check failed" in caplog.text
    await worker.channels.close()
    await server.stop(0)


# --- limits and channels ---------------------------------------------------------------------------------------------


async def test_messages_are_taken_up_to_the_limit_and_not_above(worker: Worker) -> None:
    worker.decode.error = Aborted("arrived")
    stub = decode_stub(worker.channels, worker.info)

    async def send(size: int) -> TriptychError:
        request = decode_pb2.GenerateRequest()
        request.plan.cache_salt = b"x"
        overhead = request.ByteSize() + 2 * 3  # two lengths grow from one byte to four
        request.plan.cache_salt = b"x" * (size - overhead + 1)
        assert request.ByteSize() == size
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in stub.Generate(request, timeout=10):
                pass
        return error_from_rpc(raised.value)

    assert type(await send(MAX_MESSAGE_BYTES - 1)) is Aborted
    assert type(await send(MAX_MESSAGE_BYTES)) is Aborted
    assert type(await send(MAX_MESSAGE_BYTES + 1)) is RequestTooLarge


async def test_one_channel_per_worker_process(worker: Worker) -> None:
    first = worker.channels.channel(worker.info)
    assert worker.channels.channel(worker.info) is first
    reborn = replace(worker.info, epoch=6)
    second = worker.channels.channel(reborn)
    assert second is not first
    assert worker.channels.channel(reborn) is second
    await worker.channels.forget(worker.info.worker_id)
    with pytest.raises(grpc.aio.UsageError):
        await first.unary_unary("/x/y", None, None)(b"")
