"""Which transports a worker offers, the data port that some need, and the control port of those within a host."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from pathlib import Path

from triptych.core.errors import StartupError
from triptych.obs import metrics
from triptych.registry.runtime import RuntimeFolder
from triptych.stages.settings import WorkerSettings
from triptych.transport.control_port import ControlPort
from triptych.transport.curve import CurveKeys
from triptych.transport.names import SAME_HOST, TRANSPORT_CHOICES, ZMQ_IPC, ZMQ_TCP
from triptych.transport.zmq_port import DataPort, data_socket_path, sweep_dead_sockets

log = logging.getLogger(__name__)


async def open_data_port(common: WorkerSettings, exit_stack: AsyncExitStack) -> tuple[tuple[str, ...], DataPort | None]:
    """For a worker that lands what others send: its transports, best first, and its port, closed with the stack. There
    is none where shared memory alone is wanted.

    Raises StartupError when it cannot listen, or when its socket's path is too long and no other way is allowed.
    """
    transports = TRANSPORT_CHOICES[common.transport]
    sweep_dead_sockets(RuntimeFolder(common.runtime_dir).make_sockets_path(), common.worker_id)
    if not {ZMQ_IPC, ZMQ_TCP} & set(transports):
        return transports, None
    path = _socket_path(common) if ZMQ_IPC in transports else None
    if ZMQ_IPC in transports and path is None:
        transports = _without_path(common, transports)
    tcp_port = common.data_port if ZMQ_TCP in transports else None
    keys = CurveKeys.make() if common.tls_files is not None else None
    port = DataPort(common.host, tcp_port, path, keys=keys, insecure_network=common.insecure_network)
    exit_stack.push_async_callback(port.close)
    await port.open()
    return transports, port


async def open_control_port(
    common: WorkerSettings, transports: tuple[str, ...], exit_stack: AsyncExitStack
) -> ControlPort | None:
    """For a worker that senders of its host write to; None where there are none, or where the path is too long.

    Raises StartupError when it cannot listen, or when nothing second-best is allowed.
    """
    if not set(SAME_HOST) & set(transports):
        return None
    path = _socket_path(common)
    if path is None:
        if common.strict:
            raise StartupError("the path of the runtime folder is too long for a socket in it: choose a shorter one")
        metrics.FALLBACKS.labels("control_socket").inc()
        log.warning("the runtime folder's path is too long for a socket in it: control frames go by gRPC")
        return None
    port = ControlPort(path)
    exit_stack.push_async_callback(port.close)
    await port.open()
    return port


async def open_line_port(common: WorkerSettings, exit_stack: AsyncExitStack) -> ControlPort | None:
    """Where routers of this host knock; None where the path is too long: their calls go by gRPC.

    Raises StartupError when it cannot listen.
    """
    sweep_dead_sockets(RuntimeFolder(common.runtime_dir).make_sockets_path(), common.worker_id)
    path = _socket_path(common)
    if path is None:
        metrics.FALLBACKS.labels("line").inc()
        log.warning("the runtime folder's path is too long for a socket in it: calls go by gRPC")
        return None
    port = ControlPort(path)
    exit_stack.push_async_callback(port.close)
    await port.open()
    return port


def _socket_path(common: WorkerSettings) -> Path | None:
    return data_socket_path(RuntimeFolder(common.runtime_dir).make_sockets_path(), common.worker_id)


def _without_path(common: WorkerSettings, transports: tuple[str, ...]) -> tuple[str, ...]:
    if common.strict or ZMQ_TCP not in transports:
        raise StartupError(
            "the path of the runtime folder is too long for a socket in it; choose a shorter --runtime-dir, or"
            " --transport zmq-tcp"
        )
    metrics.FALLBACKS.labels("socket_path_too_long").inc()
    log.warning("the runtime folder's path is too long for a socket in it: peers on this host use shm or TCP")
    return tuple(entry for entry in transports if entry != ZMQ_IPC)
