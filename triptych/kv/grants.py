"""Grants of a decode worker: a counted credit first, pages once prefill is about to start.

    CREDITED ── bind ──► BOUND ── commit ──► gone: the pages are the sequence's own
        │                  │
        └── release ► gone └── release ──► QUARANTINED ── writer confirmed or dead ──► gone

Used by the engine's thread only.
"""

from __future__ import annotations

import enum
import hmac
from dataclasses import dataclass, field

from triptych.core.errors import NoRoom, RequestTooLarge, StaleAttempt, TransferRefused
from triptych.core.grant import Grant, GroupRegions, regions_of
from triptych.core.ids import AttemptRef, WorkerRef, new_capability, new_grant_id
from triptych.kv.manager import CacheManager, SequencePages


class GrantState(enum.Enum):
    CREDITED = "credited"
    BOUND = "bound"
    QUARANTINED = "quarantined"


@dataclass(slots=True, eq=False)
class GrantRecord:
    """One grant. `writer` is the prefill worker that bound it."""

    grant_id: str
    ref: AttemptRef
    num_pages: int
    capability: bytes
    generation: int
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

    def issue(self, ref: AttemptRef, num_tokens: int, spare_pages: int = 0) -> GrantRecord:
        """A credit for `num_tokens` tokens, which leaves `spare_pages` to those that decode. Raises RequestTooLarge
        (never fits) or NoRoom (not now)."""
        num_pages = self._manager.pages_for(num_tokens)
        if num_pages > self._manager.num_usable:
            raise RequestTooLarge(
                f"prompt and answer need {num_tokens} tokens of KV; a decode worker holds "
                f"{self._manager.num_usable * self._manager.page_tokens}. Shorten the prompt or lower max_tokens"
            )
        if not self._manager.credit(num_pages, spare_pages):
            raise NoRoom("the decode worker has no room for this request right now")
        self._generation += 1
        record = GrantRecord(new_grant_id(), ref, num_pages, new_capability(), self._generation)
        self._records[record.grant_id] = record
        return record

    def bind(self, ref: AttemptRef, grant_id: str, capability: bytes, writer: WorkerRef) -> GrantRecord:
        """Names the pages. Raises StaleAttempt or TransferRefused."""
        record = self._checked(ref, grant_id, capability)
        if record.state is not GrantState.CREDITED:
            raise TransferRefused("this grant is already bound")
        record.pages = self._manager.bind_credit(record.num_pages)
        record.writer, record.state = writer, GrantState.BOUND
        return record

    def commit(
        self, ref: AttemptRef, grant_id: str, generation: int, capability: bytes, writer: WorkerRef
    ) -> SequencePages:
        """The KV is complete: the grant ends and its pages are the sequence's own. Raises StaleAttempt or
        TransferRefused, and then changes nothing."""
        record = self._checked(ref, grant_id, capability)
        if record.state is not GrantState.BOUND or record.generation != generation or record.writer != writer:
            raise TransferRefused("this grant does not expect that commit")
        del self._records[grant_id]
        return self._manager.own_leased(record.pages)

    def release(self, grant_id: str) -> None:
        """The request ended here. Pages that a peer may still write to are quarantined. Unknown ids are ignored: the
        grant ended by another way."""
        record = self._records.get(grant_id)
        if record is None or record.state is GrantState.QUARANTINED:
            return
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
        )

    def _end_writing(self, record: GrantRecord) -> None:
        if record.state is GrantState.QUARANTINED:
            self._manager.free_quarantined(record.pages)
            del self._records[record.grant_id]
        else:
            self._manager.free_leased(record.pages)
            del self._records[record.grant_id]

    def _checked(self, ref: AttemptRef, grant_id: str, capability: bytes) -> GrantRecord:
        record = self._records.get(grant_id)
        if record is None or record.state is GrantState.QUARANTINED:
            raise StaleAttempt("this grant has ended")
        if record.ref != ref or not hmac.compare_digest(record.capability, capability):
            raise TransferRefused("this grant belongs to another attempt")
        return record
