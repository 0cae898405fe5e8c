"""The receiving ends that we are compared with. Each takes bytes and says when it has them, and nothing more.

A function takes a folder for sockets and the bytes of memory that there must be, starts one on threads of its own and
answers where it is to be sent to, as JSON-ready values. It raises ImportError where what it needs is not installed.
"""

from __future__ import annotations

import base64
import importlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import zmq

from benchmarks.transport.cells import GRPC, MOONCAKE, PYZMQ_IPC, PYZMQ_TCP, RAW_NIXL, RAW_NIXL_TCP
from triptych.transport.nixl_driver import WAKE_US, engine_config
from triptych.transport.zmq_port import RECEIVE_HIGH_WATER

Where = dict[str, Any]
SERVICE, METHOD = "benchmark.Bytes", "Take"
ANY_LENGTH = -1
TCP_ALONE = {"engine_config": engine_config("127.0.0.1", {})}
_kept: list[object] = []  # what must live as long as the process


def pyzmq_ipc(folder: Path, _: int) -> Where:
    return _pyzmq(f"ipc://{folder}/pyzmq-data", f"ipc://{folder}/pyzmq-acks")


def pyzmq_tcp(_: Path, __: int) -> Where:
    return _pyzmq("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")


def _pyzmq(data_endpoint: str, acks_endpoint: str) -> Where:
    """Sockets of the kind that ours are, with the same high-water mark; nothing is copied out of a message."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    data, acks = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    data.rcvhwm = RECEIVE_HIGH_WATER
    data.bind(data_endpoint)
    acks.bind(acks_endpoint)
    threading.Thread(target=_take_messages, args=(data, acks), daemon=True).start()
    return {"data": data.getsockopt_string(zmq.LAST_ENDPOINT), "acks": acks.getsockopt_string(zmq.LAST_ENDPOINT)}


def _take_messages(data: zmq.Socket[bytes], acks: zmq.Socket[bytes]) -> None:
    while True:
        message = data.recv(copy=False)
        acks.send(len(message.buffer).to_bytes(8, "little"))


def grpc_bytes(_: Path, __: int) -> Where:
    """A unary call whose request is the bytes, without protobuf around them."""
    take = grpc.unary_unary_rpc_method_handler(lambda data, _: len(data).to_bytes(8, "little"))
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.max_receive_message_length", ANY_LENGTH)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: take}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    _kept.append(server)
    return {"address": f"127.0.0.1:{port}"}


def nixl(_: Path, room_bytes: int) -> Where:
    """Host memory that NIXL's UCX backend writes to from afar, by whatever way UCX likes best."""
    return _nixl(room_bytes, {})


def nixl_tcp(_: Path, room_bytes: int) -> Where:
    """By the network alone, as ours."""
    return _nixl(room_bytes, TCP_ALONE)


def _nixl(room_bytes: int, backend: dict[str, str]) -> Where:
    memory = np.zeros(room_bytes, dtype=np.uint8)
    agent = nixl_agent("receiver", backend)
    address = int(memory.ctypes.data)
    _kept.extend((memory, agent, agent.register_memory([(address, room_bytes, 0, "")], "DRAM")))
    return {"agent": base64.b64encode(agent.get_agent_metadata()).decode(), "memory": address}


def nixl_agent(name: str, backend: dict[str, str]) -> Any:
    """Its Python class, but for the thread that drives it: the class has one that never sleeps, and so would take a
    core from all other arms."""
    api, bindings = importlib.import_module("nixl._api"), importlib.import_module("nixl._bindings")
    agent = api.nixl_agent(name, api.nixl_agent_config(backends=[]))
    config = bindings.nixlAgentConfig()
    config.useProgThread, config.pthrDelay = True, WAKE_US
    agent.agent = bindings.nixlAgent(name, config)
    agent.create_backend("UCX", backend)
    return agent


def mooncake(_: Path, room_bytes: int) -> Where:
    """Host memory that Mooncake's transfer engine writes to by TCP."""
    engine = importlib.import_module("mooncake.engine").TransferEngine()
    memory = np.zeros(room_bytes, dtype=np.uint8)
    address = int(memory.ctypes.data)
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") or engine.register_memory(address, room_bytes):
        raise RuntimeError("Mooncake's transfer engine could not be set up")
    _kept.extend((memory, engine))
    return {"address": f"127.0.0.1:{engine.get_rpc_port()}", "memory": address}


RECEIVERS: Mapping[str, Callable[[Path, int], Where]] = {
    PYZMQ_IPC: pyzmq_ipc,
    PYZMQ_TCP: pyzmq_tcp,
    GRPC: grpc_bytes,
    RAW_NIXL: nixl,
    RAW_NIXL_TCP: nixl_tcp,
    MOONCAKE: mooncake,
}
