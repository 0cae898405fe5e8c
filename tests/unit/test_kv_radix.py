"""The radix tree: what matches, what is locked, what goes first."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable
from types import FrameType

import pytest

from triptych.kv.radix import Node, RadixTree

PAGE = 4
ROOT = b"tenant"


def grow(tree: RadixTree, ids: list[int], first_page: int, root: bytes = ROOT) -> list[Node]:
    """Caches every whole page of `ids` on pages first_page, first_page + 1, …; the path stays locked."""
    path: list[Node] = []
    for index in range(len(ids) // PAGE):
        key = tree.key(ids, index * PAGE)
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
    key = tree.key([0, 1, 2, 3], 0)
    first, took = tree.insert(ROOT, None, key, 7)
    again, took_again = tree.insert(ROOT, None, key, 8)
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
    before = [node.page for node in tree.unlocked()]
    tree.match(ROOT, [1] * 4, 4)
    tree.match(b"another root", [1] * 4, 4)
    assert [node.page for node in tree.unlocked()] == before == [1, 2]
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


def test_a_page_above_others_goes_after_them_with_the_age_that_it_had() -> None:
    """Its children went; from then on it is a leaf, older than what was used after it."""
    tree = RadixTree(PAGE)
    above, later = grow(tree, list(range(8)), 1), grow(tree, [9] * 4, 5)
    tree.unlock(above)
    tree.unlock(later)
    assert tree.evict(3) == [2, 1, 5]


def test_a_page_with_many_after_it_loses_any_of_them() -> None:
    tree = RadixTree(PAGE)
    branches = [grow(tree, [*range(4), *[branch] * 4], 10 * branch) for branch in range(1, 5)]
    for branch in (branches[0], branches[2], branches[3], branches[1]):
        tree.unlock(branch)
    for pages_left in ([20, 30, 40], [20, 40], [20], []):
        tree.evict(1)
        found = [tree.match(ROOT, [*range(4), *[branch] * 4], 8)[1:] for branch in range(1, 5)]
        assert [nodes[0].page - 1 for nodes in found if nodes] == pages_left


def test_what_was_evicted_is_kept_alive_by_nothing() -> None:
    """Not by a neighbour in the ring that is locked from then on; and no cycle waits for the collector."""
    tree = RadixTree(PAGE)
    paths = [grow(tree, [branch] * 8, 10 * branch) for branch in range(3)]
    for path in paths:
        tree.unlock(path)
    tree.lock(paths[1])
    gc.disable()
    try:
        before = count_nodes()
        tree.evict(4)
        del paths[2], paths[0], path
        assert count_nodes() == before - 4
    finally:
        gc.enable()


def count_nodes() -> int:
    return sum(type(each) is Node for each in gc.get_objects())


def test_an_operation_looks_at_its_own_path_only() -> None:
    """Counted, not timed: lines run by a match, a lock, an unlock and an eviction, in a tree of 4 and of 400 paths."""
    few, many = lines_run(4), lines_run(400)
    assert few == many > 0


def lines_run(num_paths: int) -> int:
    tree = RadixTree(PAGE)
    for number in range(num_paths):
        tree.unlock(grow(tree, [number] * 8, 2 * number))
    lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Callable[..., object]:
        nonlocal lines
        lines += 1
        return count

    sys.settrace(count)
    try:
        path = tree.match(ROOT, [1] * 8, 8)
        tree.lock(path)
        tree.unlock(path)
        assert tree.evict(2) == [1, 0]
    finally:
        sys.settrace(None)
    return lines


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
    used: dict[int, int] = {}  # page: when it was last unlocked
    page = 0
    for turn in range(400):
        match rng.randrange(3):
            case 0:
                ids = [rng.randrange(2) for _ in range(PAGE * rng.randint(1, 4))]
                held.append(grow(tree, ids, page))
                page += 4
            case 1 if held:
                path = held.pop(rng.randrange(len(held)))
                tree.unlock(path)
                used.update({node.page: turn for node in path})
            case 2:
                expected = naive_eviction(tree, used, count := rng.randint(1, 3))
                assert tree.evict(count) == expected


def naive_eviction(tree: RadixTree, used: dict[int, int], count: int) -> list[int]:
    alive = {node.page: node for node in tree.nodes()}
    gone: list[int] = []
    for _ in range(count):
        parents = {id(node.parent) for node in alive.values()}
        leaves = [node for node in alive.values() if id(node) not in parents and node.locks == 0]
        if not leaves:
            break
        oldest = min(leaves, key=lambda node: used[node.page])
        assert [used[node.page] for node in leaves].count(used[oldest.page]) == 1, "no two leaves are equally old"
        gone.append(oldest.page)
        del alive[oldest.page]
    return gone
