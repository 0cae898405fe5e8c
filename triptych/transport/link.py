"""The sender's handle on one receiver's arena: ask for room, write, commit."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final, Protocol

from triptych.core.errors import DeadlineExceeded, TransferRefused
from triptych.core.grant import Grant
from triptych.core.ids import AttemptRef
from triptych.core.kv_format import PageFormat
from triptych.core.plan import EmbeddingSource, Token
from triptych.faults import points
from triptych.obs import metrics
from triptych.transport.carrier import Carrier, PageWriter, WriterEvents
from triptych.transport.circuit import out_of_time
from triptych.transport.in_flight import InFlightLimit
from triptych.transport.pages import PageSource
from triptych.transport.slot_writer import SlotWriter, count_written
from triptych.transport.types import (
    Answer,
    Asked,
    BindAsked,
    Bound,
    EmbeddingCommitted,
    HaveIt,
    KvCommitted,
    SlotAsked,
    SlotGrant,
)

DEFAULT_TIMEOUT_S: Final = 30.0


class Link(Protocol):
    """One session to one receiver. It breaks once; then every call raises PeerLost and a new link is needed.

    Every call may raise the TriptychError that the receiver answered, PeerLost, or DeadlineExceeded.
    """

    @property
    def transport(self) -> str:
        """`inproc`, `cuda_ipc`, `shm`, `nixl` or `zmq`: the label of the transfer metrics."""
        ...

    @property
    def closed(self) -> asyncio.Event:
        """Set when the session is over, whoever ended it. Drop page writers then: they may keep a mapping."""
        ...

    async def abort(self, ref: AttemptRef, grant_id: str | None, reason: str) -> None:
        """Gives up what `ref` (or the one grant) holds at the receiver. Call it only after the last `write_slot` into
        it has ended. Waits for what is being written to its slots or to the grant's pages, for nothing else; never
        raises."""
        ...

    async def close(self) -> None:
        """Idempotent."""
        ...


class EmbeddingLink(Link, Protocol):
    async def request_slot(
        self,
        ref: AttemptRef,
        item_index: int,
        identity: bytes,
        num_tokens: int,
        num_bytes: int,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> SlotGrant | HaveIt:
        """Waits for room. Cancelled or late, it aborts `ref` at the receiver, so nothing leaks."""
        ...

    @property
    def in_flight(self) -> InFlightLimit:
        """Whoever has a slot enters with its bytes, before anything is done for it, and leaves after its commit."""
        ...

    def slot_writer(self, grant: SlotGrant) -> SlotWriter | None:
        """What writes to the slot itself; None where only `write_slot` gets bytes there, or when the slot was committed
        or given up."""
        ...

    async def write_slot(self, grant: SlotGrant, data: memoryview) -> None:
        """All of the slot's bytes, which nobody may change before the commit was answered. Raises TransferRefused when
        the grant lies outside the arena or has another size."""
        ...

    async def commit_embedding(
        self,
        ref: AttemptRef,
        item_index: int,
        grant: SlotGrant,
        source: EmbeddingSource,
        checksum: int,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Returns when the receiver took it; raises TransferRefused. `checksum` is `layout.checksum64` of the slot."""
        ...


