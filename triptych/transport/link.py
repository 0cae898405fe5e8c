"""The sender's handle on one receiver's arena: ask for room, write, commit."""

from __future__ import annotations

import asyncio
from typing import Protocol

from triptych.core.grant import Grant
from triptych.core.ids import AttemptRef
from triptych.core.plan import EmbeddingSource, Token
from triptych.transport.types import HaveIt, SlotGrant

DEFAULT_TIMEOUT_S = 30.0


class Link(Protocol):
    """One session to one receiver. It breaks once; then every call raises PeerLost and a new link is needed.

    Every call may raise the TriptychError that the receiver answered, PeerLost, or DeadlineExceeded.
    """

    @property
    def transport(self) -> str:
        """`shm` or `inproc`: the label of the transfer metrics."""
        ...

    @property
    def closed(self) -> asyncio.Event:
        """Set when the session is over, whoever ended it. Drop views of the arena then."""
        ...

    async def abort(self, ref: AttemptRef, grant_id: str | None, reason: str) -> None:
        """Gives up what `ref` (or the one grant) holds at the receiver. Call it only after the last write into it has
        ended. Never blocks, never raises."""
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

    def slot_view(self, grant: SlotGrant) -> memoryview:
        """The slot's bytes, writable. Raises TransferRefused when the grant lies outside the arena."""
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
    def arena_buffer(self) -> memoryview:
        """The receiver's whole page pool, writable."""
        ...

    async def bind_kv(self, ref: AttemptRef, grant: Grant, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Grant:
        """The grant with `groups` and `generation` filled in. Cancelled or late, it aborts the grant."""
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
        """Returns when the receiver took it; raises TransferRefused. `grant` is what `bind_kv` answered."""
        ...
