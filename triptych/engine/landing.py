"""Landing slots of a prefill worker: who may write where, and when the bytes may be reused.

    RESERVED ── handed to an encoder ──► HANDED ── commit ──► landed (`landed_cache.py`) ── evicted ──► free
        │                                  │
        ├── the same landed for another    └── abandon ──► quarantined ── writer done or dead ──► free
        └── abandon ──► free

Who needs what has landed already leases it and gets no slot. Who got a slot while the same was on its way for another
keeps it until that has landed: so nobody depends on another's encoder, and yet the bytes come once.

Landed embeddings that nobody needs stay as long as nobody wants their room: a reservation evicts them.
Used by the engine's thread only.
"""

from __future__ import annotations

import enum
import hmac
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from triptych.core.errors import StaleAttempt, TransferRefused
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.engine.landed_cache import Content, Landed, LandedCache
from triptych.kv.journal import Journal
from triptych.transport.slots import Slot, SlotAllocator


class SlotState(enum.Enum):
    RESERVED = "reserved"
    HANDED = "handed"


SlotKey = tuple[AttemptRef, int]


@dataclass(frozen=True, slots=True)
class Wanted:
    """An item that a sequence needs the embedding of."""

    content: Content
    num_bytes: int


@dataclass(slots=True, eq=False)
class LandingSlot:
    """The slot of one item of one attempt, until the embedding has landed."""

    key: SlotKey
    content: Content
    slot: Slot
    state: SlotState = SlotState.RESERVED
    writer: WorkerRef | None = None


