"""Workers that only keep time: the real protos over real gRPC, in a process of their own.

They grant, wait, ask encoders for nothing they have, take the media bytes they need in the chunks that the router
sends, and answer one token at each step of their clock. What was held up (this process got no core in time) comes
together, as it does from a worker. Only pixels, weights and KV are missing.

python -m benchmarks.router.fakes SPEC.json    (ends with its standard input)
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.router.processes import say
from benchmarks.router.timing import Pace, PictureCache, PrefixCache, next_step_s
from triptych.core.ids import new_capability, new_epoch, new_grant_id
from triptych.core.plan import FinishReason
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.registry.runtime import RuntimeFolder
from triptych.registry.static import StaticRegistry
from triptych.rpc import convert
from triptych.rpc.line_frames import Method
from triptych.rpc.line_server import generate_method, prefill_method, serve_lines
from triptych.rpc.server import RpcServer, add_describe
from triptych.transport.control_port import ControlPort
from triptych.transport.layout import host_id
from triptych.transport.zmq_port import data_socket_path
from triptych.wire.v1 import common_pb2 as common
from triptych.wire.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    encoder_pb2,
    encoder_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)

MAX_SEQUENCE_TOKENS = 4096
Key = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Spec:
    """`workers`: id -> its stages; `answer_ids`: the tokens of every answer, over and over; `is_elsewhere`: they say
    that they are on another host than the router."""

    folder: str
    workers: Mapping[str, Sequence[str]]
    pace: Mapping[str, Any]
    answer_ids: Sequence[int]
    is_elsewhere: bool = False


@dataclass(slots=True)
class Attempts:
    """What the workers tell each other, by attempt. Whoever serves Generate forgets it at the end."""

    landed: dict[Key, set[int]] = field(default_factory=lambda: defaultdict(set))
    news: dict[Key, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))
    kv: dict[Key, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))

    def land(self, key: Key, index: int) -> None:
        self.landed[key].add(index)
        self.news[key].set()

    async def until_landed(self, key: Key, count: int) -> None:
        while len(self.landed[key]) < count:
            self.news[key].clear()
            await self.news[key].wait()

    def forget(self, key: Key) -> None:
        self.landed.pop(key, None)
        self.news.pop(key, None)
        self.kv.pop(key, None)


class TimedWorker:
    """All three services of one worker, one piece of work at a time."""

    def __init__(self, info: WorkerInfo, pace: Pace, answer_ids: Sequence[int], attempts: Attempts) -> None:
        self.info = info
        self.prompts = PrefixCache(pace.cached_tokens)
        self.pictures = PictureCache(pace.cached_pictures)
        self.num_encoded = 0
        self._pace = pace
        self._ids = answer_ids
        self._attempts = attempts
        self._machine = asyncio.Lock()
        self._peers: Mapping[str, TimedWorker] = {}

    def meet(self, peers: Mapping[str, TimedWorker]) -> None:
        self._peers = peers

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[decode_pb2.GenerateResponse]:  # noqa: N802
        key = key_of(request.ref)
        try:
            yield decode_pb2.GenerateResponse(granted=self._grant())
            await self._attempts.kv[key].wait()
            count = request.plan.sampling.max_tokens
            async for batch in self._batches(count):
                yield decode_pb2.GenerateResponse(tokens=decode_pb2.TokenBatch(tokens=map(self._token, batch)))
            yield decode_pb2.GenerateResponse(
                generate_done=decode_pb2.GenerateDone(
                    finish_reason=convert.finish_reason_to_proto(FinishReason.LENGTH),
                    usage=common.Usage(completion_tokens=count),
                )
            )
        finally:
            self._attempts.forget(key)

    async def _batches(self, count: int) -> AsyncIterator[range]:
        """One index at each step; several where steps were missed."""
        step_s = self._pace.step_s
        due_s, index = next_step_s(time.monotonic(), step_s), 1
        while index < count:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            num_due = 1 + max(0, int((time.monotonic() - due_s) / step_s))
            end = min(count, index + num_due)
            yield range(index, end)
            index, due_s = end, due_s + num_due * step_s

    async def Prefill(self, request: Any, context: Any) -> AsyncIterator[prefill_pb2.PrefillResponse]:  # noqa: N802
        key = key_of(request.ref)
        ids = expanded(request.plan)
        await self._attempts.until_landed(key, len(request.plan.items))
        async with self._machine:
            cached = self.prompts.match(ids)
            await asyncio.sleep(self._pace.prefill_s + self._pace.prefill_token_s * (len(ids) - cached))
            self.prompts.keep(ids)
            for item in request.plan.items:
                self.pictures.keep(item.identity)
        yield prefill_pb2.PrefillResponse(admitted=prefill_pb2.PrefillAdmitted(cached_tokens=cached))
        yield prefill_pb2.PrefillResponse(first_token=self._token(0))
        self._attempts.kv[key].set()
        yield prefill_pb2.PrefillResponse(prefill_done=prefill_pb2.PrefillDone())

    async def Encode(  # noqa: N802
        self, requests: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[encoder_pb2.EncodeResponse]:
        stream = aiter(requests)
        start = (await anext(stream)).start
        prefill = self._peers[start.prefill_worker_id]
        for one in start.items:
            identity = one.item.identity
            if not (prefill.pictures.has(identity) or self.pictures.has(identity)):
                yield encoder_pb2.EncodeResponse(need_bytes=encoder_pb2.NeedBytes(item_index=one.item_index))
                await _receive(stream, one.item.media_bytes)
                async with self._machine:
                    self.num_encoded += 1
                    await asyncio.sleep(self._pace.encode_s)
                    self.pictures.keep(identity)
            self._attempts.land(key_of(start.ref), one.item_index)
            yield encoder_pb2.EncodeResponse(item_done=encoder_pb2.ItemDone(item_index=one.item_index))
        yield encoder_pb2.EncodeResponse(encode_done=encoder_pb2.EncodeDone())

    def _token(self, index: int) -> common.Token:
        return common.Token(index=index, id=self._ids[index % len(self._ids)])

    def _grant(self) -> common.Grant:
        return common.Grant(
            grant_id=new_grant_id(),
            worker_id=self.info.worker_id,
            epoch=self.info.epoch,
            capability=new_capability(),
            num_pages=1,
            generation=1,
        )


async def _receive(stream: AsyncIterator[Any], num_bytes: int) -> None:
    while num_bytes > 0:
        num_bytes -= len((await anext(stream)).chunk.data)


def key_of(ref: common.AttemptRef) -> Key:
    return ref.request_id, ref.choice, ref.attempt


def expanded(plan: common.Plan) -> list[int]:
    """The prompt as a cache sees it: at the rows of a picture its identity."""
    runs = {run.compact_index: (hash(item.identity), run.length) for item in plan.items for run in item.ranges}
    ids: list[int] = []
    for index, token_id in enumerate(plan.compact_ids):
        value, length = runs.get(index, (token_id, 1))
        ids += [value] * length
    return ids


async def serve(spec: Spec) -> None:
    folder = RuntimeFolder(Path(spec.folder))
    registry = StaticRegistry(folder)
    attempts, pace = Attempts(), Pace(**spec.pace)
    workers: dict[str, TimedWorker] = {}
    for worker_id, roles in spec.workers.items():
        stages = frozenset(map(Role, roles))
        blank = WorkerInfo(worker_id, new_epoch(), stages, WorkerState.READY, "")
        workers[worker_id] = TimedWorker(blank, pace, spec.answer_ids, attempts)
    for worker in workers.values():
        worker.meet(workers)
        await _listen(worker, folder, "elsewhere" if spec.is_elsewhere else host_id())
        registry.announce(worker.info)
    addresses = {name: worker.info.grpc_address for name, worker in workers.items()}
    by_lines = all(worker.info.host_id == host_id() for worker in workers.values())
    say({"workers": addresses, "calls": "by lines" if by_lines else "by gRPC"})
    while await asyncio.to_thread(sys.stdin.readline):
        say({"num_encoded": sum(worker.num_encoded for worker in workers.values())})
    registry.withdraw()


async def _listen(worker: TimedWorker, folder: RuntimeFolder, host: str) -> None:
    server = RpcServer("127.0.0.1", 0, token=folder.token())
    add_describe(server, lambda: worker.info)
    server.add(decode_pb2_grpc.add_DecodeServicer_to_server, worker)
    server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, worker)
    server.add(encoder_pb2_grpc.add_EncoderServicer_to_server, worker)
    path = data_socket_path(folder.make_sockets_path(), worker.info.worker_id)
    if path is None:
        host = "elsewhere"  # without a line it is as good as there
    else:
        port = ControlPort(path)
        await port.open()
        serve_lines(server, port, {Method.GENERATE: generate_method(worker), Method.PREFILL: prefill_method(worker)})
    address = f"127.0.0.1:{await server.start()}"
    decodes = worker.info.roles != {Role.ENCODER}
    worker.info = replace(
        worker.info, host_id=host, grpc_address=address, max_sequence_tokens=MAX_SEQUENCE_TOKENS if decodes else 0
    )


if __name__ == "__main__":
    uvloop.run(serve(Spec(**json.loads(Path(sys.argv[1]).read_text()))))
