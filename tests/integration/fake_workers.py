"""Workers without a model: the real protos over real gRPC, in this process, doing what a test tells them.

A `Script` is what one kind of worker does with a call. The defaults behave: decode waits for the "KV" of the attempt,
which prefill delivers once all items have landed.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from services.router.pipeline import Answer, Pipeline
from services.router.queue import AdmissionQueue
from triptych.core.clock import SystemClock
from triptych.core.errors import TriptychError
from triptych.core.ids import new_epoch
from triptych.core.plan import FinishReason
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.rpc import convert
from triptych.rpc.errors import abort_with
from triptych.rpc.line_client import LinedChannels
from triptych.rpc.line_frames import Method
from triptych.rpc.line_server import generate_method, prefill_method, serve_lines
from triptych.rpc.server import RpcServer
from triptych.transport.control_port import ControlPort
from triptych.wire.v1 import common_pb2 as common
from triptych.wire.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    encoder_pb2,
    encoder_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)

TOKEN = "a-token-for-tests"
HOST = "the-host-of-tests"
lines_folder: Path | None = None
"""Where workers take calls by lines; without one all go by gRPC. `by_grpc_and_line` sets it."""
CAPABILITY = bytes(16)

Decode = Callable[["Call"], AsyncIterator[decode_pb2.GenerateResponse]]
Prefill = Callable[["Call"], AsyncIterator[prefill_pb2.PrefillResponse]]
Encode = Callable[["Call"], AsyncIterator[encoder_pb2.EncodeResponse]]


class Gone(Exception):
    """Raised in a script: what the router sees of a call whose worker was killed, or whose host is gone."""


@dataclass(slots=True)
class Call:
    """One call as a worker sees it. `requests` is the encoder's inward stream."""

    worker: WorkerInfo
    request: Any
    hub: Hub
    requests: AsyncIterator[encoder_pb2.EncodeRequest] | None = None
    outcome: str = "running"
    by_line: bool = False

    @property
    def ref(self) -> common.AttemptRef:
        return self.request.ref

    @property
    def key(self) -> tuple[str, int]:
        return (f"{self.ref.request_id}/{self.ref.choice}", self.ref.attempt)


class Hub:
    """What the workers of one cluster share: landed items, committed KV, and a record of all calls."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.landed: dict[tuple[str, int], set[int]] = defaultdict(set)
        self.kv: dict[tuple[str, int], asyncio.Event] = defaultdict(asyncio.Event)
        self.media: dict[bytes, bytes] = {}
        self.changed = asyncio.Condition()
        self.answer: Answer | None = None

    def calls_to(self, role: Role) -> list[Call]:
        kinds = {
            Role.DECODE: decode_pb2.GenerateRequest,
            Role.PREFILL: prefill_pb2.PrefillRequest,
            Role.ENCODER: encoder_pb2.EncodeStart,
        }
        return [call for call in self.calls if isinstance(call.request, kinds[role])]

    async def land(self, key: tuple[str, int], index: int) -> None:
        async with self.changed:
            self.landed[key].add(index)
            self.changed.notify_all()

    async def until_landed(self, key: tuple[str, int], count: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.landed[key]) >= count)

    async def until_called(self, count: int) -> None:
        await self._until(lambda: len(self.calls) >= count)

    async def until_all_ended(self) -> None:
        await self._until(lambda: all(call.outcome != "running" for call in self.calls))

    async def until_out(self, count: int) -> None:
        """Until the router has let so many tokens of `answer` through. Prefill's and decode's come by streams that know
        nothing of each other: what is to follow the tokens has to wait for them."""
        answer = self.answer
        if answer is not None:
            await self._until(lambda: answer.order.emitted >= count)

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not holds():  # noqa: ASYNC110 - gRPC tells nobody
                await asyncio.sleep(0.01)


def token(index: int) -> common.Token:
    """The fakes' answer: token `100 + index` at each index."""
    return common.Token(index=index, id=100 + index)


def grant(worker: WorkerInfo) -> decode_pb2.GenerateResponse:
    return decode_pb2.GenerateResponse(
        granted=common.Grant(
            grant_id="grant-1",
            worker_id=worker.worker_id,
            epoch=worker.epoch,
            capability=CAPABILITY,
            num_pages=1,
            generation=1,
        )
    )


