"""Embeddings that have landed: shared by all who need them, and kept for the next one until somebody needs the room.

    LEASED ── the last lease is given back ──► IDLE ── evicted, or another takes its name ──► gone
       ▲                                        │
       └──────────── leased again ──────────────┘

An entry keeps the landing slot that the bytes came into: nothing is copied. It is found by identity; one that a plan
expects with another number of tokens or another grid is not found, and what lands under the same identity then takes
its name. Evicting is for the owner of the slots: all that leaves the cache is handed back to it.

Pure bookkeeping, used by the engine's thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import torch

from triptych.core.cache_feed import Holding, number_of
from triptych.core.plan import Grid, Item
from triptych.kv.journal import Journal
from triptych.transport.slots import Slot


class Content(NamedTuple):
    """What an embedding is the embedding of, and what a plan claims about it. A wrong claim finds nothing: the item is
    encoded, and the claim found out."""

    identity: bytes
    num_tokens: int
    grid: Grid

    @classmethod
    def of(cls, item: Item) -> Content:
        return cls(item.identity, item.num_tokens, item.grid)


@dataclass(slots=True, eq=False)
class Landed:
    """A complete embedding in its slot; `rows` is (num_tokens, row_elements) over it, `num_bytes` what the slot takes
    of the arena."""

    content: Content
    slot: Slot
    num_bytes: int
    rows: torch.Tensor
    num_leases: int = 1


class LandedCache:
    """Owner of all that landed. `capacity_bytes` bounds what is idle; 0 keeps nothing. `journal` hears of what can be
    found and what cannot any more."""

    def __init__(self, capacity_bytes: int, journal: Journal | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self._journal = journal
        self.idle_bytes = 0
        self._by_identity: dict[bytes, Landed] = {}
        self._idle: OrderedDict[bytes, Landed] = OrderedDict()

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def find(self, content: Content) -> Landed | None:
        """Changes nothing, not even the order of eviction."""
        entry = self._by_identity.get(content.identity)
        return entry if entry is not None and entry.content == content else None

    def add(self, entry: Landed) -> list[Landed]:
        """A new entry with its first lease. Returns what has to go: an idle one of the same identity."""
        former = self._by_identity.get(entry.content.identity)
        if former is not None and former.content == entry.content:
            return []  # landed twice at once: the first keeps the name
        self._by_identity[entry.content.identity] = entry
        if self._journal is not None:
            self._journal.stored(Holding.LANDED, number_of(entry.content.identity))
        if former is None or former.num_leases:
            return []
        self._take_from_idle(former)
        return [former]

    def lease(self, entry: Landed) -> None:
        """Keeps it where it is. Each lease is given back once."""
        if entry.num_leases == 0:
            self._take_from_idle(entry)
        entry.num_leases += 1

    def give_back(self, entry: Landed) -> list[Landed]:
        """Ends a lease. Returns what has to go: this entry, or others to make room for it among the idle."""
        assert entry.num_leases > 0, "a lease was given back twice"
        entry.num_leases -= 1
        if entry.num_leases:
            return []
        if self._by_identity.get(entry.content.identity) is not entry:
            return [entry]
        if entry.num_bytes > self.capacity_bytes:
            self._lose(entry)
            return [entry]
        gone: list[Landed] = []
        while self.idle_bytes + entry.num_bytes > self.capacity_bytes:
            gone += self.evict()
        self._idle[entry.content.identity] = entry
        self.idle_bytes += entry.num_bytes
        return gone

    def evict(self) -> list[Landed]:
        """The idle one that was used longest ago; empty when all are leased."""
        for entry in self._idle.values():
            self._take_from_idle(entry)
            self._lose(entry)
            return [entry]
        return []

    def _lose(self, entry: Landed) -> None:
        """It is not found any more."""
        del self._by_identity[entry.content.identity]
        if self._journal is not None:
            self._journal.removed(Holding.LANDED, number_of(entry.content.identity))

    def _take_from_idle(self, entry: Landed) -> None:
        del self._idle[entry.content.identity]
        self.idle_bytes -= entry.num_bytes
