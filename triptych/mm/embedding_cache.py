"""Bookkeeping of an embedding cache: bounded in bytes, least recently used first out.

Entries are values that own their storage. A reader holds a reference to the value, so evicting an entry never pulls an
embedding from under a batch that is being assembled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from triptych.core.plan import Grid, Item

V = TypeVar("V")


class CacheKey(NamedTuple):
    """What an embedding is kept under.

    The identity names the content. The rest is what a plan *claims* about it, and what this encoder makes of it: a plan
    with another token count or grid, or an encoder that computes in another number format (`dtype`: "float32"), never
    meets an entry of this one. It misses, the bytes are fetched, and a wrong claim is found out.
    """

    identity: bytes
    num_tokens: int
    grid: Grid
    dtype: str

    @classmethod
    def of(cls, item: Item, dtype: str) -> CacheKey:
        return cls(item.identity, item.num_tokens, item.grid, dtype)


class EmbeddingCache(Generic[V]):
    """Owner of cached embeddings. Used from one thread. `told` hears of each identity that is kept from now on (True)
    or not any more."""

    def __init__(self, capacity_bytes: int, told: Callable[[bytes, bool], None] | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self._told = told
        self.num_bytes = 0
        self._entries: OrderedDict[CacheKey, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: CacheKey) -> V | None:
        """The embedding, now the most recently used."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def can_keep(self, num_bytes: int) -> bool:
        """Whether `put` would keep an embedding of that size."""
        return num_bytes <= self.capacity_bytes

    def put(self, key: CacheKey, value: V, num_bytes: int) -> None:
        """Keeps `value`, evicting as needed. One larger than the whole cache is not kept."""
        self.drop(key)
        if not self.can_keep(num_bytes):
            return
        self.evict(self.capacity_bytes - num_bytes)
        self._entries[key] = (value, num_bytes)
        self.num_bytes += num_bytes
        if self._told is not None:
            self._told(key.identity, True)

    def drop(self, key: CacheKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._lost(key, entry[1])

    def evict(self, target_bytes: int) -> None:
        """Shrinks to at most `target_bytes`."""
        while self.num_bytes > target_bytes and self._entries:
            key, (_, num_bytes) = self._entries.popitem(last=False)
            self._lost(key, num_bytes)

    def _lost(self, key: CacheKey, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        if self._told is not None:
            self._told(key.identity, False)