def tokens(*indices: int) -> decode_pb2.GenerateResponse:
    return decode_pb2.GenerateResponse(tokens=decode_pb2.TokenBatch(tokens=map(token, indices)))


def event(stage: str, name: str, worker: WorkerInfo) -> common.TimelineEvent:
    return common.TimelineEvent(stage=stage, event=name, start_ns=1, end_ns=2, worker_id=worker.worker_id)


def generate_done(call: Call, count: int, reason: FinishReason = FinishReason.LENGTH) -> decode_pb2.GenerateResponse:
    return decode_pb2.GenerateResponse(
        generate_done=decode_pb2.GenerateDone(
            finish_reason=convert.finish_reason_to_proto(reason),
            usage=common.Usage(completion_tokens=count),
            timeline=[event("decode", "finish", call.worker)],
        )
    )


def first_token() -> prefill_pb2.PrefillResponse:
    return prefill_pb2.PrefillResponse(first_token=token(0))


def prefill_done(call: Call, reason: FinishReason | None = None) -> prefill_pb2.PrefillResponse:
    return prefill_pb2.PrefillResponse(
        prefill_done=prefill_pb2.PrefillDone(
            finish_reason=convert.finish_reason_to_proto(reason),
            usage=common.Usage(prompt_tokens=9, cached_tokens=3, completion_tokens=1),
            timeline=[event("prefill", "first_token", call.worker)],
        )
    )


async def decode_well(call: Call) -> AsyncIterator[decode_pb2.GenerateResponse]:
    yield grant(call.worker)
    await call.hub.kv[call.key].wait()
    count = call.request.plan.sampling.max_tokens
    for index in range(1, count):
        yield tokens(index)
    yield generate_done(call, count)


async def prefill_well(call: Call) -> AsyncIterator[prefill_pb2.PrefillResponse]:
    await call.hub.until_landed(call.key, len(call.request.plan.items))
    yield prefill_pb2.PrefillResponse(admitted=prefill_pb2.PrefillAdmitted(cached_tokens=3))
    yield first_token()
    call.hub.kv[call.key].set()
    only_one = call.request.plan.sampling.max_tokens == 1
    yield prefill_done(call, FinishReason.LENGTH if only_one else None)


async def encode_well(call: Call) -> AsyncIterator[encoder_pb2.EncodeResponse]:
    for item in call.request.items:
        yield encoder_pb2.EncodeResponse(need_bytes=encoder_pb2.NeedBytes(item_index=item.item_index))
        call.hub.media[item.item.identity] = await receive_media(call, item)
        await call.hub.land(call.key, item.item_index)
        yield encoder_pb2.EncodeResponse(item_done=encoder_pb2.ItemDone(item_index=item.item_index))
    done = encoder_pb2.EncodeDone(timeline=[event("encoder", "encode", call.worker)])
    yield encoder_pb2.EncodeResponse(encode_done=done)


async def receive_media(call: Call, item: encoder_pb2.EncodeItem) -> bytes:
    media = b""
    assert call.requests is not None
    while len(media) < item.item.media_bytes:
        chunk = (await anext(call.requests)).chunk
        assert chunk.item_index == item.item_index
        assert chunk.offset == len(media)
        assert 0 < len(chunk.data) <= 2**20
        media += chunk.data
    return media


@dataclass(slots=True)
class Script:
    """What the workers do; a test replaces parts of it while the cluster runs."""

    decode: Decode = decode_well
    prefill: Prefill = prefill_well
    encode: Encode = encode_well


@dataclass(slots=True)
class FakeCluster:
    """Also the registry: `workers()` is what the router sees."""

    hub: Hub
    script: Script
    infos: list[WorkerInfo] = field(default_factory=list)
    servers: list[RpcServer] = field(default_factory=list)
    stale: tuple[WorkerInfo, ...] | None = None  # what `workers` says until the next `refresh`

    def workers(self) -> tuple[WorkerInfo, ...]:
        return tuple(self.infos) if self.stale is None else self.stale

    def refresh(self) -> tuple[WorkerInfo, ...]:
        self.stale = None
        return self.workers()

    def remove(self, worker_id: str) -> None:
        self.infos = [info for info in self.infos if info.worker_id != worker_id]


