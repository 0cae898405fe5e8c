"""The encoder's embedding cache against a list of entries in order of use."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.property.promises import assert_machine_catches, steps
from triptych.core.plan import Grid
from triptych.mm.embedding_cache import CacheKey, EmbeddingCache

CAPACITY = 10
KEYS = st.sampled_from(
    [
        CacheKey(b"a", 1, Grid(1, 1, 2), "float32"),
        CacheKey(b"b", 1, Grid(1, 1, 2), "float32"),
        CacheKey(b"a", 2, Grid(1, 1, 2), "float32"),
        CacheKey(b"a", 1, Grid(1, 2, 1), "float32"),
        CacheKey(b"a", 1, Grid(1, 1, 2), "bfloat16"),
    ]
)
"""Few, so that one is met again; each differs from the first in one field."""


class CacheMachine(RuleBasedStateMachine):
    part: type[EmbeddingCache[object]] = EmbeddingCache

    def __init__(self) -> None:
        super().__init__()
        self.cache = self.part(CAPACITY)
        self.model: list[tuple[CacheKey, object, int]] = []  # the one used longest ago first

    @rule(key=KEYS)
    def get(self, key: CacheKey) -> None:
        found = [entry for entry in self.model if entry[0] == key]
        assert self.cache.get(key) is (found[0][1] if found else None)
        self.model = [entry for entry in self.model if entry[0] != key] + found

    @rule(key=KEYS, num_bytes=st.integers(0, CAPACITY + 2))
    def put(self, key: CacheKey, num_bytes: int) -> None:
        value = object()
        self.cache.put(key, value, num_bytes)
        self.model = [entry for entry in self.model if entry[0] != key]
        if num_bytes <= CAPACITY:
            self.shrink(CAPACITY - num_bytes)
            self.model.append((key, value, num_bytes))

    @rule(key=KEYS)
    def drop(self, key: CacheKey) -> None:
        self.cache.drop(key)
        self.model = [entry for entry in self.model if entry[0] != key]

    @rule(target_bytes=st.integers(0, CAPACITY))
    def evict(self, target_bytes: int) -> None:
        self.cache.evict(target_bytes)
        self.shrink(target_bytes)

    def shrink(self, target_bytes: int) -> None:
        while sum(entry[2] for entry in self.model) > target_bytes:
            del self.model[0]

    @invariant()
    def it_is_bounded_and_adds_up(self) -> None:
        assert self.cache.num_bytes == sum(entry[2] for entry in self.model) <= CAPACITY
        assert len(self.cache) == len(self.model)


TestCache = CacheMachine.TestCase
TestCache.settings = steps(60)


class WithoutUse(EmbeddingCache[object]):
    def get(self, key: CacheKey) -> object | None:
        entry = self._entries.get(key)
        return None if entry is None else entry[0]


class ByIdentityAlone(EmbeddingCache[object]):
    def get(self, key: CacheKey) -> object | None:
        alike = [known for known in self._entries if known.identity == key.identity]
        return super().get(alike[0]) if alike else None


class OneTooLarge(EmbeddingCache[object]):
    def put(self, key: CacheKey, value: object, num_bytes: int) -> None:
        super().put(key, value, min(num_bytes, self.capacity_bytes))


class CountsTwice(EmbeddingCache[object]):
    def drop(self, key: CacheKey) -> None:
        self._entries.pop(key, None)


class EvictsOneTooFew(EmbeddingCache[object]):
    def evict(self, target_bytes: int) -> None:
        super().evict(target_bytes + 1)


@pytest.mark.parametrize("broken", [WithoutUse, ByIdentityAlone, OneTooLarge, CountsTwice, EvictsOneTooFew])
def test_a_broken_cache_is_caught(broken: type[EmbeddingCache[object]]) -> None:
    assert_machine_catches(type("Broken", (CacheMachine,), {"part": broken}))
