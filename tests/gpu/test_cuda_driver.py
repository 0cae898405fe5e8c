"""The real driver of `cuda_ipc`, on a real GPU, in two processes. Nothing here runs without one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from triptych.transport.cuda_driver import GRANULARITY_BYTES, CudaDriver
from triptych.transport.device import HANDLE_BYTES, UUID_BYTES, DeviceError
from triptych.transport.device_arena import DeviceArena, DeviceImports, ImportedArena

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no NVIDIA GPU"),
    pytest.mark.timeout(120),
]
ROOT = Path(__file__).parents[2]
NUM_BYTES = 3 << 20

PEER = """
import sys
import threading
import torch
from triptych.transport.cuda_driver import CudaDriver
from triptych.transport.device import DeviceAddress
from triptych.transport.device_arena import DeviceImports, ImportedArena

driver = CudaDriver(torch.device("cuda", 0))
address = DeviceAddress(bytes.fromhex(sys.argv[1]), bytes.fromhex(sys.argv[2]), sys.argv[3])
arena = ImportedArena.open(DeviceImports(driver), address, int(sys.argv[4]), 7)
data = (torch.arange(1 << 20, device="cuda") % 251).to(torch.uint8)
event = arena.launch(lambda memory: driver.copy_async(memory[4096 : 4096 + (1 << 20)], data))
cells = torch.arange(2 * 4 * 16, device="cuda", dtype=torch.uint8).view(2, 4, 16)
event = arena.launch(lambda memory: driver.scatter_async(memory[: 4 * 8 * 16].view(4, 8, 16), [6, 1], cells))
event.synchronize()
assert event.query()
print("written", flush=True)
sys.stdin.readline()
arena.close()
for thread in threading.enumerate():
    if thread.name == "device-close":
        thread.join()
print("closed", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def driver() -> CudaDriver:
    return CudaDriver(torch.device("cuda", 0))


def test_memory_is_what_was_asked_for(driver: CudaDriver) -> None:
    pointer = driver.malloc(NUM_BYTES)
    tensor = driver.tensor(pointer, NUM_BYTES)
    assert tensor.is_cuda and tensor.dtype == torch.uint8 and tensor.shape == (NUM_BYTES,)
    assert tensor.data_ptr() == pointer
    tensor.fill_(7)
    assert int(tensor.sum(dtype=torch.int64)) == 7 * NUM_BYTES
    assert len(driver.ipc_export(pointer)) == HANDLE_BYTES and len(driver.uuid) == UUID_BYTES
    torch.cuda.synchronize()
    driver.free(pointer)


def test_what_cannot_be_is_a_device_error(driver: CudaDriver) -> None:
    with pytest.raises(DeviceError, match="OUT_OF_MEMORY"):
        driver.malloc(1 << 50)
    with pytest.raises(DeviceError):
        driver.ipc_open(b"\0" * HANDLE_BYTES, GRANULARITY_BYTES)
    assert driver.can_access(driver.uuid) and not driver.can_access(b"\0" * UUID_BYTES)


def test_copies_on_the_side_stream_follow_the_callers_work(driver: CudaDriver) -> None:
    pointer = driver.malloc(NUM_BYTES)
    target = driver.tensor(pointer, NUM_BYTES)
    source = torch.zeros(NUM_BYTES, dtype=torch.uint8, device="cuda")
    busy = torch.randn(2048, 2048, device="cuda")
    for _ in range(50):
        busy = busy @ busy / 2048
    source.fill_(9)
    driver.copy_async(target, source)
    event = driver.event_record()
    event.synchronize()
    assert event.query() and bool((target == 9).all())
    host = torch.arange(1024, dtype=torch.int64).to(torch.uint8)
    driver.copy_async(target[:1024], host)
    driver.event_record().synchronize()
    assert (target[:1024].cpu() == host).all()
    driver.free(pointer)


def test_another_process_writes_into_an_exported_arena(driver: CudaDriver) -> None:
    arena = DeviceArena.create(driver, NUM_BYTES, "--flag")
    address = arena.address
    arguments = [address.handle.hex(), address.uuid.hex(), address.lease_name, str(NUM_BYTES)]
    process = subprocess.Popen(
        [sys.executable, "-c", PEER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline().strip() == "written"
            assert arena.lease.is_mapped_as(7)
            expected = (torch.arange(1 << 20) % 251).to(torch.uint8)
            assert bytes(arena.read(4096, 1 << 20)) == expected.numpy().tobytes()
            planes = arena.tensor[: 4 * 8 * 16].view(4, 8, 16).cpu()
            cells = torch.arange(2 * 4 * 16, dtype=torch.uint8).view(2, 4, 16)
            assert torch.equal(planes[:, [6, 1]], cells.transpose(0, 1))
            assert not planes[:, [0, 2, 3, 4, 5, 7]].any()
            process.stdin.write("close\n")
            process.stdin.flush()
            assert process.stdout.readline().strip() == "closed"
            assert not arena.lease.is_mapped()
        finally:
            process.kill()
    asyncio.run(arena.close())


def test_a_size_that_was_not_allocated_is_refused(driver: CudaDriver) -> None:
    """In one process the driver opens no handle of its own; it is refused either way, and nothing stays locked."""
    arena = DeviceArena.create(driver, NUM_BYTES, "--flag")
    with pytest.raises(Exception, match="cannot be mapped"):
        ImportedArena.open(DeviceImports(driver), arena.address, 1 << 40, 9)
    assert not arena.lease.is_mapped()
