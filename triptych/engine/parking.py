"""Sequences that gave up their pages: their KV waits in host memory, bounded in bytes, until there are pages again.

    pool of the device     [p7 p3 p9]  ── park ──►  host: p7' p3' p9'      p7 p3 p9 are free, or stay cached
                           [p7 p2 p5]  ◄─ unpark ─  host:     p3' p9'      p7 was still cached: not copied

Owned by the step loop and used on its thread only, never while a step is under way that names the sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import torch

from triptych.engine.residency import Residency
from triptych.engine.sequence import Sequence
from triptych.kv.manager import CacheManager
from triptych.obs import metrics

log = logging.getLogger(__name__)


class CopyLost(Exception):
    """The KV of a sequence that waited could not be brought back: its pages hold nothing that can be used. It is parked
    no more."""

    def __init__(self, sequence: Sequence) -> None:
        super().__init__()
        self.sequence = sequence


class PageStore(Protocol):
    """The pool's pages as one can carry them away."""

    @property
    def page_bytes(self) -> int: ...

    def save_pages(self, pages: SequenceOf[int]) -> torch.Tensor:
        """A copy on the host; the third axis counts the pages."""
        ...

    def load_pages(self, saved: torch.Tensor, pages: SequenceOf[int]) -> None:
        """Writes what `save_pages` gave, or a part of it along its third axis, to other pages."""
        ...


@dataclass(frozen=True, slots=True)
class _Parked:
    sequence: Sequence
    saved: torch.Tensor
    num_bytes: int
    since_ns: int


class Parking:
    """The host pool: owner of the copies and of their bytes."""

    def __init__(self, store: PageStore, manager: CacheManager, residency: Residency, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.num_bytes = 0
        self._store = store
        self._manager = manager
        self._residency = residency
        self._parked: list[_Parked] = []

    def __len__(self) -> int:
        return len(self._parked)

    def park(self, sequence: Sequence, now_ns: int) -> bool:
        """Copies the sequence's KV to the host and gives its pages back. False, and nothing has changed, when the host
        pool has no room or the machine none for the copy."""
        assert sequence.pages is not None and sequence.num_launched == sequence.num_computed
        pages = sequence.pages.pages[: self._manager.pages_for(sequence.num_computed)]
        num_bytes = len(pages) * self._store.page_bytes
        if self.num_bytes + num_bytes > self.capacity_bytes:
            return False
        try:
            saved = self._store.save_pages(pages)
        except Exception:
            metrics.FALLBACKS.labels("host_copy").inc()
            log.exception("pages could not be copied to the host: the answer is replayed")
            return False
        self._parked.append(_Parked(sequence, saved, num_bytes, now_ns))
        self._parked.sort(key=lambda parked: parked.sequence.standing.seniority)
        self._count(num_bytes)
        self._residency.vacate(sequence)
        return True

    def unpark(self, spare_pages: int) -> Sequence | None:
        """The most senior one, with its KV back in the pool, if there are pages for it and `spare_pages` for others.
        Nobody passes it. Raises CopyLost when its KV could not be brought back."""
        if not self._parked:
            return None
        parked = self._parked[0]
        if not self._residency.return_to(parked.sequence, spare_pages):
            return None
        self._forget(parked)
        try:
            self._load(parked)
        except Exception as error:
            metrics.FALLBACKS.labels("host_copy").inc()
            log.exception("pages could not be brought back from the host: the answer is replayed")
            raise CopyLost(parked.sequence) from error
        parked.sequence.decode_timeline.add(
            "retracted", parked.since_ns, num_bytes=parked.num_bytes, num_tokens=parked.sequence.num_computed
        )
        return parked.sequence

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended. One that is not parked is ignored."""
        for parked in self._parked:
            if parked.sequence is sequence:
                self._forget(parked)
                return

    def _load(self, parked: _Parked) -> None:
        """What the cache still had needs no copy."""
        pages = parked.sequence.pages
        assert pages is not None
        first, end = len(pages.path), parked.saved.shape[2]
        if first < end:
            self._store.load_pages(parked.saved[:, :, first:], pages.pages[first:end])

    def _forget(self, parked: _Parked) -> None:
        self._parked = [other for other in self._parked if other is not parked]
        self._count(-parked.num_bytes)

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
