"""Names of the transports, and what `--transport` makes of them. Imports nothing, so that settings can."""

from __future__ import annotations

from typing import Final

INPROC: Final = "inproc"
SHM: Final = "shm"
ZMQ_IPC: Final = "zmq-ipc"
ZMQ_TCP: Final = "zmq-tcp"

TRANSPORT_CHOICES: Final = {
    "auto": (INPROC, SHM, ZMQ_IPC, ZMQ_TCP),
    "shm": (INPROC, SHM),
    "zmq": (INPROC, ZMQ_IPC, ZMQ_TCP),
    "zmq-ipc": (INPROC, ZMQ_IPC),
    "zmq-tcp": (INPROC, ZMQ_TCP),
}
"""What a worker may use, best first. Two workers use what both may; within a process nothing needs to travel."""
