"""The link to a receiver in the same process: the same calls, without frames or copies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from triptych.core.errors import DeadlineExceeded, PeerLost, TransferRefused, TriptychError
from triptych.core.grant import Grant
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.plan import EmbeddingSource, Token
from triptych.obs import metrics
from triptych.transport.link import DEFAULT_TIMEOUT_S, abort_when_given_up, bound_grant, view_of
from triptych.transport.receiver import EmbeddingReceiver, KvReceiver, Receivers
from triptych.transport.session import INPROC
from triptych.transport.types import Arena, ArenaKind, Bound, HaveIt, SlotGrant

_log = logging.getLogger(__name__)


class InprocLink:
    """Calls the receiver object itself. Owns nothing but its aborts under way."""

    def __init__(self, me: WorkerRef, receivers: Receivers, kind: ArenaKind, layout_fingerprint: bytes) -> None:
        arena = receivers.arena(kind)
        if arena is None or arena.layout_fingerprint != layout_fingerprint:
            raise TransferRefused("this process has no arena of that kind and layout")
        self._me = me
        self._receivers = receivers
        self._kind = kind
        self._arena: Arena = arena
        self._aborts: set[asyncio.Task[None]] = set()
        self.closed = asyncio.Event()

    @property
    def transport(self) -> str:
        return INPROC

    @property
    def arena_buffer(self) -> memoryview:
        self._check_open()
        return self._arena.buffer

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
        receiver = self._embedding()
        async with abort_when_given_up(self, ref, None), _deadline(timeout_s):
            return await receiver.request_slot(self._me, ref, item_index, identity, num_tokens, num_bytes)

    def slot_view(self, grant: SlotGrant) -> memoryview:
        return view_of(self.arena_buffer, grant)

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
        async with _deadline(timeout_s):
            await self._embedding().commit_embedding(
                self._me,
                ref,
                item_index,
                grant.slot_id,
                grant.generation,
                grant.capability,
                grant.num_bytes,
                checksum,
                source,
            )
        metrics.EMBEDDING_TRANSFER_BYTES.labels(transport=INPROC).inc(grant.num_bytes)

    async def bind_kv(self, ref: AttemptRef, grant: Grant, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Grant:
        receiver = self._kv()
        async with abort_when_given_up(self, ref, grant.grant_id), _deadline(timeout_s):
            bound = await receiver.bind(self._me, ref, grant.grant_id, grant.capability)
        return bound_grant(grant, Bound(bound.generation, bound.groups))

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
        async with _deadline(timeout_s):
            await self._kv().commit_kv(
                self._me,
                ref,
                grant.grant_id,
                grant.generation,
                grant.capability,
                num_tokens,
                num_bytes,
                first_token,
                position_delta,
            )
        metrics.KV_TRANSFER_BYTES.labels(transport=INPROC).inc(num_bytes)

    async def abort(self, ref: AttemptRef, grant_id: str | None, reason: str) -> None:
        self.abort_soon(ref, grant_id, reason)

    def abort_soon(self, ref: AttemptRef, grant_id: str | None, reason: str) -> None:
        if not self.closed.is_set():
            self._spawn(self._carry_out(ref, grant_id, reason))

    async def close(self) -> None:
        if self.closed.is_set():
            return
        await asyncio.gather(*self._aborts, return_exceptions=True)
        receiver = self._kv() if self._kind is ArenaKind.KV else self._embedding()
        self.closed.set()
        await receiver.peer_lost(self._me)

    async def _carry_out(self, ref: AttemptRef, grant_id: str | None, reason: str) -> None:
        try:
            if self._kind is ArenaKind.KV:
                await self._kv().abort(self._me, ref, grant_id, reason)
            else:
                await self._embedding().abort(self._me, ref, reason)
        except TriptychError as error:
            _log.warning("an abort was refused", extra={"request": str(ref), "code": error.code})

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="transfer-abort")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    def _embedding(self) -> EmbeddingReceiver:
        self._check_open()
        if self._kind is not ArenaKind.EMBEDDING or self._receivers.embedding is None:
            raise TransferRefused("this link goes to no embedding arena")
        return self._receivers.embedding

    def _kv(self) -> KvReceiver:
        self._check_open()
        if self._kind is not ArenaKind.KV or self._receivers.kv is None:
            raise TransferRefused("this link goes to no KV pool")
        return self._receivers.kv

    def _check_open(self) -> None:
        if self.closed.is_set():
            raise PeerLost("the link inside this process is closed")


@asynccontextmanager
async def _deadline(timeout_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise DeadlineExceeded("the receiver did not answer a transfer request in time") from None
