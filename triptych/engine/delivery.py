"""Where one picture's embedding goes when its pass ends: the slots that receivers have granted by then.

    event loop:       join ... join, leave (its request was given up) ... join: too late
    engine's thread:                                              deliver: the pass's last copy, once for each slot

The tower runs once for all who want the same picture, so the slots may be of several receivers.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

import torch


class RowsWriter(Protocol):
    """See `triptych.transport.slot_writer.SlotWriter`."""

    def write(self, rows: torch.Tensor) -> bool: ...


@dataclass(frozen=True, slots=True)
class Written:
    """Stands for rows that are in the slot of whoever asked already, or on their way there since `start_ns`."""

    start_ns: int


class Delivery:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writers: list[RowsWriter] = []
        self._is_over = False

    def join(self, writer: RowsWriter) -> None:
        """Who comes after the pass is not written to."""
        with self._lock:
            if not self._is_over:
                self._writers.append(writer)

    def leave(self, writer: RowsWriter) -> None:
        with self._lock:
            self._writers = [other for other in self._writers if other is not writer]

    def deliver(self, rows: torch.Tensor) -> frozenset[RowsWriter]:
        """Writes the embedding (num_tokens, row_elements) to all who have joined; returns to whom it came."""
        with self._lock:
            self._is_over = True
            writers, self._writers = self._writers, []
        return frozenset(writer for writer in writers if writer.write(rows))
