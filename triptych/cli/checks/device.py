"""Whether two processes here can share device memory, by doing it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from triptych.cli.checks.finding import Finding, fail, ok, warn
from triptych.cli.checks.machine import Machine

if TYPE_CHECKING:
    from triptych.transport.device import Driver

PEER_TIMEOUT_S: Final = 60.0
NUM_BYTES: Final = 1 << 20
PEER: Final = (sys.executable, "-m", f"{__package__}.device_peer")
_FORCED: Final = "cuda_ipc"


def cuda_ipc(machine: Machine, transport: str) -> Finding:
    """`transport` is the setting: only where it is this one does a cluster need it."""
    if not machine.has_gpu:
        return _without(transport, "not here: torch can use no GPU")
    import torch

    from triptych.transport.cuda_driver import CudaDriver
    from triptych.transport.device import DeviceError

    try:
        fault = fault_of(CudaDriver(torch.device("cuda", 0)), PEER)
    except DeviceError as error:
        fault = str(error)
    if fault is None:
        return ok("cuda_ipc", "two processes of this user shared device memory")
    found = f"device memory cannot be shared: {fault}"
    todo = "look at the GPU's line above; in containers give all workers one IPC namespace (docker run --ipc)"
    if transport == _FORCED:
        return fail("cuda_ipc", found, f"{todo}, or use --transport auto")
    return warn("cuda_ipc", found, f"{todo}; until then they use shared memory of the host, which costs copies")


def fault_of(driver: Driver, peer: Sequence[str]) -> str | None:
    """Another process (`peer` and two arguments) opens an allocation of ours and writes to it. None when that arrived.

    Raises DeviceError when there is nothing to be opened.
    """
    pointer = driver.malloc(NUM_BYTES)
    try:
        command = [*peer, driver.ipc_export(pointer).hex(), str(NUM_BYTES)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PEER_TIMEOUT_S)
        if done.returncode:
            return (done.stderr.strip().splitlines() or [f"the other process ended with {done.returncode}"])[-1][-200:]
        memory = driver.tensor(pointer, NUM_BYTES).cpu()
        return None if bool((memory == PATTERN).all()) else "what another process wrote did not arrive"
    except subprocess.TimeoutExpired:
        return "the other process did not end"
    finally:
        driver.free(pointer)


def _without(transport: str, found: str) -> Finding:
    if transport == _FORCED:
        return fail("cuda_ipc", found, "use --transport auto, or a machine with an NVIDIA GPU")
    return ok("cuda_ipc", found)


PATTERN: Final = 0xA5
