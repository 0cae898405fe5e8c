"""The receiving end of `nixl`: a way into the arena for each session, and what a commit of pages is checked against.

    greeting -> expose (thread) -> welcome: address ... commits ... session over -> revoke (thread) -> farewell

Nobody but the network card sees a write come in, and a sender that was lost may still write. So a session's way in is
its own, and what the sender was granted is free only when that way is gone. That needs neither the sender nor a lease.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import xxhash

from triptych.core.errors import TransferRefused
from triptych.core.ids import AttemptRef
from triptych.transport.nixl_api import MAX_METADATA_BYTES, NixlAddress, NixlDriver, NixlError
from triptych.transport.pages import ByteArray, pool_planes
from triptych.transport.types import Arena, Bound, KvCommitted

RETRY_S: Final = 1.0
# Of a grant's pages, copied to be summed up at once.
_SUM_BYTES: Final = 4 << 20

_log = logging.getLogger(__name__)


class Exposure:
    """Owner of one session's way into an arena, from the greeting on."""

    def __init__(self, driver: NixlDriver, arena: Arena) -> None:
        self._opening = asyncio.create_task(asyncio.to_thread(driver.expose, arena.buffer), name="nixl-expose")
        self._revoking: asyncio.Task[None] | None = None

    async def address(self) -> NixlAddress | None:
        """None when there is no way in: then the sender will try another transport."""
        try:
            address = (await asyncio.shield(self._opening)).address
        except NixlError as error:
            _log.warning("an arena cannot be shown to a sender by NIXL", extra={"reason": str(error)})
            return None
        if len(address.metadata) > MAX_METADATA_BYTES:
            _log.warning("NIXL says too much of this machine", extra={"num_bytes": len(address.metadata)})
            return None
        return address

    async def revoke(self) -> None:
        """Returns when the sender can write no more, and tries until then."""
        while not await self.try_revoke():  # noqa: ASYNC110 - nobody else knows when it may work
            await asyncio.sleep(RETRY_S)

    async def try_revoke(self) -> bool:
        """Whether the sender can write no more. Logs why, when it still can."""
        if self._revoking is None:
            self._revoking = asyncio.create_task(self._revoke(), name="nixl-revoke")
        try:
            await asyncio.shield(self._revoking)
        except Exception as error:  # a bug of ours, too, must not free what can be written to
            self._revoking = None
            _log.error("a lost sender still reaches the arena by NIXL", extra={"reason": repr(error)})
            return False
        return True

    async def _revoke(self) -> None:
        """Whoever cancels one that waits for it leaves it to the next."""
        try:
            target = await self._opening
        except Exception:
            return  # there never was a way in, and whoever waited for one has heard why
        await asyncio.to_thread(target.revoke)


@dataclass(slots=True)
class WrittenPages:
    """The pages that one session was bound to. A one-sided write tells nobody what it wrote, nor whether all of it
    came, so the commit shows a checksum and the pages are read once for it."""

    arena: Arena
    _pages: dict[tuple[AttemptRef, str], list[int]] = field(default_factory=dict)

    def expect(self, ref: AttemptRef, grant_id: str, bound: Bound) -> None:
        self._pages[ref, grant_id] = [page for group in bound.groups for page in group.pages]

    def forget(self, ref: AttemptRef, grant_id: str | None) -> None:
        """One grant of the attempt, or all that it has."""
        for key in [key for key in self._pages if key[0] == ref and grant_id in (None, key[1])]:
            del self._pages[key]

    async def check(self, commit: KvCommitted) -> None:
        """Raises TransferRefused unless the grant's first `num_bytes` are what the sender summed up."""
        pages = self._pages.get((commit.ref, commit.grant_id))
        if pages is None or commit.checksum is None:
            raise TransferRefused("no such grant was given to this session, or the commit shows no checksum")
        assert self.arena.pages is not None, "a KV arena says how its pages lie"
        count, rest = divmod(commit.num_bytes, self.arena.pages.page_bytes)
        if rest or count > len(pages):
            raise TransferRefused("the commit has another length than the grant")
        pool = pool_planes(self.arena.buffer, self.arena.pages)
        if await asyncio.to_thread(sum_of_pages, pool, pages[:count]) != commit.checksum:
            raise TransferRefused("the transfer's checksum is wrong")


def sum_of_pages(pool: ByteArray, pages: list[int]) -> int:
    """xxh3_64 over those pages of `pool`, (planes, pages, cell bytes), as a stream: see `kv/pages.py`."""
    digest = xxhash.xxh3_64()
    num_planes, _, cell_bytes = pool.shape
    step = max(1, _SUM_BYTES // (num_planes * cell_bytes))
    for start in range(0, len(pages), step):
        cells = pool[:, pages[start : start + step]].transpose(1, 0, 2)
        digest.update(np.ascontiguousarray(cells).data)
    return digest.intdigest()
