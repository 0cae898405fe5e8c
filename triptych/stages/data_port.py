"""Which transports a worker offers, and the data port that some of them need."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack

from triptych.core.errors import StartupError
from triptych.obs import metrics
from triptych.registry.runtime import RuntimeFolder
from triptych.stages.settings import WorkerSettings
from triptych.transport.curve import CurveKeys
from triptych.transport.names import TRANSPORT_CHOICES, ZMQ_IPC, ZMQ_TCP
from triptych.transport.zmq_port import DataPort, data_socket_path, sweep_dead_sockets

log = logging.getLogger(__name__)


async def open_data_port(common: WorkerSettings, exit_stack: AsyncExitStack) -> tuple[tuple[str, ...], DataPort | None]:
    """For a worker that lands what others send: its transports, best first, and its port, closed with the stack. There
    is none where shared memory alone is wanted.

    Raises StartupError when it cannot listen, or when its socket's path is too long and no other way is allowed.
    """
    transports = TRANSPORT_CHOICES[common.transport]
    if not {ZMQ_IPC, ZMQ_TCP} & set(transports):
        return transports, None
    folder = RuntimeFolder(common.runtime_dir).make_sockets_path()
    sweep_dead_sockets(folder, common.worker_id)
    path = data_socket_path(folder, common.worker_id) if ZMQ_IPC in transports else None
    if ZMQ_IPC in transports and path is None:
        transports = _without_path(common, transports)
    tcp_port = common.data_port if ZMQ_TCP in transports else None
    keys = CurveKeys.make() if common.tls_files is not None else None
    port = DataPort(common.host, tcp_port, path, keys=keys, insecure_network=common.insecure_network)
    exit_stack.push_async_callback(port.close)
    await port.open()
    return transports, port


def _without_path(common: WorkerSettings, transports: tuple[str, ...]) -> tuple[str, ...]:
    if common.strict or ZMQ_TCP not in transports:
        raise StartupError(
            "the path of the runtime folder is too long for a socket in it; choose a shorter --runtime-dir, or"
            " --transport zmq-tcp"
        )
    metrics.FALLBACKS.labels("socket_path_too_long").inc()
    log.warning("the runtime folder's path is too long for a socket in it: peers on this host use shm or TCP")
    return tuple(entry for entry in transports if entry != ZMQ_IPC)
