"""Device memory that a sender cannot reach, or may not: refused before anything is opened, and the next way down is
taken. On a fake device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit import device_house
from tests.unit.device_house import DeviceHost
from tests.unit.link_house import (
    ARENA_BYTES,
    EMBEDDING_LAYOUT,
    REF,
    eventually,
    send,
)
from triptych.core.errors import (
    InvalidRequest,
    StartupError,
    TransferRefused,
)
from triptych.core.ids import WorkerRef
from triptych.obs import metrics
from triptych.testing.fake_device import FakeDevice
from triptych.transport import frames
from triptych.transport.device import DeviceAddress, DeviceError
from triptych.transport.device_arena import DeviceArena, DeviceImports, ImportedArena
from triptych.transport.shm import SharedSegment
from triptych.transport.types import Endpoint
from triptych.transport.ways import DataSockets, Ways
from triptych.wire.v1 import transfer_pb2 as wire

ROOT = Path(__file__).parents[2]
host, mine = device_house.host, device_house.mine


def fallbacks() -> float:
    return float(metrics.FALLBACKS.labels("transport_cuda_ipc")._value.get())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"uuid": b"o" * 16}, "cannot write to the memory of the receiver's GPU"),
        ({"opens": False}, "cannot be mapped here"),
    ],
    ids=["another card", "open fails"],
)
async def test_device_memory_that_cannot_be_reached_is_a_counted_fallback(
    host: DeviceHost, tmp_path: Path, options: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    device = FakeDevice(tmp_path, **options)
    pool, before = host.pool(device, ("cuda_ipc", "shm")), fallbacks()
    link: Any = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    assert link.transport == "shm" and fallbacks() == before + 1
    assert not await link.in_flight.enter(64), "what was tried before it is over, and this is not"
    assert not host.embedding.arena.is_written_on_device_by(WorkerRef("encoder-1", 11))
    assert why in "".join(str(record.__dict__.get("reason")) for record in caplog.records)
    await pool.close()
    for stubborn in (host.pool(device), host.pool(device, ("cuda_ipc", "shm"), strict=True)):
        with pytest.raises(TransferRefused, match="cuda_ipc to another worker does not work"):
            await stubborn.embedding_link(host.info, EMBEDDING_LAYOUT)
        await stubborn.close()
    await eventually(lambda: not host.arenas()[0].lease.is_mapped())
    assert device.num_open == 0
    device.close()


async def test_a_card_with_peer_access_is_no_fallback(host: DeviceHost, tmp_path: Path) -> None:
    device = FakeDevice(tmp_path, b"o" * 16, reaches=[host.device.uuid])
    pool, before = host.pool(device, ("cuda_ipc", "shm")), fallbacks()
    link: Any = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    assert link.transport == "cuda_ipc" and fallbacks() == before
    await send(link, REF, 0, b"from the other card")
    await pool.close()
    device.close()


async def test_forged_addresses_are_refused_before_anything_is_opened(host: DeviceHost, mine: FakeDevice) -> None:
    arena, imports = host.arenas()[0], DeviceImports(mine)
    sound = arena.address
    forged = [
        (replace(sound, handle=b"\0" * 64), ARENA_BYTES, "cannot be mapped"),
        (replace(sound, handle=sound.handle[:20] + b"\xff" * 44), ARENA_BYTES, "cannot be mapped"),
        (sound, ARENA_BYTES + 1, "cannot be mapped"),
        (replace(sound, uuid=b"\0" * 16), ARENA_BYTES, "cannot write"),
        (replace(sound, lease_name="../lease"), ARENA_BYTES, "no shared segment"),
        (replace(sound, lease_name="triptych-lease-0123456789abcdef"), ARENA_BYTES, "cannot be opened"),
    ]
    for address, num_bytes, why in forged:
        with pytest.raises(TransferRefused, match=why):
            ImportedArena.open(imports, address, num_bytes, 2001)
        assert mine.num_open == 0 and not arena.lease.is_mapped()


async def test_a_receiver_without_device_memory_is_not_asked_for_it(host: DeviceHost, mine: FakeDevice) -> None:
    host.embedding.arena = replace(host.embedding.arena, device=None)
    pool, before = host.pool(mine, ("cuda_ipc", "shm")), fallbacks()
    link: Any = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    assert link.transport == "shm" and fallbacks() == before
    await pool.close()


class Blind(FakeDevice):
    """Makes no tensors; `closes`: nor does it let go of what it has opened."""

    closes = True

    def tensor(self, pointer: int, num_bytes: int) -> torch.Tensor:
        raise DeviceError("no tensor")

    def ipc_close(self, pointer: int) -> None:
        if not self.closes:
            raise DeviceError("it stays")
        super().ipc_close(pointer)


async def test_memory_that_was_opened_and_cannot_be_used_is_closed_again(
    host: DeviceHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the receiver would wait for ever for a mapping that nobody owns."""
    opened, sound = list[SharedSegment](), SharedSegment.open

    def remembered(*arguments: Any, **named: Any) -> SharedSegment:
        opened.append(sound(*arguments, **named))
        return opened[-1]

    monkeypatch.setattr(SharedSegment, "open", remembered)
    device, lease = Blind(tmp_path), host.arenas()[0].lease
    pool, before = host.pool(device, ("cuda_ipc", "shm")), fallbacks()
    link: Any = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    assert link.transport == "shm" and fallbacks() == before + 1
    assert device.num_open == 0 and not lease.is_mapped()
    await pool.close()
    device.closes = False  # the lock stays with what stays open
    imports = DeviceImports(device)
    with pytest.raises(TransferRefused):
        ImportedArena.open(imports, host.arenas()[0].address, ARENA_BYTES, 3001)
    assert device.num_open == 1 and lease.is_mapped_as(3001)
    device.closes = True
    imports.close(host.arenas()[0].address.handle)
    opened[-1].close()
    device.close()


