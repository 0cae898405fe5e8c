"""Bookkeeping of an embedding cache: keyed by (identity, token count), bounded in bytes, least recently used first out.

Entries are values that own their storage. A reader holds a reference to the value, so evicting an entry never pulls an
embedding from under a batch that is being assembled.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")

CacheKey = tuple[bytes, int]


class EmbeddingCache(Generic[V]):
    """Owner of cached embeddings. Used from one thread."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[CacheKey, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, identity: bytes, num_tokens: int) -> V | None:
        """The embedding, now the most recently used. One with another token count is another entry."""
        entry = self._entries.get((identity, num_tokens))
        if entry is None:
            return None
        self._entries.move_to_end((identity, num_tokens))
        return entry[0]

    def put(self, identity: bytes, num_tokens: int, value: V, num_bytes: int) -> None:
        """Keeps `value`, evicting as needed. One larger than the whole cache is not kept."""
        self.drop(identity, num_tokens)
        if num_bytes > self.capacity_bytes:
            return
        self.evict(self.capacity_bytes - num_bytes)
        self._entries[identity, num_tokens] = (value, num_bytes)
        self.num_bytes += num_bytes

    def drop(self, identity: bytes, num_tokens: int) -> None:
        entry = self._entries.pop((identity, num_tokens), None)
        if entry is not None:
            self.num_bytes -= entry[1]

    def evict(self, target_bytes: int) -> None:
        """Shrinks to at most `target_bytes`."""
        while self.num_bytes > target_bytes and self._entries:
            _, (_, num_bytes) = self._entries.popitem(last=False)
            self.num_bytes -= num_bytes
