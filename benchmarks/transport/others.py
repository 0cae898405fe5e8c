"""The sending ends that we are compared with."""

from __future__ import annotations

import base64
import importlib
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import grpc
import numpy as np
import zmq

from benchmarks.transport.arms import Arm, Transfer
from benchmarks.transport.cells import GRPC, MOONCAKE, PYZMQ_IPC, PYZMQ_TCP, RAW_NIXL, RAW_NIXL_TCP, under_way
from benchmarks.transport.receivers import ANY_LENGTH, METHOD, SERVICE, TCP_ALONE, Where, nixl_agent
from triptych.transport.zmq_carrier import SEND_HIGH_WATER

TIMEOUT_S = 30.0


class NotMoved(RuntimeError):
    """A transfer that another library did not do; ends its arm."""


class Pyzmq:
    """Whole messages without a copy. What comes back says how long each was."""

    def __init__(self, where: Where, source: memoryview) -> None:
        self._source = source
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._data, self._acks = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        self._data.sndhwm = SEND_HIGH_WATER
        self._data.sndtimeo = self._acks.rcvtimeo = round(TIMEOUT_S * 1e3)
        self._data.connect(where["data"])
        self._acks.connect(where["acks"])

    async def prepare(self, num_bytes: int) -> Transfer:
        return partial(self._move, num_bytes)

    async def stream(self, num_bytes: int, count: int) -> None:
        for number in range(count):
            if number >= under_way(num_bytes):
                self._acknowledged(num_bytes)
            self._data.send(self._source[:num_bytes], copy=False)
        for _ in range(min(count, under_way(num_bytes))):
            self._acknowledged(num_bytes)

    def close(self) -> None:
        self._context.destroy(linger=0)

    async def _move(self, num_bytes: int) -> None:
        self._data.send(self._source[:num_bytes], copy=False)
        self._acknowledged(num_bytes)

    def _acknowledged(self, num_bytes: int) -> None:
        _check_length(self._acks.recv(), num_bytes)


class GrpcBytes:
    """Unary calls from the library's own threads: without an event loop, which costs the round trip."""

    def __init__(self, where: Where, source: memoryview) -> None:
        self._source = source
        self._payload = b""
        self._channel = grpc.insecure_channel(
            where["address"], options=[("grpc.max_send_message_length", ANY_LENGTH), ("grpc.enable_http_proxy", 0)]
        )
        self._take = self._channel.unary_unary(
            f"/{SERVICE}/{METHOD}", request_serializer=_same, response_deserializer=_same
        )

    async def prepare(self, num_bytes: int) -> Transfer:
        return partial(self._move, self._bytes(num_bytes))

    async def stream(self, num_bytes: int, count: int) -> None:
        payload = self._bytes(num_bytes)
        calls: deque[Any] = deque()
        for _ in range(count):
            if len(calls) >= under_way(num_bytes):
                _check_length(calls.popleft().result(), num_bytes)
            calls.append(self._take.future(payload, timeout=TIMEOUT_S))
        for call in calls:
            _check_length(call.result(), num_bytes)

    def close(self) -> None:
        self._channel.close()

    async def _move(self, payload: bytes) -> None:
        _check_length(self._take(payload, timeout=TIMEOUT_S), len(payload))

    def _bytes(self, num_bytes: int) -> bytes:
        """gRPC takes nothing else. Made once for a size, outside of what is measured."""
        if len(self._payload) != num_bytes:
            self._payload = bytes(self._source[:num_bytes])
        return self._payload


class Nixl:
    """One-sided writes by UCX, as many handles as are under way. Nobody is told of what has landed."""

    def __init__(self, where: Where, source: memoryview, backend: dict[str, str]) -> None:
        self._agent = nixl_agent("sender", backend)
        self._source = np.frombuffer(source, dtype=np.uint8)
        self._there = where["memory"]
        self._registered = self._agent.register_memory([(self._here, len(source), 0, "")], "DRAM")
        self._peer = self._agent.add_remote_agent(base64.b64decode(where["agent"]))
        self._handles: dict[tuple[int, int], Any] = {}

    @property
    def _here(self) -> int:
        return int(self._source.ctypes.data)

    async def prepare(self, num_bytes: int) -> Transfer:
        handle = self._handle(num_bytes, 0)
        return partial(self._move, handle)

    async def stream(self, num_bytes: int, count: int) -> None:
        handles = [self._handle(num_bytes, place) for place in range(under_way(num_bytes))]
        for number in range(count):
            if number >= len(handles):
                self._wait(handles[number % len(handles)])
            self._agent.transfer(handles[number % len(handles)])
        for handle in handles[:count]:
            self._wait(handle)

    def close(self) -> None:
        for handle in self._handles.values():
            self._agent.release_xfer_handle(handle)
        self._agent.deregister_memory(self._registered)

    async def _move(self, handle: Any) -> None:
        self._agent.transfer(handle)
        self._wait(handle)

    def _wait(self, handle: Any) -> None:
        while (state := self._agent.check_xfer_state(handle)) != "DONE":
            if state == "ERR":
                raise NotMoved("NIXL could not write")

    def _handle(self, num_bytes: int, place: int) -> Any:
        known = self._handles.get((num_bytes, place))
        if known is None:
            offset = place * num_bytes
            here = self._agent.get_xfer_descs([(self._here, num_bytes, 0)], "DRAM")
            there = self._agent.get_xfer_descs([(self._there + offset, num_bytes, 0)], "DRAM")
            known = self._agent.initialize_xfer("WRITE", here, there, self._peer)
            self._handles[num_bytes, place] = known
        return known


class Mooncake:
    """Writes by its transfer engine over TCP, one after the other: the call returns when one is done."""

    def __init__(self, where: Where, source: memoryview) -> None:
        self._engine = importlib.import_module("mooncake.engine").TransferEngine()
        self._source = np.frombuffer(source, dtype=np.uint8)
        self._address, self._there = where["address"], where["memory"]
        here = int(self._source.ctypes.data)
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") or self._engine.register_memory(
            here, len(source)
        ):
            raise NotMoved("Mooncake's transfer engine could not be set up")

    async def prepare(self, num_bytes: int) -> Transfer:
        return partial(self._move, num_bytes, 0)

    async def stream(self, num_bytes: int, count: int) -> None:
        for number in range(count):
            await self._move(num_bytes, number % under_way(num_bytes) * num_bytes)

    def close(self) -> None:
        """It ends with the process."""

    async def _move(self, num_bytes: int, offset: int) -> None:
        here = int(self._source.ctypes.data)
        if self._engine.transfer_sync_write(self._address, here, self._there + offset, num_bytes):
            raise NotMoved("Mooncake could not write")


class ClosableArm(Arm, Protocol):
    def close(self) -> None: ...


def _same(data: bytes) -> bytes:
    return data


def _check_length(said: bytes, num_bytes: int) -> None:
    if int.from_bytes(said, "little") != num_bytes:
        raise NotMoved("another length came than was sent")


SENDERS: Mapping[str, Callable[[Where, memoryview], ClosableArm]] = {
    PYZMQ_IPC: Pyzmq,
    PYZMQ_TCP: Pyzmq,
    GRPC: GrpcBytes,
    RAW_NIXL: partial(Nixl, backend={}),
    RAW_NIXL_TCP: partial(Nixl, backend=TCP_ALONE),
    MOONCAKE: Mooncake,
}
