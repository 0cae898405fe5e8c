"""Names of the transports, and what `--transport` makes of them. Imports nothing, so that settings can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

INPROC: Final = "inproc"
CUDA_IPC: Final = "cuda_ipc"
SHM: Final = "shm"
NIXL: Final = "nixl"
ZMQ_IPC: Final = "zmq-ipc"
ZMQ_TCP: Final = "zmq-tcp"

SAME_HOST: Final = (CUDA_IPC, SHM, ZMQ_IPC)
"""What works only where both ends see the same memory and the same files."""

TRANSPORT_CHOICES: Final = {
    "auto": (INPROC, CUDA_IPC, SHM, ZMQ_IPC, ZMQ_TCP),
    "cuda_ipc": (INPROC, CUDA_IPC),
    "shm": (INPROC, SHM),
    "auto+nixl": (INPROC, CUDA_IPC, SHM, NIXL, ZMQ_IPC, ZMQ_TCP),
    "nixl": (INPROC, NIXL),
    "zmq": (INPROC, ZMQ_IPC, ZMQ_TCP),
    "zmq-ipc": (INPROC, ZMQ_IPC),
    "zmq-tcp": (INPROC, ZMQ_TCP),
}
"""What a worker may use, best first. Two workers use what both may; within a process nothing needs to travel. A worker
without a device offers no `cuda_ipc`, one without the library or on a network that nobody called safe no `nixl`."""


def shared_transports(
    sender: Sequence[str], receiver: Sequence[str], *, is_same_host: bool, is_same_process: bool = False
) -> tuple[str, ...]:
    """What both may use and what can work between them, the sender's first choice first."""
    possible = {
        INPROC: is_same_process,
        CUDA_IPC: is_same_host,  # whether the devices reach each other is seen when the sender opens the memory
        SHM: is_same_host,
        NIXL: True,  # whether the network lets them is seen when the sender connects
        ZMQ_IPC: is_same_host,
        ZMQ_TCP: True,
    }
    return tuple(name for name in sender if name in receiver and possible.get(name, False))
