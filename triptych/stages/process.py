"""Runs a worker as a process until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from contextlib import suppress
from typing import cast

import uvloop

from triptych.core.failpoints import parse_failpoints
from triptych.faults import points
from triptych.obs.log import LogFormat, configure_logging
from triptych.stages.worker import Worker, WorkerPlan


def run_worker(plan: WorkerPlan, service: str) -> int:
    """Starts, serves until SIGTERM or SIGINT, drains. Returns the exit status."""
    configure_logging(service, plan.common.log_level, cast(LogFormat, plan.common.log_format))
    _stand_back(plan.common.nice)
    points.arm(parse_failpoints(plan.common.failpoints), plan.common.worker_id)
    uvloop.run(_serve(plan))
    gc.freeze()  # all is closed; the interpreter would look through torch and transformers for cycles, for a second
    return 0


def _stand_back(nice: int) -> None:
    """Before there are threads, which inherit it. Where the kernel shares cores out by session (autogroups), a worker
    has a session of its own, and only the session's own value counts against others."""
    os.nice(nice)
    with suppress(OSError), open("/proc/self/autogroup", "w") as session:
        session.write(str(nice))


async def _serve(plan: WorkerPlan) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    worker = Worker(plan)
    await worker.start()
    try:
        await stop.wait()
    finally:
        await worker.stop()