@pytest.mark.parametrize("broken", ["tensor", "ipc_export", "free"])
def test_a_device_that_fails_at_the_start_leaves_nothing(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise DeviceError("broken")

    device = FakeDevice(tmp_path)
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(device, "tensor" if broken == "free" else broken, fails)
    if broken == "free":
        monkeypatch.setattr(device, "free", fails)
    with pytest.raises(StartupError, match=r"does not share memory between processes \(broken\)"):
        DeviceArena.create(device, 4096, "--kv-pool-bytes", directory=tmp_path / "shm")
    assert list((tmp_path / "shm").iterdir()) == []
    assert device.num_allocations == (broken == "free")
    device.close()


def test_memory_that_cannot_be_cleared_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    device = FakeDevice(tmp_path)
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(torch.Tensor, "zero_", fails)
    with pytest.raises(StartupError, match="does not share memory"):
        DeviceArena.create(device, 4096, "--kv-pool-bytes", directory=tmp_path / "shm")
    assert device.num_allocations == 0 and list((tmp_path / "shm").iterdir()) == []
    device.close()


def test_no_room_on_the_device_stops_the_start(tmp_path: Path) -> None:
    device = FakeDevice(tmp_path, capacity_bytes=100)
    with pytest.raises(StartupError, match=r"no memory for the 101 bytes of --kv-pool-bytes \(out of memory\)"):
        DeviceArena.create(device, 101, "--kv-pool-bytes")
    assert device.num_allocations == 0
    device.close()


def test_a_device_address_is_checked_field_by_field() -> None:
    sound = {"handle": b"h" * 64, "device_uuid": b"u" * 16, "lease_name": "triptych-lease-0123456789abcdef"}
    common = {"worker_id": "prefill-1", "epoch": 1, "transport": "cuda_ipc", "segment_bytes": 64, "mapping_id": 1}
    welcome = frames.welcome_from_frame(wire.HelloAck(**common, device=wire.DeviceAddress(**sound)))
    assert welcome.device == DeviceAddress(sound["handle"], sound["device_uuid"], sound["lease_name"])  # type: ignore[arg-type]
    endpoint = Endpoint(WorkerRef("prefill-1", 1), "host", ("cuda_ipc",))
    assert frames.welcome_from_frame(frames.welcome_to_frame(3, endpoint, welcome).hello_ack) == welcome
    for field, value in (("handle", b"h" * 63), ("device_uuid", b""), ("lease_name", "x" * 65), ("lease_name", "a\n")):
        with pytest.raises(InvalidRequest, match=field):
            frames.welcome_from_frame(wire.HelloAck(**common, device=wire.DeviceAddress(**{**sound, field: value})))


async def test_a_welcome_without_an_address_opens_nothing(mine: FakeDevice) -> None:
    ways = Ways(DataSockets(), "127.0.0.1", imports=DeviceImports(mine))
    with pytest.raises(TransferRefused, match="named none"):
        await ways.open(frames.Welcome("cuda_ipc", segment_bytes=64), lambda _: None)
