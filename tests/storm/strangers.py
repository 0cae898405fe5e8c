"""Prefill workers that write into the yard's pool, as they do into a decode worker's: also late, when the request that
the pages were granted for has ended. Until such a writer says that it is done, nobody else may have the pages."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass

import torch

from triptych.core.errors import NoRoom, RequestTooLarge
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.kv.grants import GrantRecord, GrantTable
from triptych.kv.manager import CacheManager

HERE, WRITER = WorkerRef("yard", 1), WorkerRef("prefill-of-others", 1)
MOST_GRANTS = 2
MOST_ISSUED = 40
"""In a storm: in a pool that is hardly larger than the largest request, more of them would starve it."""
WRITTEN = 1e6


@dataclass
class Writing:
    """A bound grant, and the pages that its writer knows."""

    record: GrantRecord
    pages: list[int]
    is_released: bool = False


class Strangers:
    """Owner of the grants in a yard's pool."""

    def __init__(self, dice: random.Random, manager: CacheManager, pool: torch.Tensor) -> None:
        self._dice = dice
        self._grants = GrantTable(HERE, manager)
        self._manager = manager
        self._pool = pool
        self._writing: list[Writing] = []
        self._num_issued = 0

    def at_step(self) -> None:
        may_begin = len(self._writing) < MOST_GRANTS and self._num_issued < MOST_ISSUED
        if may_begin and self._dice.random() < 0.2:
            with suppress(NoRoom, RequestTooLarge):
                self._begin()
        for writing in list(self._writing):
            if self._dice.random() < 0.5:
                self._pool[:, :, writing.pages] = WRITTEN
            if self._dice.random() < 0.2:
                self._go_on(writing)

    def end(self) -> None:
        """All writers are done."""
        for writing in list(self._writing):
            self._go_on(writing)
        for writing in list(self._writing):
            self._go_on(writing)
        assert len(self._grants) == 0

    def _begin(self) -> None:
        self._num_issued += 1
        ref = AttemptRef(f"stranger-{self._num_issued}")
        num_tokens = self._dice.randint(1, 4) * self._manager.page_tokens
        record = self._grants.issue(ref, num_tokens)
        self._grants.bind(ref, record.grant_id, record.capability, WRITER)
        self._writing.append(Writing(record, list(record.pages)))

    def _go_on(self, writing: Writing) -> None:
        """First the caller leaves, then the writer hears of it."""
        if not writing.is_released:
            writing.is_released = True
            self._grants.release(writing.record.grant_id)
            return
        self._grants.writer_finished(writing.record.ref, writing.record.grant_id, WRITER)
        self._writing.remove(writing)