class _Servicer:
    """All three services of one worker."""

    def __init__(self, cluster: FakeCluster, worker_id: str) -> None:
        self._cluster = cluster
        self._worker_id = worker_id

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async for message in self._play(self._call(request, context), self._cluster.script.decode, context):
            yield message

    async def Prefill(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async for message in self._play(self._call(request, context), self._cluster.script.prefill, context):
            yield message

    async def Encode(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        stream = aiter(requests)
        call = self._call((await anext(stream)).start, context)
        call.requests = stream
        async for message in self._play(call, self._cluster.script.encode, context):
            yield message

    def _call(self, request: Any, context: Any) -> Call:
        worker = next(info for info in self._cluster.infos if info.worker_id == self._worker_id)
        is_by_line = not hasattr(context, "peer")
        call = Call(worker, request, self._cluster.hub, by_line=is_by_line)
        self._cluster.hub.calls.append(call)
        return call

    async def _play(self, call: Call, script: Callable[[Call], AsyncIterator[Any]], context: Any) -> AsyncIterator[Any]:
        try:
            async for message in script(call):
                yield message
            call.outcome = "ended"
        except TriptychError as error:
            call.outcome = error.code
            await abort_with(context, error)
        except Gone:
            call.outcome = "gone"
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        except BaseException:
            call.outcome = "cancelled"
            raise


@asynccontextmanager
async def fake_cluster(
    *workers: tuple[str, Sequence[Role]], script: Script | None = None
) -> AsyncIterator[FakeCluster]:
    """Workers by (id, roles), e-p-d with one each by default."""
    roles = workers or (("encoder-0", [Role.ENCODER]), ("prefill-0", [Role.PREFILL]), ("decode-0", [Role.DECODE]))
    cluster = FakeCluster(Hub(), script or Script())
    async with AsyncExitStack() as stack:
        for worker_id, able in roles:
            cluster.infos.append(await _start(stack, cluster, worker_id, able))
        yield cluster


async def _start(stack: AsyncExitStack, cluster: FakeCluster, worker_id: str, roles: Sequence[Role]) -> WorkerInfo:
    server = RpcServer("127.0.0.1", 0, token=TOKEN)
    cluster.servers.append(server)
    servicer = _Servicer(cluster, worker_id)
    server.add(decode_pb2_grpc.add_DecodeServicer_to_server, servicer)
    server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, servicer)
    server.add(encoder_pb2_grpc.add_EncoderServicer_to_server, servicer)
    if lines_folder is not None:
        knocks = ControlPort(lines_folder / f"{worker_id}.sock")
        await knocks.open()
        stack.push_async_callback(knocks.close)
        serve_lines(
            server, knocks, {Method.GENERATE: generate_method(servicer), Method.PREFILL: prefill_method(servicer)}
        )
    port = await server.start()
    stack.push_async_callback(server.stop, 0)
    blank = WorkerInfo(worker_id, new_epoch(), frozenset(roles), WorkerState.READY, f"127.0.0.1:{port}")
    if lines_folder is not None:
        blank = replace(blank, host_id=HOST)
    return replace(blank, max_sequence_tokens=0 if roles == [Role.ENCODER] else 4096)


async def until_lined(channels: LinedChannels, workers: Sequence[WorkerInfo]) -> None:
    async with asyncio.timeout(5):
        while any(channels.line(worker) is None for worker in workers):  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)


async def failing(error: TriptychError) -> AsyncIterator[Any]:
    """A call that ends with `error` before its first message."""
    raise error
    yield


def once(first: Callable[[Call], AsyncIterator[Any]], then: Callable[[Call], AsyncIterator[Any]]) -> Any:
    """`first` for the first call, `then` for the others."""
    waiting: list[Callable[[Call], AsyncIterator[Any]]] = [first]
    return lambda call: (waiting.pop() if waiting else then)(call)


async def for_ever() -> None:
    await asyncio.Event().wait()


@asynccontextmanager
async def running(
    *workers: tuple[str, Sequence[Role]], script: Script | None = None, max_queue: int = 8
) -> AsyncIterator[tuple[FakeCluster, Pipeline]]:
    """A router's pipeline over fake workers; where they have lines, calls go by them from the first on."""
    async with fake_cluster(*workers, script=script) as cluster:
        channels = LinedChannels(TOKEN, None, HOST)
        if lines_folder is not None:
            await until_lined(channels, cluster.infos)
        try:
            yield cluster, Pipeline(cluster, channels, AdmissionQueue(max_queue), SystemClock())
        finally:
            await channels.close()
