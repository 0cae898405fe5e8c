"""Writing an embedding straight to the slot that the receiver granted, where this process can reach that memory.

    event loop:       granted -> slot_writer ----------------------------> finish: checksum over the slot -> commit
    engine's thread:             '--> ... pass of the tower -> write: its last copy --'

The slot is asked for before the tower runs, so between grant and write anything may happen: the attempt is given up,
the link ends. Whoever gives up revokes first, waits for a write that has begun (`settle`), and only then says so to
the receiver, which may give the memory to somebody else at once:

    OPEN ── write ──► WRITING ──► WRITTEN
      └── revoke ──► REVOKED     (revoked while WRITING: that write ends, and `settle` returns then)
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Final, Protocol

import torch

from triptych.core.errors import PeerLost
from triptych.obs import metrics
from triptych.transport.layout import checksum64

INLINE_CHECKSUM_BYTES: Final = 1 << 20

_log = logging.getLogger(__name__)


class SlotWriter(Protocol):
    """One granted slot. `write` is for the thread that has the rows, the rest for the event loop."""

    def write(self, rows: torch.Tensor) -> bool:
        """All of the slot, at most once. Never raises, never waits for the receiver. False: the slot is not that large,
        was revoked or written before, or could not be written; the item has failed then."""
        ...

    async def finish(self) -> int:
        """After a `write` that was True: returns when the bytes are there, with `checksum64` of the slot. Raises
        PeerLost."""
        ...

    def revoke(self) -> None:
        """No write begins any more. Never blocks. Idempotent."""
        ...

    @property
    def is_writing(self) -> bool:
        """Whether something may still reach the slot, even if it was revoked."""
        ...

    async def settle(self) -> None:
        """After `revoke`: returns when nothing can reach the slot any more. Never raises."""
        ...


class WriteGate:
    """Lets one write in, and none after `revoke`. All but `settle` from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_begun = False
        self._is_writing = False
        self._is_revoked = False
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()

    @property
    def is_writing(self) -> bool:
        with self._lock:
            return self._is_writing

    def try_begin(self) -> bool:
        """When True, `end` must follow."""
        with self._lock:
            if self._has_begun or self._is_revoked:
                return False
            self._has_begun = self._is_writing = True
            return True

    def end(self) -> None:
        with self._lock:
            self._is_writing = False
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._ended.set)

    def revoke(self) -> None:
        with self._lock:
            self._is_revoked = True

    async def settle(self) -> None:
        if self.is_writing:
            await self._ended.wait()


class MemorySlotWriter:
    """Implements `SlotWriter` in mapped memory. `view` gives the slot's bytes, and raises PeerLost when the mapping is
    gone; it is held only while they are written or read, so that an idle writer keeps no mapping."""

    def __init__(self, label: str, num_bytes: int, view: Callable[[], AbstractContextManager[memoryview]]) -> None:
        self._label = label
        self._num_bytes = num_bytes
        self._view = view
        self._gate = WriteGate()

    def write(self, rows: torch.Tensor) -> bool:
        if size_bytes(rows) != self._num_bytes or not self._gate.try_begin():
            return False
        try:
            with self._view() as view:
                torch.frombuffer(view, dtype=rows.dtype).view(rows.shape).copy_(rows)
        except PeerLost:
            return False
        except Exception:
            _log.exception("an embedding could not be written to its slot")
            return False
        finally:
            self._gate.end()
        count_written(self._label, self._num_bytes)
        return True

    async def finish(self) -> int:
        if self._num_bytes <= INLINE_CHECKSUM_BYTES:
            return self._checksum()
        return await asyncio.to_thread(self._checksum)

    def revoke(self) -> None:
        self._gate.revoke()

    @property
    def is_writing(self) -> bool:
        return self._gate.is_writing

    async def settle(self) -> None:
        await self._gate.settle()

    def _checksum(self) -> int:
        with self._view() as view:
            return checksum64(view)


def size_bytes(rows: torch.Tensor) -> int:
    return rows.numel() * rows.element_size()


def count_written(label: str, num_bytes: int) -> None:
    """Where the bytes are moved, so that bytes moved twice count twice."""
    metrics.EMBEDDING_TRANSFER_BYTES.labels(transport=label).inc(num_bytes)