class KvLink(Link, Protocol):
    @property
    def page_format(self) -> PageFormat:
        """How the receiver's pool is cut. Its grants, and what it holds, are in such pages."""
        ...

    async def bind_kv(self, ref: AttemptRef, grant: Grant, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Grant:
        """The grant with `groups`, `generation` and `num_held_tokens` filled in. Cancelled or late, it aborts it."""
        ...

    def page_writer(self, grant: Grant, source: PageSource, events: WriterEvents) -> PageWriter:
        """Where the pages go; one for each grant that `bind_kv` answered. Raises TransferRefused when it names pages
        that the receiver does not have, or the source has pages of another format (`retiling.py` cuts them anew)."""
        ...

    async def commit_kv(
        self,
        ref: AttemptRef,
        grant: Grant,
        num_tokens: int,
        num_bytes: int,
        first_token: Token,
        position_delta: int,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Waits until all that the page writer took is on its way, and returns when the receiver took it; raises
        TransferRefused. `grant` is what `bind_kv` answered."""
        ...


class AskingLink(ABC):
    """The calls of both kinds of link, over two things that a subclass brings: a way to ask the receiver, and a carrier
    for the bytes.

    Owns the writers of slots and of pages that were granted and neither committed nor given up.
    """

    def __init__(self, in_flight: InFlightLimit | None = None) -> None:
        self.closed = asyncio.Event()
        self.in_flight = in_flight or InFlightLimit()
        self._slot_writers: dict[int, tuple[AttemptRef, SlotWriter]] = {}
        self._aborting: set[asyncio.Task[None]] = set()
        self._tickets: dict[str, int] = {}
        self._writers: dict[str, PageWriter] = {}

    @property
    def transport(self) -> str:
        return self._carrier().label

    @property
    @abstractmethod
    def page_format(self) -> PageFormat: ...

    @abstractmethod
    def _carrier(self) -> Carrier:
        """Raises PeerLost when the link is closed."""

    @abstractmethod
    async def _ask(self, asked: Asked, timeout_s: float) -> tuple[int, Answer]:
        """The answer, and the ticket of what it grants."""

    @abstractmethod
    def _send_abort(self, ref: AttemptRef, grant_id: str | None, reason: str) -> None:
        """Tells the receiver. Never raises."""

    @abstractmethod
    def _peer_failed(self, reason: str) -> None:
        """The receiver takes too little, or says nothing."""

    def abort_soon(self, ref: AttemptRef, grant_id: str | None, reason: str) -> None:
        """`abort` for where nothing can be awaited."""
        written = self._revoke_slots(ref) if grant_id is None else {}
        if written:
            task = asyncio.create_task(self._abort_after(written, ref, reason), name="transfer-abort-later")
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)
        else:
            self._send_abort(ref, grant_id, reason)

    async def request_slot(
        self,
        ref: AttemptRef,
        item_index: int,
        identity: bytes,
        num_tokens: int,
        num_bytes: int,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> SlotGrant | HaveIt:
        asked = SlotAsked(ref, item_index, identity, num_tokens, num_bytes)
        async with self._abort_when_given_up(ref, None):
            ticket, answer = await self._ask(asked, timeout_s)
        assert isinstance(answer, SlotGrant | HaveIt)
        if isinstance(answer, HaveIt):
            return answer
        grant = replace(answer, ticket=ticket)
        writer = self._carrier().slot_writer(grant)
        if writer is not None:
            self._slot_writers[grant.slot_id] = ref, writer
        return grant

    def slot_writer(self, grant: SlotGrant) -> SlotWriter | None:
        _, writer = self._slot_writers.get(grant.slot_id, (None, None))
        return writer

    async def write_slot(self, grant: SlotGrant, data: memoryview) -> None:
        carrier = self._carrier()
        await carrier.write_slot(grant, data)
        count_written(carrier.label, len(data))

    async def commit_embedding(
        self,
        ref: AttemptRef,
        item_index: int,
        grant: SlotGrant,
        source: EmbeddingSource,
        checksum: int,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        await points.passing_async("link.before_commit")
        self._committed(grant.slot_id)
        commit = EmbeddingCommitted(
            ref, item_index, grant.slot_id, grant.generation, grant.capability, grant.num_bytes, checksum, source
        )
        await self._ask(commit, timeout_s)

    async def bind_kv(self, ref: AttemptRef, grant: Grant, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Grant:
        async with self._abort_when_given_up(ref, grant.grant_id):
            ticket, answer = await self._ask(BindAsked(ref, grant.grant_id, grant.capability), timeout_s)
        assert isinstance(answer, Bound)
        bound = bound_grant(grant, answer)
        self._tickets[grant.grant_id] = ticket
        return bound

    def page_writer(self, grant: Grant, source: PageSource, events: WriterEvents) -> PageWriter:
        ticket = self._tickets.get(grant.grant_id)
        if ticket is None:
            raise TransferRefused("this grant is not bound by this link")
        if source.layout.format != self.page_format:
            raise TransferRefused("the receiver's pages are of another format")
        writer = self._carrier().page_writer(ticket, grant, source, events)
        self._writers[grant.grant_id] = writer
        return writer

    async def commit_kv(
        self,
        ref: AttemptRef,
        grant: Grant,
        num_tokens: int,
        num_bytes: int,
        first_token: Token,
        position_delta: int,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        label, writer = self.transport, self._writers.get(grant.grant_id)
        checksum = None
        if writer is not None:
            with out_of_time(lambda: self._peer_failed("slow"), timeout_s):
                async with deadline(timeout_s):
                    checksum = await writer.flush()
        await points.passing_async("link.before_commit")
        commit = KvCommitted(
            ref,
            grant.grant_id,
            grant.generation,
            grant.capability,
            num_tokens,
            num_bytes,
            first_token,
            position_delta,
            checksum,
        )
        await self._ask(commit, timeout_s)
        self._drop_writer(grant.grant_id)
        metrics.KV_TRANSFER_BYTES.labels(transport=label).inc(num_bytes)

    async def abort(self, ref: AttemptRef, grant_id: str | None, reason: str) -> None:
        if grant_id is not None:
            await self._end_writing(grant_id)
            self._send_abort(ref, grant_id, reason)
        else:
            await self._abort_after(self._revoke_slots(ref), ref, reason)

    async def _abort_after(self, written: Mapping[int, SlotWriter], ref: AttemptRef, reason: str) -> None:
        """The receiver may give the slots to anybody when it hears of this."""
        await self._settle(written)
        self._send_abort(ref, None, reason)

    async def _end_slots(self) -> None:
        """Returns when nothing of this link can be written any more, and aborts that waited for that have gone out."""
        await self._settle(self._revoke_slots(None))
        await asyncio.gather(*self._aborting, return_exceptions=True)

    def _revoke_slots(self, ref: AttemptRef | None) -> dict[int, SlotWriter]:
        """Those of the attempt, or all (None). Returns the ones that are being written; they stay in the table until
        they have settled, since whoever gives up next must wait for them, too."""
        mine = {slot_id: writer for slot_id, (owner, writer) in self._slot_writers.items() if ref in (None, owner)}
        for slot_id, writer in mine.items():
            writer.revoke()
            if not writer.is_writing:
                del self._slot_writers[slot_id]
        return {slot_id: writer for slot_id, writer in mine.items() if slot_id in self._slot_writers}

    async def _settle(self, written: Mapping[int, SlotWriter]) -> None:
        for slot_id, writer in written.items():
            await writer.settle()
            self._slot_writers.pop(slot_id, None)

    def _committed(self, slot_id: int) -> None:
        """The commit says that nobody writes there any more."""
        _, writer = self._slot_writers.pop(slot_id, (None, None))
        if writer is not None:
            writer.revoke()

    async def _end_writing(self, grant_id: str) -> None:
        """The receiver frees the pages when it hears of the abort: no copy may be under way by then."""
        writer = self._writers.get(grant_id)
        self._drop_writer(grant_id)
        if writer is not None:
            await writer.settle()

    def _drop_writer(self, grant_id: str) -> None:
        self._tickets.pop(grant_id, None)
        writer = self._writers.pop(grant_id, None)
        if writer is not None:
            writer.cancel()

    def _drop_writers(self) -> None:
        for grant_id in list(self._tickets):
            self._drop_writer(grant_id)

    @asynccontextmanager
    async def _abort_when_given_up(self, ref: AttemptRef, grant_id: str | None) -> AsyncIterator[None]:
        """Aborts at the receiver when the waiting caller was cancelled or ran out of time."""
        try:
            yield
        except (asyncio.CancelledError, DeadlineExceeded):
            self.abort_soon(ref, grant_id, "the sender gave up waiting")
            raise


@asynccontextmanager
async def deadline(timeout_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise DeadlineExceeded("a worker did not answer a transfer request in time") from None


def bound_grant(grant: Grant, bound: Bound) -> Grant:
    """Raises TransferRefused when a group has more pages than the credit was for (a credit of 0 counts none)."""
    for group in bound.groups:
        if grant.num_pages and sum(region.num_pages for region in group.regions) > grant.num_pages:
            raise TransferRefused("the receiver bound more pages than it had granted")
    return replace(grant, generation=bound.generation, groups=bound.groups, num_held_tokens=bound.num_held_tokens)
