"""The radix tree: what matches, what is locked, what goes first."""

from __future__ import annotations

import random

import pytest

from triptych.kv.radix import Node, RadixTree

PAGE = 4
ROOT = b"tenant"


def grow(tree: RadixTree, ids: list[int], first_page: int, root: bytes = ROOT) -> list[Node]:
    """Caches every whole page of `ids` on pages first_page, first_page + 1, …; the path stays locked."""
    path: list[Node] = []
    for index in range(len(ids) // PAGE):
        key = tuple(ids[index * PAGE : (index + 1) * PAGE])
        node, _ = tree.insert(root, path[-1] if path else None, key, first_page + index)
        path.append(node)
    return path


def test_a_match_is_the_longest_cached_path_in_whole_pages() -> None:
    tree = RadixTree(PAGE)
    grow(tree, list(range(12)), 10)
    assert [node.page for node in tree.match(ROOT, list(range(12)), 12)] == [10, 11, 12]
    assert [node.page for node in tree.match(ROOT, [*range(8), 99, 99, 99, 99], 12)] == [10, 11]
    assert [node.page for node in tree.match(ROOT, [*range(7), 99], 8)] == [10]
    assert tree.match(ROOT, [99, *range(1, 12)], 12) == []


@pytest.mark.parametrize(("max_tokens", "pages"), [(12, 3), (11, 2), (8, 2), (7, 1), (4, 1), (3, 0), (0, 0)])
def test_a_match_stops_at_the_tokens_it_may_use(max_tokens: int, pages: int) -> None:
    tree = RadixTree(PAGE)
    grow(tree, list(range(12)), 10)
    assert len(tree.match(ROOT, list(range(12)), max_tokens)) == pages


def test_roots_of_different_salts_never_meet() -> None:
    tree = RadixTree(PAGE)
    grow(tree, list(range(8)), 1, b"a")
    assert tree.match(b"b", list(range(8)), 8) == []
    assert tree.match(b"", list(range(8)), 8) == []
    grow(tree, list(range(8)), 5, b"b")
    assert [node.page for node in tree.match(b"a", list(range(8)), 8)] == [1, 2]
    assert [node.page for node in tree.match(b"b", list(range(8)), 8)] == [5, 6]


def test_the_second_writer_of_a_page_gets_the_first_ones_node_and_keeps_its_own_page() -> None:
    tree = RadixTree(PAGE)
    first, took = tree.insert(ROOT, None, (0, 1, 2, 3), 7)
    again, took_again = tree.insert(ROOT, None, (0, 1, 2, 3), 8)
    assert took
    assert not took_again
    assert again is first
    assert first.page == 7
    assert first.locks == 2
    assert tree.num_pages == 1


def test_locked_pages_stay_and_leaves_go_before_their_parents() -> None:
    tree = RadixTree(PAGE)
    path = grow(tree, list(range(12)), 1)
    assert tree.evict(10) == []
    tree.unlock(path)
    assert tree.evict(2) == [3, 2]
    assert tree.evict(10) == [1]
    assert tree.num_pages == tree.num_unlocked == 0


def test_the_least_recently_used_leaf_goes_first() -> None:
    tree = RadixTree(PAGE)
    branches = [grow(tree, [*range(4), *[branch] * 4], 10 * branch) for branch in (1, 2, 3)]
    for path in branches:
        tree.unlock(path)
    tree.lock(branches[0])  # used again
    tree.unlock(branches[0])
    # The shared first page is the parent of all three.
    assert tree.evict(4) == [21, 31, 11, 10]


def test_looking_changes_nothing_not_even_the_order_of_eviction() -> None:
    tree = RadixTree(PAGE)
    old, new = grow(tree, [1] * 4, 1), grow(tree, [2] * 4, 2)
    tree.unlock(old)
    tree.unlock(new)
    before = [(node.page, node.locks, node.last_used) for node in tree.nodes()]
    tree.match(ROOT, [1] * 4, 4)
    tree.match(b"another root", [1] * 4, 4)
    assert [(node.page, node.locks, node.last_used) for node in tree.nodes()] == before
    assert tree.evict(1) == [1]


def test_a_page_used_again_while_it_waits_for_eviction_is_kept() -> None:
    tree = RadixTree(PAGE)
    path = grow(tree, list(range(8)), 1)
    tree.unlock(path)
    tree.lock(path[:1])
    assert tree.evict(5) == [2]
    tree.unlock(path[:1])
    assert tree.evict(5) == [1]


def test_unlocking_what_is_not_locked_is_a_bug() -> None:
    tree = RadixTree(PAGE)
    path = grow(tree, list(range(4)), 1)
    tree.unlock(path)
    with pytest.raises(AssertionError):
        tree.unlock(path)


def test_a_cache_that_is_only_ever_hit_does_not_grow() -> None:
    tree = RadixTree(PAGE)
    paths = [grow(tree, [branch] * 8, 10 * branch) for branch in range(1, 4)]
    for path in paths:
        tree.unlock(path)
    for turn in range(5_000):
        tree.lock(paths[turn % 3])
        tree.unlock(paths[turn % 3])
    assert len(tree._candidates) < 2_000
    assert tree.evict(6) == [31, 30, 11, 10, 21, 20]  # turn 4,999 used the second, 4,998 the first


def test_an_emptied_root_is_forgotten() -> None:
    tree = RadixTree(PAGE)
    for tenant in range(100):
        tree.unlock(grow(tree, list(range(8)), 1, bytes([tenant])))
        tree.evict(2)
    assert not tree._roots
    path = grow(tree, list(range(8)), 1, bytes([1]))
    assert tree.match(bytes([1]), list(range(8)), 8) == path


def test_eviction_order_is_that_of_a_plain_list(seed: int) -> None:
    """A naive cache that sorts all its leaves each time must evict the same pages in the same order."""
    rng = random.Random(seed)
    tree = RadixTree(PAGE)
    held: list[list[Node]] = []
    page = 0
    for _ in range(400):
        match rng.randrange(3):
            case 0:
                ids = [rng.randrange(2) for _ in range(PAGE * rng.randint(1, 4))]
                held.append(grow(tree, ids, page))
                page += 4
            case 1 if held:
                tree.unlock(held.pop(rng.randrange(len(held))))
            case 2:
                expected = naive_eviction(tree, count := rng.randint(1, 3))
                assert tree.evict(count) == expected


def naive_eviction(tree: RadixTree, count: int) -> list[int]:
    alive = {node.page: node for node in tree.nodes()}
    gone: list[int] = []
    for _ in range(count):
        parents = {id(node.parent) for node in alive.values()}
        leaves = [node for node in alive.values() if id(node) not in parents and node.locks == 0]
        if not leaves:
            break
        oldest = min(leaves, key=lambda node: node.last_used)
        assert [node.last_used for node in leaves].count(oldest.last_used) == 1, "no two leaves are equally old"
        gone.append(oldest.page)
        del alive[oldest.page]
    return gone
