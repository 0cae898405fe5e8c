"""The link to a receiver in the same process: the same calls, without frames or copies of them."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from triptych.core.errors import PeerLost, TransferRefused, TriptychError
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.kv_format import KvTerms, PageFormat
from triptych.transport.carrier import Carrier, MemoryCarrier
from triptych.transport.dispatch import carry_out, peer_lost
from triptych.transport.in_flight import InFlightLimit
from triptych.transport.link import AskingLink, deadline
from triptych.transport.names import INPROC
from triptych.transport.receiver import Receivers
from triptych.transport.session import check_terms
from triptych.transport.types import AbortAsked, Answer, ArenaKind, Asked

OVER: Final = "the link inside this process is closed"

_log = logging.getLogger(__name__)


class InprocLink(AskingLink):
    """Calls the receiver object itself. Owns nothing but its aborts under way."""

    def __init__(
        self,
        me: WorkerRef,
        receivers: Receivers,
        kind: ArenaKind,
        layout_fingerprint: bytes,
        kv: KvTerms | None = None,
        in_flight: InFlightLimit | None = None,
    ) -> None:
        super().__init__(in_flight)
        arena = receivers.arena(kind)
        if arena is None or arena.layout_fingerprint != layout_fingerprint:
            raise TransferRefused("this process has no arena of that kind and layout")
        check_terms(kind, kv, arena.kv_terms)
        self._pages = arena.pages
        self._me = me
        self._receivers = receivers
        self._kind = kind
        self._memory = MemoryCarrier(INPROC, arena.buffer[:])
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def page_format(self) -> PageFormat:
        assert self._pages is not None, "this link goes to a KV pool"
        return self._pages.format

    def _send_abort(self, ref: AttemptRef, grant_id: str | None, reason: str) -> None:
        if not self.closed.is_set():
            task = asyncio.create_task(self._abort(AbortAsked(ref, grant_id, reason)), name="transfer-abort")
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def close(self) -> None:
        if self.closed.is_set():
            return
        self.in_flight.close(OVER)
        await self._end_slots()
        await asyncio.gather(*self._aborts, return_exceptions=True)
        self.closed.set()
        self._drop_writers()
        self._memory.close()
        await peer_lost(self._receivers, self._kind, self._me)

    def _carrier(self) -> Carrier:
        if self.closed.is_set():
            raise PeerLost(OVER)
        return self._memory

    def _peer_failed(self, reason: str) -> None:
        """This process waits for itself: nobody else is to be left alone for it."""

    async def _ask(self, asked: Asked, timeout_s: float) -> tuple[int, Answer]:
        self._carrier()
        async with deadline(timeout_s):
            answer = await carry_out(self._receivers, self._kind, self._me, asked)
        if self.closed.is_set():
            await self._abort(AbortAsked(asked.ref, None, OVER))  # room came after the farewell
            raise PeerLost(OVER)
        return 0, answer

    async def _abort(self, asked: AbortAsked) -> None:
        try:
            await carry_out(self._receivers, self._kind, self._me, asked)
        except TriptychError as error:
            _log.warning("an abort was refused", extra={"request": str(asked.ref), "code": error.code})
