"""Receivers that land bytes and remember what happened to them. They check everything a real one checks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from triptych.core.errors import TransferRefused
from triptych.core.grant import Grant, GroupRegions, Region
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.plan import EmbeddingSource, Token
from triptych.transport.layout import checksum64
from triptych.transport.slots import Slot, SlotAllocator
from triptych.transport.types import Arena, HaveIt, SlotGrant

ItemKey = tuple[AttemptRef, int]


@dataclass(frozen=True, slots=True)
class Landed:
    """An embedding that was committed."""

    data: bytes
    source: EmbeddingSource


class FakeEmbeddingReceiver:
    """Owner of the arena's slots. A request waits until there is room; `have` names items that are not needed."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.slots = SlotAllocator(arena.buffer.nbytes)
        self.have: dict[bytes, EmbeddingSource] = {}
        self.landed: dict[ItemKey, Landed] = {}
        self.aborted: list[tuple[AttemptRef, str]] = []
        self.lost: list[WorkerRef] = []
        self._granted: dict[int, tuple[WorkerRef, AttemptRef, int, Slot]] = {}
        self._room = asyncio.Condition()

    async def request_slot(
        self, peer: WorkerRef, ref: AttemptRef, item_index: int, identity: bytes, num_tokens: int, num_bytes: int
    ) -> SlotGrant | HaveIt:
        if identity in self.have:
            return HaveIt(self.have[identity])
        if not self.slots.can_ever_hold([num_bytes]):
            raise TransferRefused("an item is larger than the arena")
        async with self._room:
            while (slots := self.slots.try_reserve([num_bytes])) is None:
                await self._room.wait()
        (slot,) = slots
        self._granted[slot.slot_id] = (peer, ref, item_index, slot)
        return SlotGrant(slot.slot_id, slot.offset, slot.num_bytes, slot.generation, slot.capability)

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
        granted = self._granted.get(slot_id)
        if granted is None or granted[:3] != (peer, ref, item_index):
            raise TransferRefused("no such slot was granted")
        slot = granted[3]
        if (slot.generation, slot.capability, slot.num_bytes) != (generation, capability, num_bytes):
            raise TransferRefused("the handle is wrong")
        data = bytes(self.arena.buffer[slot.offset : slot.offset + slot.num_bytes])
        if checksum64(data) != checksum:
            raise TransferRefused("the checksum is wrong")
        self.landed[ref, item_index] = Landed(data, source)
        await self._free([slot_id])

    async def abort(self, peer: WorkerRef, ref: AttemptRef, reason: str) -> None:
        self.aborted.append((ref, reason))
        await self._free([key for key, granted in self._granted.items() if granted[:2] == (peer, ref)])

    async def peer_lost(self, peer: WorkerRef) -> None:
        self.lost.append(peer)
        await self._free([key for key, granted in self._granted.items() if granted[0] == peer])

    async def _free(self, slot_ids: list[int]) -> None:
        for slot_id in slot_ids:
            self.slots.release(self._granted.pop(slot_id)[3])
        async with self._room:
            self._room.notify_all()


@dataclass(frozen=True, slots=True)
class KvLanded:
    """A prompt's KV that was committed."""

    num_tokens: int
    num_bytes: int
    first_token: Token
    position_delta: int


class FakeKvReceiver:
    """Owner of the credits in `credits`; binds each to the first pages of its pool, behind `num_held_tokens` of the
    prompt."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.credits: dict[str, Grant] = {}
        self.bound: dict[str, Grant] = {}
        self.landed: dict[str, KvLanded] = {}
        self.aborted: list[tuple[AttemptRef, str | None, str]] = []
        self.lost: list[WorkerRef] = []
        self.num_held_tokens = 0
        self.may_bind = asyncio.Event()
        self.may_bind.set()

    async def bind(self, peer: WorkerRef, ref: AttemptRef, grant_id: str, capability: bytes) -> Grant:
        await self.may_bind.wait()
        credit = self.credits.get(grant_id)
        if credit is None or credit.capability != capability:
            raise TransferRefused("no such grant")
        groups = (GroupRegions(0, 0, (Region(0, credit.num_pages),)),)
        generation = len(self.bound) + 1
        self.bound[grant_id] = replace(
            credit, generation=generation, groups=groups, num_held_tokens=self.num_held_tokens
        )
        return self.bound[grant_id]

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
        bound = self.bound.get(grant_id)
        if bound is None or (bound.generation, bound.capability) != (generation, capability):
            raise TransferRefused("the handle is wrong")
        self.landed[grant_id] = KvLanded(num_tokens, num_bytes, first_token, position_delta)

    async def abort(self, peer: WorkerRef, ref: AttemptRef, grant_id: str | None, reason: str) -> None:
        self.aborted.append((ref, grant_id, reason))

    async def peer_lost(self, peer: WorkerRef) -> None:
        self.lost.append(peer)
