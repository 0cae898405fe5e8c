"""Bookkeeping of the embedding cache."""

from __future__ import annotations

import random
from collections import OrderedDict

from triptych.mm.embedding_cache import EmbeddingCache


def key(number: int) -> bytes:
    return bytes([number]) * 32


def test_the_key_is_the_identity_and_the_token_count() -> None:
    cache: EmbeddingCache[str] = EmbeddingCache(100)
    cache.put(key(1), 4, "four", 10)
    cache.put(key(1), 6, "six", 10)
    assert cache.get(key(1), 4) == "four"
    assert cache.get(key(1), 6) == "six"
    assert cache.get(key(1), 5) is None
    assert cache.get(key(2), 4) is None


def test_the_least_recently_used_goes_first() -> None:
    cache: EmbeddingCache[str] = EmbeddingCache(30)
    for number in (1, 2, 3):
        cache.put(key(number), 1, str(number), 10)
    assert cache.get(key(1), 1) == "1"
    cache.put(key(4), 1, "4", 10)
    assert [cache.get(key(number), 1) for number in (1, 2, 3, 4)] == ["1", None, "3", "4"]


def test_an_entry_put_again_is_counted_once() -> None:
    cache: EmbeddingCache[str] = EmbeddingCache(30)
    cache.put(key(1), 1, "old", 10)
    cache.put(key(1), 1, "new", 20)
    assert cache.num_bytes == 20
    assert cache.get(key(1), 1) == "new"


def test_one_too_large_is_not_kept_and_evicts_nobody() -> None:
    cache: EmbeddingCache[str] = EmbeddingCache(30)
    cache.put(key(1), 1, "kept", 30)
    cache.put(key(2), 1, "too large", 31)
    assert cache.get(key(1), 1) == "kept"
    assert cache.get(key(2), 1) is None


def test_a_cache_of_no_bytes_keeps_nothing() -> None:
    cache: EmbeddingCache[str] = EmbeddingCache(0)
    cache.put(key(1), 1, "x", 1)
    assert len(cache) == cache.num_bytes == 0


def test_a_reader_keeps_its_value_when_the_entry_is_evicted() -> None:
    cache: EmbeddingCache[list[int]] = EmbeddingCache(10)
    cache.put(key(1), 1, [1, 2, 3], 10)
    held = cache.get(key(1), 1)
    cache.evict(0)
    assert held == [1, 2, 3]
    assert cache.get(key(1), 1) is None


def test_it_behaves_like_a_dictionary_with_a_budget(seed: int) -> None:
    rng = random.Random(seed)
    cache: EmbeddingCache[int] = EmbeddingCache(50)
    model: OrderedDict[tuple[bytes, int], tuple[int, int]] = OrderedDict()
    for turn in range(3_000):
        name = (key(rng.randrange(12)), rng.randint(1, 2))
        match rng.randrange(4):
            case 0:
                expected = model.get(name)
                assert cache.get(*name) == (expected[0] if expected else None)
                if expected:
                    model.move_to_end(name)
            case 1 | 2:
                size = rng.randint(1, 60)
                cache.put(*name, turn, size)
                model.pop(name, None)
                if size <= 50:
                    while sum(held for _, held in model.values()) + size > 50:
                        model.popitem(last=False)
                    model[name] = (turn, size)
            case 3:
                cache.drop(*name)
                model.pop(name, None)
        assert cache.num_bytes == sum(size for _, size in model.values()) <= 50
        assert len(cache) == len(model)
