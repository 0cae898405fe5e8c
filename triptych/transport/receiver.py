"""The receiving side: what a stage implements so that peers can land bytes in its arena."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from triptych.core.grant import Grant
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.plan import EmbeddingSource, Token
from triptych.transport.types import Arena, ArenaKind, HaveIt, SlotGrant


class EmbeddingReceiver(Protocol):
    """Lands embeddings. Runs on the event loop; any method may raise a TriptychError, which the sender sees."""

    @property
    def arena(self) -> Arena: ...

    async def request_slot(
        self, peer: WorkerRef, ref: AttemptRef, item_index: int, identity: bytes, num_tokens: int, num_bytes: int
    ) -> SlotGrant | HaveIt:
        """May wait for room. When it is cancelled it must leave nothing reserved; an `abort` of `ref` follows."""
        ...

    async def commit_embedding(
        self,
        peer: WorkerRef,
        ref: AttemptRef,
        item_index: int,
        slot_id: int,
        generation: int,
        capability: bytes,
        num_bytes: int,
        checksum: int,
        source: EmbeddingSource,
    ) -> None:
        """Checks every argument against what was granted (TransferRefused), then makes the bytes visible."""
        ...

    async def abort(self, peer: WorkerRef, ref: AttemptRef, reason: str) -> None:
        """The peer writes no more into any uncommitted slot of `ref`: they are free. Unknown refs are no error."""
        ...

    async def peer_lost(self, peer: WorkerRef) -> None:
        """The session ended and the peer can write no more (its mapping is gone, or its frames find no grant): all its
        uncommitted slots are free without quarantine."""
        ...


class KvReceiver(Protocol):
    """Lands the KV of whole prompts. Runs on the event loop; any method may raise a TriptychError."""

    @property
    def arena(self) -> Arena: ...

    async def bind(self, peer: WorkerRef, ref: AttemptRef, grant_id: str, capability: bytes) -> Grant:
        """Turns the credit into pages. Answers the grant with `groups`, `generation` and `num_held_tokens` filled
        in."""
        ...

    async def commit_kv(
        self,
        peer: WorkerRef,
        ref: AttemptRef,
        grant_id: str,
        generation: int,
        capability: bytes,
        num_tokens: int,
        num_bytes: int,
        first_token: Token,
        position_delta: int,
    ) -> None:
        """Checks every argument against what was bound (TransferRefused), then hands the sequence to the engine."""
        ...

    async def abort(self, peer: WorkerRef, ref: AttemptRef, grant_id: str | None, reason: str) -> None:
        """The peer writes no more into the grant's pages (all of `ref`'s when None): they are free."""
        ...

    async def peer_lost(self, peer: WorkerRef) -> None:
        """The session ended and the peer can write no more: pages bound to it and not committed are free."""
        ...


@dataclass(slots=True)
class Receivers:
    """What one process can land: an encoder none, a prefill worker embeddings, a decode worker KV, `mono` both.
    Filled once, while the process is put together, before the first session."""

    embedding: EmbeddingReceiver | None = None
    kv: KvReceiver | None = None

    def arena(self, kind: ArenaKind) -> Arena | None:
        receiver = self.embedding if kind is ArenaKind.EMBEDDING else self.kv
        return None if receiver is None else receiver.arena
