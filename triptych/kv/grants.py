"""Grants of a decode worker: a counted credit first, pages once prefill is about to start.

    CREDITED ── bind ──► BOUND ── commit ──► gone: the pages are the sequence's own
        │                  │
        └── release ► gone └── release ──► QUARANTINED ── writer confirmed or dead ──► gone

What the cache holds of the prompt is not written again. A grant keeps that path locked from its credit on, and covers
the pages behind it; binding looks once more, and tells the writer how much it need not send:

    prompt   [ cached: locked, read only ][ pages of the grant: written ]
                                          ^ num_held_tokens

The locks end with the grant, once: they go over to the sequence with the commit, and are given back in every other
case, as soon as the grant is of no use any more (nobody writes to cached pages, so they are never quarantined).

Used by the engine's thread only.
"""

from __future__ import annotations

import enum
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field

from triptych.core.errors import NoRoom, RequestTooLarge, StaleAttempt, TransferRefused
from triptych.core.grant import Grant, GroupRegions, regions_of
from triptych.core.ids import AttemptRef, WorkerRef, new_capability, new_grant_id
from triptych.kv.manager import CacheManager, SequencePages
from triptych.kv.radix import Node


class GrantState(enum.Enum):
    CREDITED = "credited"
    BOUND = "bound"
    QUARANTINED = "quarantined"


@dataclass(slots=True, eq=False)
class GrantRecord:
    """One grant. `writer` is the prefill worker that bound it; `path` holds what is cached of `ids` below `root`, and
    `num_pages` counts the pages behind it."""

    grant_id: str
    ref: AttemptRef
    num_pages: int
    capability: bytes
    generation: int
    root: bytes = b""
    ids: Sequence[int] = ()
    path: list[Node] = field(default_factory=list)
    state: GrantState = GrantState.CREDITED
    pages: list[int] = field(default_factory=list)
    writer: WorkerRef | None = None


class GrantTable:
    """All living grants of one pool."""

    def __init__(self, worker: WorkerRef, manager: CacheManager) -> None:
        self._worker = worker
        self._manager = manager
        self._records: dict[str, GrantRecord] = {}
        self._generation = 0

    def __len__(self) -> int:
        return len(self._records)

    def issue(
        self, ref: AttemptRef, num_tokens: int, spare_pages: int = 0, root: bytes = b"", ids: Sequence[int] = ()
    ) -> GrantRecord:
        """A credit for `num_tokens` tokens that begin with `ids`, which leaves `spare_pages` to those that decode.
        Raises RequestTooLarge (never fits) or NoRoom (not now)."""
        num_pages = self._manager.pages_for(num_tokens)
        if num_pages > self._manager.num_usable:
            raise RequestTooLarge(
                f"prompt and answer need {num_tokens} tokens of KV; a decode worker holds "
                f"{self._manager.num_usable * self._manager.page_tokens}. Shorten the prompt or lower max_tokens"
            )
        path = self._manager.hold(root, ids, num_tokens, spare_pages)
        if path is None:
            raise NoRoom("the decode worker has no room for this request right now")
        self._generation += 1
        num_credited = num_pages - len(path)
        record = GrantRecord(new_grant_id(), ref, num_credited, new_capability(), self._generation, root, ids, path)
        self._records[record.grant_id] = record
        return record

    def bind(self, ref: AttemptRef, grant_id: str, capability: bytes, writer: WorkerRef) -> GrantRecord:
        """Names the pages. Raises StaleAttempt or TransferRefused."""
        record = self._checked(ref, grant_id, capability)
        if record.state is not GrantState.CREDITED:
            raise TransferRefused("this grant is already bound")
        record.num_pages -= self._manager.hold_more(record.root, record.ids, record.path)
        record.pages = self._manager.bind_credit(record.num_pages)
        record.writer, record.state = writer, GrantState.BOUND
        return record

    def commit(
        self, ref: AttemptRef, grant_id: str, generation: int, capability: bytes, writer: WorkerRef
    ) -> SequencePages:
        """The KV is complete: the grant ends, and its pages and what it held are the sequence's own. Raises
        StaleAttempt or TransferRefused, and then changes nothing."""
        record = self._checked(ref, grant_id, capability)
        if record.state is not GrantState.BOUND or record.generation != generation or record.writer != writer:
            raise TransferRefused("this grant does not expect that commit")
        del self._records[grant_id]
        return self._manager.own_leased(record.pages, record.root, record.path)

    def num_held_pages(self, grant_id: str) -> int | None:
        """The leading pages of the prompt that the grant's writer does not send; None when the grant has ended."""
        record = self._records.get(grant_id)
        return None if record is None else len(record.path)

    def release(self, grant_id: str) -> None:
        """The request ended here. Pages that a peer may still write to are quarantined. Unknown ids are ignored: the
        grant ended by another way."""
        record = self._records.get(grant_id)
        if record is None or record.state is GrantState.QUARANTINED:
            return
        self._let_go(record)
        if record.state is GrantState.BOUND:
            self._manager.quarantine_leased(record.pages)
            record.state = GrantState.QUARANTINED
            return
        del self._records[grant_id]
        self._manager.cancel_credit(record.num_pages)

    def writer_finished(self, ref: AttemptRef, grant_id: str | None, writer: WorkerRef) -> None:
        """The writer says that it will not touch the pages of this grant (None: of all of the attempt's) again.

        Nobody is named who will never have the KV: a writer that lives tells the router itself why it gave up, which
        ends the call here, and says more than this side could."""
        for record in list(self._records.values()):
            if record.ref == ref and record.writer == writer and grant_id in (None, record.grant_id):
                self._end_writing(record)

    def writer_lost(self, writer: WorkerRef) -> list[AttemptRef]:
        """The writer's process is gone. Returns the attempts whose KV will never be complete."""
        mine = [record for record in self._records.values() if record.writer == writer]
        orphans = [record.ref for record in mine if record.state is GrantState.BOUND]
        for record in mine:
            self._end_writing(record)
        return orphans

    def grant_of(self, record: GrantRecord) -> Grant:
        """The record as it goes over the wire."""
        groups = (GroupRegions(0, 0, regions_of(record.pages)),) if record.pages else ()
        return Grant(
            record.grant_id,
            self._worker.worker_id,
            self._worker.epoch,
            record.capability,
            record.num_pages,
            record.generation,
            groups,
            len(record.path) * self._manager.page_tokens if record.pages else 0,
        )

    def _end_writing(self, record: GrantRecord) -> None:
        del self._records[record.grant_id]
        if record.state is GrantState.QUARANTINED:
            self._manager.free_quarantined(record.pages)
        else:
            self._let_go(record)
            self._manager.free_leased(record.pages)

    def _let_go(self, record: GrantRecord) -> None:
        """Before the state changes that says whether it is due."""
        self._manager.let_go(record.path)
        record.path = []

    def _checked(self, ref: AttemptRef, grant_id: str, capability: bytes) -> GrantRecord:
        record = self._records.get(grant_id)
        if record is None or record.state is GrantState.QUARANTINED:
            raise StaleAttempt("this grant has ended")
        if record.ref != ref or not hmac.compare_digest(record.capability, capability):
            raise TransferRefused("this grant belongs to another attempt")
        return record