class LandingTable:
    """All slots in use. Owner of the arena's bookkeeping: free + owned + cached + quarantined = capacity, always."""

    def __init__(self, book: SlotAllocator, cache_bytes: int = 0, journal: Journal | None = None) -> None:
        self._book = book
        self._cache = LandedCache(cache_bytes, journal)
        self._living: dict[SlotKey, LandingSlot] = {}
        self._leased: dict[SlotKey, Landed] = {}
        self._quarantined: dict[int, LandingSlot] = {}  # by slot: an attempt may leave several behind for one item
        self._wakers: defaultdict[Content, list[Callable[[], None]]] = defaultdict(list)

    def __len__(self) -> int:
        """What somebody holds or may still write to."""
        return len(self._living) + len(self._leased) + len(self._quarantined)

    def counts_bytes(self) -> dict[str, int]:
        """Bytes of the arena by state, the label values of `triptych_landing_bytes`."""
        book, cached = self._book, self._cache.idle_bytes
        return {
            "free": book.free_bytes,
            "owned": book.owned_bytes - cached,
            "cached": cached,
            "quarantined": book.quarantined_bytes,
        }

    def can_ever_hold(self, sizes: Sequence[int]) -> bool:
        """Whether items of those sizes, in bytes, fit an empty arena together. What does not must not wait for room."""
        return self._book.can_ever_hold(sizes)

    def try_reserve(self, ref: AttemptRef, wanted: Mapping[int, Wanted]) -> bool:
        """For each item (by its index) a lease of what has landed already, or a slot; or nothing at all. Room that only
        cached embeddings take is made; False costs some of those at most.

        Where what is cached lies in the way of the rest it is given up, too: whatever fits an empty arena gets in when
        nobody else is there.
        """
        found = {
            index: entry for index, want in wanted.items() if (entry := self._cache.find(want.content)) is not None
        }
        return self._reserve(ref, wanted, found) or (bool(found) and self._reserve(ref, wanted, {}))

    def _reserve(self, ref: AttemptRef, wanted: Mapping[int, Wanted], found: Mapping[int, Landed]) -> bool:
        missing = {index: want for index, want in wanted.items() if index not in found}
        for index, entry in found.items():
            self._lease(entry, (ref, index))
        slots = self._take_slots([want.num_bytes for want in missing.values()])
        if slots is None:
            for index in found:
                self.consumed(ref, index)
            return False
        for (index, want), slot in zip(missing.items(), slots, strict=True):
            self._living[ref, index] = LandingSlot((ref, index), want.content, slot)
        return True

    def is_leased(self, ref: AttemptRef) -> bool:
        """Whether something that landed for this attempt is still kept for it."""
        return any(key[0] == ref for key in self._leased)

    def rows(self, ref: AttemptRef, item_index: int) -> torch.Tensor | None:
        """The embedding, if it has landed. It stays until `consumed` or `abandon`."""
        entry = self._leased.get((ref, item_index))
        return None if entry is None else entry.rows

    def hand(self, ref: AttemptRef, item_index: int, writer: WorkerRef) -> Slot:
        """Gives the slot to an encoder. Raises StaleAttempt or TransferRefused (somebody has it already)."""
        landing = self._find(ref, item_index)
        if landing.state is not SlotState.RESERVED:
            raise TransferRefused("another encoder already writes this item")
        landing.state, landing.writer = SlotState.HANDED, writer
        return landing.slot

    def is_coming(self, ref: AttemptRef, item_index: int) -> bool:
        """Whether an encoder writes the same embedding for somebody else just now."""
        mine = self._living.get((ref, item_index))
        return mine is not None and any(
            other.content == mine.content and other.state is SlotState.HANDED and other is not mine
            for other in self._living.values()
        )

    def wake_on_change(self, content: Content, wake: Callable[[], None]) -> None:
        """Calls `wake` once, when this embedding has landed or somebody has given up writing it."""
        self._wakers[content].append(wake)

    def check(
        self, ref: AttemptRef, item_index: int, writer: WorkerRef, slot_id: int, generation: int, capability: bytes
    ) -> Slot:
        """The slot that a commit names. Raises StaleAttempt or TransferRefused, and then nothing has changed."""
        landing = self._find(ref, item_index)
        slot = landing.slot
        if landing.state is not SlotState.HANDED or landing.writer != writer:
            raise TransferRefused("this slot does not expect that commit")
        if (slot.slot_id, slot.generation) != (slot_id, generation) or not hmac.compare_digest(
            slot.capability, capability
        ):
            raise TransferRefused("the commit names another slot")
        return slot

    def landed(self, ref: AttemptRef, item_index: int, rows: torch.Tensor) -> list[SlotKey]:
        """The embedding is complete. Returns for whom: the attempt's item, and all that waited for the same and have no
        encoder at work yet; their slots are free again."""
        landing = self._find(ref, item_index)
        content = landing.content
        del self._living[landing.key]
        entry = Landed(content, landing.slot, self._book.room_bytes(landing.slot), rows)
        self._leased[landing.key] = entry
        self._free(self._cache.add(entry))
        followers = [
            other.key
            for other in self._living.values()
            if other.content == content and other.state is SlotState.RESERVED
        ]
        for key in followers:
            self._book.release(self._living.pop(key).slot)
            self._lease(entry, key)
        self._wake(content)
        return [landing.key, *followers]

    def consumed(self, ref: AttemptRef, item_index: int) -> None:
        """The attempt will not need the embedding again."""
        self._free(self._cache.give_back(self._leased.pop((ref, item_index))))

    def stop_waiting(self, ref: AttemptRef) -> None:
        """The attempt ended: what it still waits for is not for it any more. What an encoder may still write to is
        quarantined, and must be at once: from now on its writer's commit is refused, and nobody would hear of it later
        that it is done. What has landed stays until `abandon`, as a step under way may read it."""
        for key in [key for key in self._living if key[0] == ref]:
            landing = self._living.pop(key)
            if landing.state is SlotState.HANDED:
                self._book.quarantine(landing.slot)
                self._quarantined[landing.slot.slot_id] = landing
            else:
                self._book.release(landing.slot)
            self._wake(landing.content)

    def abandon(self, ref: AttemptRef) -> None:
        """Nothing of the attempt is needed here any more."""
        self.stop_waiting(ref)
        for key in [key for key in self._leased if key[0] == ref]:
            self.consumed(*key)

    def writer_finished(self, writer: WorkerRef, ref: AttemptRef | None) -> list[SlotKey]:
        """The encoder will write no more for this attempt (None: for any, its process is gone). Frees what was
        quarantined for it and returns the items it owed to living attempts; their slots may be handed out again."""
        for landing in list(self._quarantined.values()):
            if landing.writer == writer and ref in (None, landing.key[0]):
                self._end_quarantine(landing)
        owed = [
            landing
            for landing in self._living.values()
            if landing.writer == writer and landing.state is SlotState.HANDED and ref in (None, landing.key[0])
        ]
        for landing in owed:
            landing.state, landing.writer = SlotState.RESERVED, None
            self._wake(landing.content)
        return [landing.key for landing in owed]

    def writer_done_with(self, writer: WorkerRef, slot_id: int) -> None:
        """The encoder has written this one slot, too late: an abandoned slot need not wait any longer."""
        landing = self._quarantined.get(slot_id)
        if landing is not None and landing.writer == writer:
            self._end_quarantine(landing)

    def clear_cache(self) -> None:
        """Frees what nobody needs right now."""
        while gone := self._cache.evict():
            self._free(gone)

    def check_integrity(self) -> None:
        """Raises AssertionError when bytes are lost or in two hands."""
        room, entries = self._book.room_bytes, {id(entry): entry for entry in self._leased.values()}
        owned = sum(room(landing.slot) for landing in self._living.values())
        owned += sum(entry.num_bytes for entry in entries.values())
        quarantined = sum(room(landing.slot) for landing in self._quarantined.values())
        counts = self.counts_bytes()
        assert (counts["owned"], counts["quarantined"]) == (owned, quarantined), counts
        assert sum(counts.values()) == self._book.capacity_bytes, counts
        leases = list(self._leased.values())
        assert all(leases.count(entry) == entry.num_leases for entry in entries.values())

    def _take_slots(self, sizes: Sequence[int]) -> list[Slot] | None:
        """One for each size. Evicts only where that may be enough."""
        needed = sum(self._book.aligned(size) for size in sizes)
        if needed > self._book.free_bytes + self._cache.idle_bytes:
            return None
        while (slots := self._book.try_reserve(sizes)) is None:
            gone = self._cache.evict()
            if not gone:
                return None
            self._free(gone)
        return slots

    def _lease(self, entry: Landed, key: SlotKey) -> None:
        self._cache.lease(entry)
        self._leased[key] = entry

    def _free(self, entries: Iterable[Landed]) -> None:
        for entry in entries:
            self._book.release(entry.slot)

    def _end_quarantine(self, landing: LandingSlot) -> None:
        del self._quarantined[landing.slot.slot_id]
        self._book.confirm_revoked(landing.slot)

    def _wake(self, content: Content) -> None:
        for wake in self._wakers.pop(content, ()):
            wake()

    def _find(self, ref: AttemptRef, item_index: int) -> LandingSlot:
        landing = self._living.get((ref, item_index))
        if landing is not None:
            return landing
        if (ref, item_index) in self._leased:
            raise TransferRefused("this embedding has landed already")
        raise StaleAttempt("this attempt has no slot for that item any more")
