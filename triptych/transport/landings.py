"""What may be written by data frames right now, and how much of it has come. The receiver's side, without sockets.

    granted --expect--> OPEN --frame, frame, ...--> OPEN --commit: all has come--> SEALED --taken--> gone
                          '---------abort, farewell--------------'------------------------------> gone

A frame touches memory only while its grant is OPEN here. Sealing and forgetting happen on the event loop, before the
receiver hears of the commit, the abort or the farewell, and so before it can give the memory to anybody else: a frame
that comes later finds nothing, whatever it carries.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import xxhash

from triptych.core.errors import Aborted, TransferRefused
from triptych.core.ids import AttemptRef
from triptych.transport.data_frame import BadFrame, DataHeader, PayloadKind
from triptych.transport.pages import ByteArray, pool_planes, scatter
from triptych.transport.types import Arena, Bound, SlotGrant

# A commit waits this long while nothing comes, and never longer than the second. Below the sender's own patience.
STALLED_S: Final = 5.0
LANDING_TIMEOUT_S: Final = 20.0

GrantKey = tuple[AttemptRef, int | str]
"""An attempt's item, or its KV grant."""


class Target(Protocol):
    """The memory behind a grant, as a stream of bytes."""

    @property
    def num_bytes(self) -> int: ...

    def write(self, offset: int, data: ByteArray) -> None:
        """Within the bounds: the caller has checked."""
        ...


@dataclass(frozen=True, slots=True)
class SlotTarget:
    """A landing slot: `memory` is its bytes."""

    memory: ByteArray

    @property
    def num_bytes(self) -> int:
        return self.memory.size

    def write(self, offset: int, data: ByteArray) -> None:
        self.memory[offset : offset + data.size] = data


class PagesTarget:
    """The pages of a bound grant in `pool`, (planes, pages, cell bytes)."""

    def __init__(self, pool: ByteArray, pages: Sequence[int]) -> None:
        self._pool = pool
        self._pages = np.array(pages, dtype=np.int64)

    @property
    def num_bytes(self) -> int:
        num_planes, _, cell_bytes = self._pool.shape
        return int(self._pages.size) * int(num_planes) * int(cell_bytes)

    def write(self, offset: int, data: ByteArray) -> None:
        scatter(self._pool, self._pages, offset, data)


@dataclass(slots=True, eq=False)
class Landing:
    """One grant's bytes. `num_landed` counts from the stream's begin; `has_gap` says that bytes were lost before it."""

    kind: PayloadKind
    capability: bytes = field(repr=False)
    generation: int
    target: Target
    is_open: bool = True
    has_gap: bool = False
    num_landed: int = 0
    digest: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, header: DataHeader, payload: memoryview) -> None:
        """Writes the payload, or raises BadFrame and has written nothing."""
        is_shown = hmac.compare_digest(header.capability, self.capability)
        if not is_shown or header.kind is not self.kind or header.generation != self.generation:
            raise BadFrame("forged")
        if not self.is_open:
            raise BadFrame("late")
        if header.offset != self.num_landed or header.offset + header.length > self.target.num_bytes:
            self._note_gap(header)
            raise BadFrame("out_of_order")
        self.target.write(header.offset, np.frombuffer(payload, dtype=np.uint8))
        if self.kind is PayloadKind.PAGES:
            self.digest.update(payload)
        self.num_landed += header.length
        self.moved.set()

    def end(self) -> None:
        self.is_open = False
        self.moved.set()

    def _note_gap(self, header: DataHeader) -> None:
        """Frames of one sender keep their order, so what was skipped will not come any more."""
        if header.offset > self.num_landed:
            self.has_gap = True
            self.moved.set()


class LandingSession:
    """Owner of the landings of one sender's session. Runs on the event loop."""

    def __init__(self, session_key: bytes) -> None:
        self.session_key = session_key
        self._by_ticket: dict[int, Landing] = {}
        self._tickets: dict[GrantKey, int] = {}
        self._is_over = False

    def __len__(self) -> int:
        return len(self._by_ticket)

    def expect(self, key: GrantKey, ticket: int, landing: Landing) -> None:
        """From now on frames with that ticket are taken. A landing that the key had before is forgotten."""
        if self._is_over:
            return
        self._forget(key)
        self._by_ticket[ticket], self._tickets[key] = landing, ticket

    def take(self, header: DataHeader, payload: memoryview) -> None:
        """Raises BadFrame, and then nothing has changed."""
        if not hmac.compare_digest(header.session_key, self.session_key):
            raise BadFrame("forged")
        landing = self._by_ticket.get(header.ticket)
        if landing is None:
            raise BadFrame("late")
        landing.take(header, payload)

    async def complete(self, key: GrantKey, num_bytes: int, checksum: int | None) -> None:
        """Waits until the grant's first `num_bytes` have landed, and seals it. Later frames change nothing.

        Raises:
            TransferRefused: bytes were lost or stopped coming, there are more of them than was said, or other ones.
            Aborted: the grant was given up meanwhile.
        """
        landing = self._find(key)
        if landing is None:
            raise TransferRefused("no such slot or grant was given to this session")
        await self._wait(key, landing, num_bytes)
        landing.is_open = False
        if landing.num_landed != num_bytes:
            raise TransferRefused("not all bytes of the transfer have arrived")
        if checksum is not None and landing.digest.intdigest() != checksum:
            raise TransferRefused("the transfer's checksum is wrong")

    def forget(self, ref: AttemptRef, of: int | str | None) -> None:
        """The item or grant of the attempt, or all it has (None). Whoever waits for its bytes is refused."""
        for key in [key for key in self._tickets if key[0] == ref and of in (None, key[1])]:
            self._forget(key)

    def close(self) -> None:
        self._is_over = True
        for key in list(self._tickets):
            self._forget(key)

    def _find(self, key: GrantKey) -> Landing | None:
        ticket = self._tickets.get(key)
        return None if ticket is None else self._by_ticket[ticket]

    def _forget(self, key: GrantKey) -> None:
        ticket = self._tickets.pop(key, None)
        if ticket is not None:
            self._by_ticket.pop(ticket).end()

    async def _wait(self, key: GrantKey, landing: Landing, num_bytes: int) -> None:
        try:
            async with asyncio.timeout(LANDING_TIMEOUT_S):
                while landing.num_landed < num_bytes and not landing.has_gap:
                    landing.moved.clear()
                    async with asyncio.timeout(STALLED_S):
                        await landing.moved.wait()
                    if self._find(key) is not landing:
                        raise Aborted("the transfer was given up")
        except TimeoutError:
            return


def slot_landing(arena: Arena, grant: SlotGrant) -> Landing:
    memory = np.frombuffer(arena.buffer, dtype=np.uint8)[grant.offset : grant.offset + grant.num_bytes]
    return Landing(PayloadKind.SLOT, grant.capability, grant.generation, SlotTarget(memory))


def pages_landing(arena: Arena, capability: bytes, bound: Bound) -> Landing:
    assert arena.pages is not None, "a KV arena says how its pages lie"
    pages = [page for group in bound.groups for page in group.pages]
    target = PagesTarget(pool_planes(arena.buffer, arena.pages), pages)
    return Landing(PayloadKind.PAGES, capability, bound.generation, target)
