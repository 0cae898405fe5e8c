"""What is measured: arms, sizes, and what each figure compares. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from triptych.transport.names import INPROC, NIXL, SHM, ZMQ_IPC, ZMQ_TCP

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, 256 * KIB, MIB, 8 * MIB, 64 * MIB, 256 * MIB)
LARGE_BYTES = 8 * MIB
MAX_UNDER_WAY, MAX_BYTES_UNDER_WAY = 4, 256 * MIB

MEMCPY = "memcpy"
PYZMQ_IPC, PYZMQ_TCP = "pyzmq-ipc", "pyzmq-tcp"
GRPC, MOONCAKE = "grpc", "mooncake"
RAW_NIXL, RAW_NIXL_TCP = "raw-nixl", "raw-nixl-tcp"
OURS = (INPROC, SHM, NIXL, ZMQ_IPC, ZMQ_TCP)
OTHERS = (PYZMQ_IPC, PYZMQ_TCP, GRPC, RAW_NIXL, RAW_NIXL_TCP, MOONCAKE)


def summed(transport: str) -> str:
    """The arm of a transport of ours with the checksum that an embedding's commit shows, as encoders compute it and
    prefill checks it."""
    return f"{transport} +sum"


def transport_of(arm: str) -> str:
    return arm.removesuffix(" +sum")


ARMS = (MEMCPY, *(arm for transport in OURS for arm in (transport, summed(transport))), *OTHERS)


def under_way(num_bytes: int) -> int:
    """How many transfers of that size are under way at once in a stream."""
    return max(1, min(MAX_UNDER_WAY, MAX_BYTES_UNDER_WAY // num_bytes))


def room_bytes(sizes: Iterable[int]) -> int:
    """What a receiver's arena must hold, and what there is to send from."""
    return max(size * under_way(size) for size in sizes)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure of one size: the arm's bytes/s over the `base`'s; without a base, the arm's round trip."""

    num_bytes: int
    arm: str
    base: str | None = None

    @property
    def arms(self) -> tuple[str, ...]:
        return (self.arm,) if self.base is None else (self.arm, self.base)


COMPARISONS: Mapping[str, Comparison] = {
    "shm_vs_memcpy_8mib": Comparison(8 * MIB, SHM, MEMCPY),
    "shm_vs_memcpy_8mib_checksum_on": Comparison(8 * MIB, summed(SHM), MEMCPY),
    "shm_round_trip_us_64kib": Comparison(64 * KIB, SHM),
    "shm_round_trip_us_64kib_checksum_on": Comparison(64 * KIB, summed(SHM)),
    "zmq_vs_raw_pyzmq_8mib": Comparison(8 * MIB, ZMQ_IPC, PYZMQ_IPC),
    "zmq_tcp_vs_raw_pyzmq_8mib": Comparison(8 * MIB, ZMQ_TCP, PYZMQ_TCP),
    "shm_vs_raw_zmq_8mib": Comparison(8 * MIB, SHM, PYZMQ_IPC),
    "nixl_vs_raw_nixl_tcp_8mib": Comparison(8 * MIB, NIXL, RAW_NIXL_TCP),
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a run measures between two processes."""

    arms: tuple[str, ...]
    sizes: tuple[int, ...]


def wanted(key: str | None) -> Wanted:
    """All, or what one figure needs: nothing for one of the cluster."""
    if key is None:
        return Wanted(ARMS, SIZES)
    comparison = COMPARISONS.get(key)
    return Wanted((), ()) if comparison is None else Wanted(comparison.arms, (comparison.num_bytes,))


def shown(num_bytes: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes // unit} {name}"
    return f"{num_bytes} B"
