"""A worker that announces itself, listens, holds a shared segment, and ends as it is told.

STUB_CRASH=NAME makes that worker die at start, STUB_STUBBORN=NAME makes it ignore SIGTERM.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from pathlib import Path

from triptych.core.ids import new_epoch
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.registry.runtime import RuntimeFolder
from triptych.registry.static import StaticRegistry
from triptych.transport.shm import SharedSegment


def flag(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def run_worker(role: Role) -> None:
    worker_id = flag("--worker-id")
    if os.environ.get("STUB_CRASH") == worker_id:
        sys.exit("this stub was told to crash")
    stop = threading.Event()
    handler = signal.SIG_IGN if os.environ.get("STUB_STUBBORN") == worker_id else lambda *_: stop.set()
    signal.signal(signal.SIGTERM, handler)
    ports = [socket.create_server((flag("--host"), int(flag(name)))) for name in ("--port", "--metrics-port")]
    grpc, metrics = (f"127.0.0.1:{port.getsockname()[1]}" for port in ports)
    segment = SharedSegment.create(4096, "stub")
    registry = StaticRegistry(RuntimeFolder(Path(flag("--runtime-dir"))))
    worker = WorkerInfo(
        worker_id,
        new_epoch(),
        frozenset({role}),
        WorkerState.STARTING,
        grpc,
        model_name="m",
        pid=os.getpid(),
        metrics_address=metrics,
    )
    registry.announce(worker)
    registry.set_state(WorkerState.READY)
    stop.wait()
    registry.withdraw()
    segment.close()
