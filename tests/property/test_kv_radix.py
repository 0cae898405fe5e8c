"""The radix tree against a dictionary of prefixes that sorts all its leaves for every eviction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tests.property.promises import assert_machine_catches, steps
from triptych.kv.radix import Node, PageKey, RadixTree

PAGE = 2

Prefix = tuple[bytes, tuple[int, ...]]


@dataclass(eq=False)
class Hold:
    path: list[Node]
    prefixes: list[Prefix]


class TreeMachine(RuleBasedStateMachine):
    part: type[RadixTree] = RadixTree
    holds: Bundle[Hold] = Bundle("holds")

    def __init__(self) -> None:
        super().__init__()
        self.tree = self.part(PAGE)
        self.cached: dict[Prefix, int] = {}
        self.used: dict[Prefix, int] = {}
        self.living: list[Hold] = []
        self.num_pages = self.tick = 0

    ids = st.lists(st.integers(0, 1), max_size=9)
    roots = st.sampled_from([b"", b"salt"])

    @rule(target=holds, root=roots, ids=ids)
    def grow(self, root: bytes, ids: list[int]) -> Hold:
        """A sequence: locks what is cached, computes the rest, and shares it."""
        path = self.tree.match(root, ids, len(ids))
        self.tree.lock(path)
        prefixes = self.prefixes(root, ids)
        for index in range(len(path), len(prefixes)):
            self.num_pages += 1
            node, took = self.tree.insert(
                root, path[-1] if path else None, self.tree.key(ids, PAGE * index), self.num_pages
            )
            assert took and node.page == self.num_pages
            self.cached[prefixes[index]] = node.page
            path.append(node)
        return self.hold(path, prefixes)

    @rule(target=holds, hold=holds)
    def meet(self, hold: Hold) -> Hold:
        """Another sequence that computed the same beside it: gets the tree's nodes, keeps its own pages."""
        path: list[Node] = []
        for prefix in hold.prefixes if hold in self.living else []:
            root, ids = prefix
            key = self.tree.key(ids, len(ids) - PAGE)
            known = self.tree.find(root, path[-1] if path else None, key)
            node, took = self.tree.insert(root, path[-1] if path else None, key, -1)
            assert node is known and not took and node.page == self.cached[prefix]
            path.append(node)
        return self.hold(path, hold.prefixes[: len(path)])

    @rule(hold=consumes(holds))
    def leave(self, hold: Hold) -> None:
        if hold not in self.living:
            return
        self.tree.unlock(hold.path)
        self.living.remove(hold)
        self.tick += 1
        self.used |= dict.fromkeys(hold.prefixes, self.tick)

    @rule(count=st.integers(0, 6))
    def evict(self, count: int) -> None:
        expected: list[int] = []
        while len(expected) < count and (oldest := self.oldest()) is not None:
            expected.append(self.cached.pop(oldest))
        assert self.tree.evict(count) == expected

    @rule(root=roots, ids=ids, most=st.integers(0, 9))
    def look(self, root: bytes, ids: list[int], most: int) -> None:
        before = list(self.tree.unlocked())
        pages = [node.page for node in self.tree.match(root, ids, min(most, len(ids)))]
        expected: list[int] = []
        for prefix in self.prefixes(root, ids[:most]):
            if prefix not in self.cached:
                break
            expected.append(self.cached[prefix])
        assert pages == expected
        assert list(self.tree.unlocked()) == before, "looking changed the order of eviction"

    def hold(self, path: list[Node], prefixes: list[Prefix]) -> Hold:
        hold = Hold(path, prefixes)
        self.living.append(hold)
        return hold

    def prefixes(self, root: bytes, ids: Sequence[int]) -> list[Prefix]:
        return [(root, tuple(ids[:end])) for end in range(PAGE, len(ids) + 1, PAGE)]

    def locked(self) -> set[Prefix]:
        return {prefix for hold in self.living for prefix in hold.prefixes}

    def oldest(self) -> Prefix | None:
        above = {(root, ids[:-PAGE]) for root, ids in self.cached}
        leaves = self.cached.keys() - above - self.locked()
        return min(leaves, key=lambda prefix: self.used[prefix], default=None)

    @invariant()
    def the_tree_is_the_dictionary(self) -> None:
        assert sorted(node.page for node in self.tree.nodes()) == sorted(self.cached.values())
        assert self.tree.num_pages == len(self.cached)
        assert self.tree.num_unlocked == len(self.cached.keys() - self.locked())
        assert {node.page for node in self.tree.unlocked()} == {
            self.cached[prefix] for prefix in self.cached.keys() - self.locked()
        }
        assert len(self.tree._roots) == len({root for root, _ in self.cached})


TestTree = TreeMachine.TestCase
TestTree.settings = steps(60)


class NewestFirst(RadixTree):
    def _join_ring(self, node: Node) -> None:
        ring, oldest = self._ring, self._ring.newer
        ring.newer = oldest.older = node
        node.older, node.newer = ring, oldest
        self.num_unlocked += 1


class ParentsFirst(RadixTree):
    def unlock(self, nodes: Sequence[Node]) -> None:
        super().unlock(list(nodes)[::-1])


class ForgetsALock(RadixTree):
    def insert(self, root: bytes, parent: Node | None, key: PageKey, page: int) -> tuple[Node, bool]:
        node, took = super().insert(root, parent, key, page)
        if not took and node.locks > 1:
            node.locks -= 1
        return node, took


class MatchesTooFar(RadixTree):
    def match(self, root: bytes, ids: Sequence[int], max_tokens: int) -> list[Node]:
        return super().match(root, ids, min(len(ids), max_tokens + 1))


class OneRoot(RadixTree):
    def match(self, root: bytes, ids: Sequence[int], max_tokens: int) -> list[Node]:
        return super().match(b"", ids, max_tokens)


class KeepsEmptyRoots(RadixTree):
    def evict(self, count: int) -> list[int]:
        before = dict(self._roots)
        pages = super().evict(count)
        self._roots.update(before)
        return pages


class LosesBrothers(RadixTree):
    def evict(self, count: int) -> list[int]:
        pages = super().evict(count)
        for root in self._roots.values():
            root.others = None
        return pages


@pytest.mark.parametrize(
    "broken",
    [
        NewestFirst,
        ParentsFirst,
        ForgetsALock,
        MatchesTooFar,
        OneRoot,
        KeepsEmptyRoots,
        LosesBrothers,
    ],
)
def test_a_broken_tree_is_caught(broken: Callable[..., RadixTree]) -> None:
    assert_machine_catches(type("Broken", (TreeMachine,), {"part": broken}))
