"""Landing slots of a prefill worker: who may write where, and when the bytes may be reused.

    RESERVED ── handed to an encoder ──► HANDED ── commit ──► LANDED ── consumed ──► free
        │                                  │                     │
        └── abandon ──► free               └── abandon ──► quarantined ── writer done or dead ──► free
                                                                 └── abandon ──► free

Used by the engine's thread only.
"""

from __future__ import annotations

import enum
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triptych.core.errors import StaleAttempt, TransferRefused
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.transport.slots import Slot, SlotAllocator


class SlotState(enum.Enum):
    RESERVED = "reserved"
    HANDED = "handed"
    LANDED = "landed"


SlotKey = tuple[AttemptRef, int]


@dataclass(slots=True, eq=False)
class LandingSlot:
    """The slot of one item of one attempt."""

    key: SlotKey
    slot: Slot
    state: SlotState = SlotState.RESERVED
    writer: WorkerRef | None = None


class LandingTable:
    """All slots in use. Owner of the arena's bookkeeping."""

    def __init__(self, book: SlotAllocator) -> None:
        self._book = book
        self._living: dict[SlotKey, LandingSlot] = {}
        self._quarantined: dict[SlotKey, LandingSlot] = {}

    def __len__(self) -> int:
        return len(self._living) + len(self._quarantined)

    def counts_bytes(self) -> dict[str, int]:
        """Bytes of the arena by state, the label values of `triptych_landing_bytes`."""
        book = self._book
        return {"free": book.free_bytes, "owned": book.owned_bytes, "quarantined": book.quarantined_bytes}

    def can_ever_hold(self, sizes: Sequence[int]) -> bool:
        """Whether items of those sizes, in bytes, fit an empty arena together. What does not must not wait for room."""
        return self._book.can_ever_hold(sizes)

    def try_reserve(self, ref: AttemptRef, sizes: Mapping[int, int]) -> bool:
        """Slots for all items (index -> bytes), or nothing."""
        slots = self._book.try_reserve(list(sizes.values()))
        if slots is None:
            return False
        for item_index, slot in zip(sizes, slots, strict=True):
            self._living[ref, item_index] = LandingSlot((ref, item_index), slot)
        return True

    def hand(self, ref: AttemptRef, item_index: int, writer: WorkerRef) -> Slot:
        """Gives the slot to an encoder. Raises StaleAttempt or TransferRefused (somebody has it already)."""
        landing = self._find(ref, item_index)
        if landing.state is not SlotState.RESERVED:
            raise TransferRefused("another encoder already writes this item")
        landing.state, landing.writer = SlotState.HANDED, writer
        return landing.slot

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

    def landed(self, ref: AttemptRef, item_index: int) -> None:
        self._find(ref, item_index).state = SlotState.LANDED

    def consumed(self, ref: AttemptRef, item_index: int) -> None:
        """Prefill has used the embedding and will not need it again."""
        landing = self._living.pop((ref, item_index))
        assert landing.state is SlotState.LANDED
        self._book.release(landing.slot)

    def stop_waiting(self, ref: AttemptRef) -> None:
        """The attempt ended. What an encoder may still write to is quarantined, and at once: its writer may be done
        before a step under way is. What has landed stays until `abandon`: that step may read it."""
        for key in [
            key for key, landing in self._living.items() if key[0] == ref and landing.state is SlotState.HANDED
        ]:
            landing = self._quarantined[key] = self._living.pop(key)
            self._book.quarantine(landing.slot)

    def abandon(self, ref: AttemptRef) -> None:
        """Nothing of the attempt is needed here any more."""
        self.stop_waiting(ref)
        for key in [key for key in self._living if key[0] == ref]:
            self._book.release(self._living.pop(key).slot)

    def writer_finished(self, writer: WorkerRef, ref: AttemptRef | None) -> list[SlotKey]:
        """The encoder will write no more for this attempt (None: for any, its process is gone). Frees what was
        quarantined for it and returns the items it owed to living attempts; their slots may be handed out again."""
        for key, landing in list(self._quarantined.items()):
            if landing.writer == writer and ref in (None, key[0]):
                self._book.confirm_revoked(landing.slot)
                del self._quarantined[key]
        owed = [
            landing
            for landing in self._living.values()
            if landing.writer == writer and landing.state is SlotState.HANDED and ref in (None, landing.key[0])
        ]
        for landing in owed:
            landing.state, landing.writer = SlotState.RESERVED, None
        return [landing.key for landing in owed]

    def writer_done_with(self, writer: WorkerRef, ref: AttemptRef, item_index: int) -> None:
        """The encoder has written this one slot, too late: an abandoned slot need not wait any longer."""
        landing = self._quarantined.get((ref, item_index))
        if landing is not None and landing.writer == writer:
            self._book.confirm_revoked(landing.slot)
            del self._quarantined[ref, item_index]

    def _find(self, ref: AttemptRef, item_index: int) -> LandingSlot:
        landing = self._living.get((ref, item_index))
        if landing is None:
            raise StaleAttempt("this attempt has no slot for that item any more")
        return landing
