"""Whether a worker offers `cuda_ipc`, and with which driver."""

from __future__ import annotations

import logging

from triptych.core.errors import StartupError
from triptych.obs import metrics
from triptych.stages.language import ComputeChoice
from triptych.stages.settings import WorkerSettings
from triptych.transport.cuda_driver import CudaDriver
from triptych.transport.device import DeviceError, Driver
from triptych.transport.names import CUDA_IPC, INPROC, TRANSPORT_CHOICES

log = logging.getLogger(__name__)


def open_driver(common: WorkerSettings, compute: ComputeChoice) -> Driver | None:
    """None when the worker computes on no GPU or may not use `cuda_ipc`.

    Raises StartupError when there is no driver to be had and nothing else is allowed, or with `strict`.
    """
    if not offers_device(common):
        return None
    is_forced = common.transport == CUDA_IPC
    if compute.device.type != "cuda":
        if is_forced:
            raise StartupError(
                "--transport cuda_ipc moves data between workers that compute on NVIDIA GPUs, and this one computes on"
                " the CPU; use --device cuda, or --transport auto"
            )
        return None
    try:
        return CudaDriver(compute.device)
    except DeviceError as error:
        if is_forced or common.strict:
            raise StartupError(f"--transport {common.transport} needs the GPU's driver ({error}); try shm") from error
        metrics.FALLBACKS.labels("cuda_ipc_unavailable").inc()
        log.warning("device memory cannot be shared, host memory is", extra={"reason": str(error)})
        return None


def offers_device(common: WorkerSettings) -> bool:
    return CUDA_IPC in TRANSPORT_CHOICES[common.transport]


def without_device(transports: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in transports if name != CUDA_IPC)


def is_device_only(transports: tuple[str, ...]) -> bool:
    """Whether no other process may write to this one's host memory."""
    return set(transports) <= {INPROC, CUDA_IPC}
