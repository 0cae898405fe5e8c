"""The sender's handle on one receiver's arena: ask for room, write, commit."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final, Protocol

from triptych.core.errors import DeadlineExceeded, TransferRefused
from triptych.core.grant import Grant
from triptych.core.ids import AttemptRef
from triptych.core.plan import EmbeddingSource, Token
from triptych.faults import points
from triptych.obs import metrics
from triptych.transport.carrier import Carrier, PageWriter, WriterEvents
from triptych.transport.pages import PageSource
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
        """`inproc`, `cuda_ipc`, `shm` or `zmq`: the label of the transfer metrics."""
        ...

    @property
    def closed(self) -> asyncio.Event:
        """Set when the session is over, whoever ended it. Drop page writers then: they may keep a mapping."""
        ...

    async def abort(self, ref: AttemptRef, grant_id: str | None, reason: str) -> None:
        """Gives up what `ref` (or the one grant) holds at the receiver. Call it only after the last write into it has
        ended. Waits for copies of the grant's pages that are under way, for nothing else; never raises."""
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
    async def bind_kv(self, ref: AttemptRef, grant: Grant, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Grant:
        """The grant with `groups`, `generation` and `num_held_tokens` filled in. Cancelled or late, it aborts it."""
        ...

    def page_writer(self, grant: Grant, source: PageSource, events: WriterEvents) -> PageWriter:
        """Where the pages go; one for each grant that `bind_kv` answered. Raises TransferRefused when it names pages
        that the receiver does not have."""
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

    Owns the page writers of grants that are bound and neither committed nor given up.
    """

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self._tickets: dict[str, int] = {}
        self._writers: dict[str, PageWriter] = {}

    @property
    def transport(self) -> str:
        return self._carrier().label

    @abstractmethod
    def _carrier(self) -> Carrier:
        """Raises PeerLost when the link is closed."""

    @abstractmethod
    async def _ask(self, asked: Asked, timeout_s: float) -> tuple[int, Answer]:
        """The answer, and the ticket of what it grants."""

    @abstractmethod
    def abort_soon(self, ref: AttemptRef, grant_id: str | None, reason: str) -> None:
        """`abort` for where nothing can be awaited."""

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
        return replace(answer, ticket=ticket) if isinstance(answer, SlotGrant) else answer

    async def write_slot(self, grant: SlotGrant, data: memoryview) -> None:
        await self._carrier().write_slot(grant, data)

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
        label = self.transport
        commit = EmbeddingCommitted(
            ref, item_index, grant.slot_id, grant.generation, grant.capability, grant.num_bytes, checksum, source
        )
        await self._ask(commit, timeout_s)
        metrics.EMBEDDING_TRANSFER_BYTES.labels(transport=label).inc(grant.num_bytes)

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
        self.abort_soon(ref, grant_id, reason)

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
