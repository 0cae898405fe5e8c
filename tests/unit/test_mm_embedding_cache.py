"""Bookkeeping of the embedding cache."""

from __future__ import annotations

import random
from collections import OrderedDict

from triptych.core.plan import Grid
from triptych.mm.embedding_cache import CacheKey, EmbeddingCache


def key(number: int, num_tokens: int = 1) -> CacheKey:
    return CacheKey(bytes([number]) * 32, num_tokens, Grid(1, 2, 2), "float32")


def test_the_key_is_the_identity_and_all_that_is_claimed_or_chosen_beside_it() -> None:
    cache: EmbeddingCache[str] = EmbeddingCache(100)
    keys = [
        key(1, 4),
        key(1, 6),
        key(2, 4),
        key(1, 4)._replace(grid=Grid(1, 4, 1)),
        key(1, 4)._replace(grid=Grid(1, 1, 4)),
        key(1, 4)._replace(dtype="bfloat16"),
    ]
    for number, each in enumerate(keys):
        assert cache.get(each) is None
        cache.put(each, str(number), 10)
    assert [cache.get(each) for each in keys] == ["0", "1", "2", "3", "4", "5"]
    assert cache.get(key(1, 5)) is None


def test_the_least_recently_used_goes_first() -> None:
    cache: EmbeddingCache[str] = EmbeddingCache(30)
    for number in (1, 2, 3):
        cache.put(key(number), str(number), 10)
    assert cache.get(key(1)) == "1"
    cache.put(key(4), "4", 10)
    assert [cache.get(key(number)) for number in (1, 2, 3, 4)] == ["1", None, "3", "4"]


def test_an_entry_put_again_is_counted_once() -> None:
    cache: EmbeddingCache[str] = EmbeddingCache(30)
    cache.put(key(1), "old", 10)
    cache.put(key(1), "new", 20)
    assert cache.num_bytes == 20
    assert cache.get(key(1)) == "new"


def test_one_too_large_is_not_kept_and_evicts_nobody() -> None:
    cache: EmbeddingCache[str] = EmbeddingCache(30)
    cache.put(key(1), "kept", 30)
    cache.put(key(2), "too large", 31)
    assert cache.get(key(1)) == "kept"
    assert cache.get(key(2)) is None


def test_a_cache_of_no_bytes_keeps_nothing() -> None:
    cache: EmbeddingCache[str] = EmbeddingCache(0)
    cache.put(key(1), "x", 1)
    assert len(cache) == cache.num_bytes == 0


def test_a_reader_keeps_its_value_when_the_entry_is_evicted() -> None:
    cache: EmbeddingCache[list[int]] = EmbeddingCache(10)
    cache.put(key(1), [1, 2, 3], 10)
    held = cache.get(key(1))
    cache.evict(0)
    assert held == [1, 2, 3]
    assert cache.get(key(1)) is None


def test_it_behaves_like_a_dictionary_with_a_budget(seed: int) -> None:
    rng = random.Random(seed)
    cache: EmbeddingCache[int] = EmbeddingCache(50)
    model: OrderedDict[CacheKey, tuple[int, int]] = OrderedDict()
    for turn in range(3_000):
        name = key(rng.randrange(12), rng.randint(1, 2))
        match rng.randrange(4):
            case 0:
                expected = model.get(name)
                assert cache.get(name) == (expected[0] if expected else None)
                if expected:
                    model.move_to_end(name)
            case 1 | 2:
                size = rng.randint(1, 60)
                cache.put(name, turn, size)
                model.pop(name, None)
                if size <= 50:
                    while sum(held for _, held in model.values()) + size > 50:
                        model.popitem(last=False)
                    model[name] = (turn, size)
            case 3:
                cache.drop(name)
                model.pop(name, None)
        assert cache.num_bytes == sum(size for _, size in model.values()) <= 50
        assert len(cache) == len(model)
