"""The other process of the check of device memory: opens the allocation it is told of, writes, and lets go.

python -m triptych.cli.checks.device_peer HANDLE NUM_BYTES
"""

from __future__ import annotations

import sys

import torch

from triptych.cli.checks.device import PATTERN
from triptych.transport.cuda_driver import CudaDriver
from triptych.transport.device import DeviceError, Driver


def main(driver: Driver, handle: bytes, num_bytes: int) -> None:
    pointer = driver.ipc_open(handle, num_bytes)
    memory = driver.tensor(pointer, num_bytes)
    driver.copy_async(memory, torch.full((num_bytes,), PATTERN, dtype=torch.uint8))
    driver.event_record().synchronize()
    del memory
    driver.ipc_close(pointer)


if __name__ == "__main__":
    try:
        main(CudaDriver(torch.device("cuda", 0)), bytes.fromhex(sys.argv[1]), int(sys.argv[2]))
    except DeviceError as error:
        sys.exit(str(error))
