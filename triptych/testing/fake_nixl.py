"""A network with one-sided writes, without a network: implements `NixlDriver` between ends in one process.

Writes arrive as late as they may: when somebody asks whether they are done, or when `release` lets through what `hold`
has kept. They are read from the staging memory only then, so a block that is used again too early is noticed. What a
network card would refuse is refused, and what it would do in silence (writing to memory that somebody else has by now)
is kept in `violations`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from triptych.transport.nixl_api import NixlAddress, NixlError, Runs, check_runs
from triptych.transport.pages import ByteArray

_PREFIX = b"fake-agent-"
_BASE = 1 << 40


@dataclass(eq=False)
class FakeNetwork:
    """What all drivers of a test share. `refuses_*` are for the next calls; thread-safe."""

    refuses_to_expose: bool = False
    refuses_to_connect: bool = False
    refuses_to_revoke: bool = False
    is_held: bool = False
    is_broken: bool = False
    num_writes: int = 0
    num_open_sources: int = 0
    violations: list[str] = field(default_factory=list)
    arenas: dict[bytes, memoryview] = field(default_factory=dict)
    waiting: list[FakeTransfer] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    ids: itertools.count[int] = field(default_factory=itertools.count)

    def hold(self) -> None:
        with self.lock:
            self.is_held = True

    def release(self) -> None:
        """All that was held arrives where it still can."""
        with self.lock:
            self.is_held = False
            for transfer in list(self.waiting):
                transfer.arrive()


class FakeNixl:
    """Implements `NixlDriver`."""

    def __init__(self, network: FakeNetwork) -> None:
        self._network = network

    def expose(self, arena: memoryview) -> FakeTarget:
        with self._network.lock:
            if self._network.refuses_to_expose:
                raise NixlError("no memory can be registered")
            return FakeTarget(self._network, arena)

    def connect(self, address: NixlAddress, arena_bytes: int, staging_bytes: int) -> FakeSource:
        with self._network.lock:
            if self._network.refuses_to_connect or not address.metadata.startswith(_PREFIX):
                raise NixlError("no way to that agent")
            return FakeSource(self._network, address, arena_bytes, staging_bytes)


class FakeTarget:
    """Implements `NixlTarget`."""

    def __init__(self, network: FakeNetwork, arena: memoryview) -> None:
        self._network = network
        self._name = _PREFIX + str(next(network.ids)).encode()
        network.arenas[self._name] = arena
        self.address = NixlAddress(self._name, _BASE)

    def revoke(self) -> None:
        with self._network.lock:
            if self._network.refuses_to_revoke:
                raise NixlError("the card does not let go")
            self._network.arenas.pop(self._name, None)


class FakeSource:
    """Implements `NixlSource`."""

    def __init__(self, network: FakeNetwork, address: NixlAddress, arena_bytes: int, staging_bytes: int) -> None:
        self._network = network
        self._address = address
        self._arena_bytes = arena_bytes
        self._memory = np.zeros(staging_bytes, dtype=np.uint8)
        self._is_open = True
        network.num_open_sources += 1

    @property
    def staging(self) -> memoryview:
        return self._memory.data

    def write(self, start: int, runs: Runs) -> FakeTransfer:
        with self._network.lock:
            if not self._is_open:
                raise NixlError("the link is closed")
            check_runs(runs, self._arena_bytes)
            block = self._memory[start : start + int(runs[:, 1].sum())]
            for other in self._network.waiting:
                if np.shares_memory(other.block, block):
                    self._network.violations.append("a block was written over while the network read it")
            self._network.num_writes += 1
            return FakeTransfer(self._network, self._address, block, runs, lambda: self._is_open)

    def close(self) -> None:
        with self._network.lock:
            self._network.num_open_sources -= self._is_open
            self._is_open = False


class FakeTransfer:
    """Implements `NixlTransfer`. Under the network's lock."""

    def __init__(
        self, network: FakeNetwork, address: NixlAddress, block: ByteArray, runs: Runs, is_open: Callable[[], bool]
    ) -> None:
        self.block = block
        self._network = network
        self._address = address
        self._runs = runs
        self._is_open = is_open
        self._as_it_was = block.tobytes()
        self._error: str | None = None
        self._is_done = False
        network.waiting.append(self)

    def is_done(self) -> bool:
        with self._network.lock:
            if not self._network.is_held and not self._is_done:
                self.arrive()
            if self._error is not None:
                raise NixlError(self._error)
            return self._is_done

    def arrive(self) -> None:
        """Once: into the arena, or nowhere when that was revoked, this end was closed, or the network is broken."""
        if self not in self._network.waiting:
            return
        self._network.waiting.remove(self)
        arena = self._network.arenas.get(self._address.metadata)
        if arena is None or not self._is_open() or self._network.is_broken:
            self._error = "the peer is gone"
            return
        if self.block.tobytes() != self._as_it_was:
            self._network.violations.append("a block changed while the network read it")
        at = 0
        for begin, length in self._runs.tolist():
            arena[begin : begin + length] = self.block[at : at + length].data
            at += length
        self._is_done = True
