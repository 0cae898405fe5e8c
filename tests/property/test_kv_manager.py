"""Every order of events over one pool, against a model that keeps plain sets and a dictionary of prefixes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from tests.property.promises import assert_machine_catches
from triptych.core.errors import NoRoom, RequestTooLarge, StaleAttempt, TransferRefused
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.kv.grants import GrantRecord, GrantState, GrantTable
from triptych.kv.manager import CacheManager, SequencePages
from triptych.kv.radix import Node

PAGE = 2
NUM_PAGES = 9
USABLE = NUM_PAGES - 1
WRITERS = (WorkerRef("prefill-0", 1), WorkerRef("prefill-1", 2))

Prefix = tuple[bytes, tuple[int, ...]]
"""A root and all ids from the start to the end of a page: what that page's content depends on."""


@dataclass(eq=False)
class Held:
    pages: SequencePages
    ids: list[int]
    num_tokens: int
    num_shared: int = 0
    holds: set[Prefix] = field(default_factory=set)


@dataclass(eq=False)
class Granted:
    """What was asked for with a grant, and what of it was cached."""

    root: bytes
    ids: list[int]
    num_tokens: int
    holds: set[Prefix]


class PoolMachine(RuleBasedStateMachine):
    part: type[CacheManager] = CacheManager
    granting: type[GrantTable] = GrantTable
    sequences: Bundle[Held] = Bundle("sequences")
    grants: Bundle[GrantRecord] = Bundle("grants")

    def __init__(self) -> None:
        super().__init__()
        self.manager = self.part(NUM_PAGES, PAGE)
        self.table = self.granting(WorkerRef("decode-0", 3), self.manager)
        self.cached: dict[Prefix, int] = {}
        self.living: list[Held] = []
        self.records: list[GrantRecord] = []
        self.granted: dict[str, Granted] = {}  # those that hold what is cached, by the id of the grant
        self.serial = 0

    # --- sequences ---

    @rule(
        target=sequences,
        root=st.sampled_from([b"", b"", b"", b"salt"]),
        common=st.integers(1, 8),
        own=st.integers(0, 3),
        room=st.integers(0, 12),
    )
    def reserve(self, root: bytes, common: int, own: int, room: int) -> object:
        ids = [0] * common + [1] * own  # many sequences begin alike
        expected = self.known_prefix(root, ids)
        assert self.manager.match_tokens(root, ids) == len(expected) * PAGE
        num_tokens = len(ids) + room
        before = self.picture()
        pages = self.manager.reserve(root, ids, num_tokens)
        if pages is None:
            assert self.picture() == before
            assert not self.would_fit(root, ids, num_tokens, expected)
            return multiple()
        assert self.would_fit(root, ids, num_tokens, expected)
        assert pages.pages[: len(expected)] == expected
        assert pages.cached_tokens == len(expected) * PAGE
        assert len(pages.pages) == -(-num_tokens // PAGE)
        self.forget_evicted()
        fresh = pages.pages[len(expected) :]
        assert pages.owned == set(fresh)
        assert not set(fresh) & (self.pages_in_hands() | set(self.cached.values()))
        held = Held(pages, [*ids, *range(5, 5 + room)], num_tokens, len(expected))
        held.holds = {self.prefix(root, ids, index) for index in range(len(expected))}
        self.living.append(held)
        return held

    @rule(held=sequences, tokens=st.integers(0, 16))
    def share(self, held: Held, tokens: int) -> None:
        if held not in self.living:
            return
        written = min(tokens, held.num_tokens)
        self.manager.share(held.pages, held.ids, written)
        for index in range(held.num_shared, len(held.pages.path)):
            prefix = self.prefix(held.pages.root, held.ids, index)
            self.cached.setdefault(prefix, held.pages.pages[index])
            held.holds.add(prefix)
        if len(held.pages.path) < written // PAGE:  # the only reason to stop early: nothing is left but promises
            assert self.manager.num_available == 0
        held.num_shared = len(held.pages.path)

    @rule(held=sequences, tokens=st.integers(0, 18))
    def extend(self, held: Held, tokens: int) -> None:
        if held not in self.living:
            return
        needed = -(-tokens // PAGE) - len(held.pages.pages)
        before, available, had = self.picture(), self.num_available(), list(held.pages.pages)
        taken = self.pages_in_hands()
        if not self.manager.extend(held.pages, tokens):
            assert needed > available
            assert self.picture() == before and held.pages.pages == had
            return
        assert needed <= available
        self.forget_evicted()
        fresh = held.pages.pages[len(had) :]
        assert len(fresh) == max(needed, 0) and held.pages.pages[: len(had)] == had
        assert not set(fresh) & (taken | set(self.cached.values()))
        held.ids += range(1000 + len(held.ids), 1000 + tokens)
        held.num_tokens = max(held.num_tokens, tokens)

    @rule(held=consumes(sequences))
    def finish(self, held: Held) -> None:
        self.share(held, held.num_tokens)
        self.release(held)

    @rule(held=consumes(sequences))
    def release(self, held: Held) -> None:
        self.manager.release(held.pages)
        self.living.remove(held)

    @rule()
    def clear_cache(self) -> None:
        locked = self.locked()
        assert self.manager.clear_cache() == len(self.cached.keys() - locked)
        self.forget_evicted()
        assert self.cached.keys() == locked

    # --- grants ---

    @rule(
        target=grants,
        root=st.sampled_from([b"", b"", b"", b"salt"]),
        common=st.integers(1, 8),
        own=st.integers(0, 3),
        room=st.integers(0, 7),
    )
    def issue(self, root: bytes, common: int, own: int, room: int) -> object:
        self.serial += 1
        ids = [0] * common + [1] * own
        num_tokens = len(ids) + room
        num_pages = -(-num_tokens // PAGE)
        expected, before = self.known_prefix(root, ids), self.picture()
        fits = self.would_fit(root, ids, num_tokens, expected)
        try:
            record = self.table.issue(AttemptRef(f"req-{self.serial}"), num_tokens, 0, root, ids)
        except RequestTooLarge:
            assert num_pages > USABLE and self.picture() == before
            return multiple()
        except NoRoom:
            assert not fits and num_pages <= USABLE and self.picture() == before
            return multiple()
        assert fits
        assert [node.page for node in record.path] == expected and record.num_pages == num_pages - len(expected)
        self.records.append(record)
        holds = {self.prefix(root, ids, index) for index in range(len(expected))}
        self.granted[record.grant_id] = Granted(root, ids, num_tokens, holds)
        return record

    @rule(record=grants, writer=st.sampled_from(WRITERS))
    def bind(self, record: GrantRecord, writer: WorkerRef) -> None:
        state = self.state_of(record)
        if state is not GrantState.CREDITED:
            with pytest.raises((StaleAttempt, TransferRefused)):
                self.table.bind(record.ref, record.grant_id, record.capability, writer)
            return
        taken, asked = self.pages_in_hands(), self.granted[record.grant_id]
        expected = self.known_prefix(asked.root, asked.ids)
        self.table.bind(record.ref, record.grant_id, record.capability, writer)
        asked.holds = {self.prefix(asked.root, asked.ids, index) for index in range(len(expected))}
        self.forget_evicted()
        assert [node.page for node in record.path] == expected
        assert self.table.grant_of(record).num_held_tokens == len(expected) * PAGE
        assert len(set(record.pages)) == record.num_pages == -(-asked.num_tokens // PAGE) - len(expected)
        assert not set(record.pages) & (taken | set(self.cached.values()))

    @rule(target=sequences, record=grants, writer=st.sampled_from(WRITERS), generation=st.sampled_from([0, 0, 0, 1]))
    def commit(self, record: GrantRecord, writer: WorkerRef, generation: int) -> object:
        is_due = self.state_of(record) is GrantState.BOUND and record.writer == writer and generation == 0
        arguments = (record.ref, record.grant_id, record.generation + generation, record.capability, writer)
        if is_due:
            asked = self.granted.pop(record.grant_id)
            pages = self.table.commit(*arguments)
            cached = [self.cached[self.prefix(asked.root, asked.ids, index)] for index in range(len(asked.holds))]
            assert pages.pages == cached + record.pages and pages.owned == set(record.pages)
            assert pages.root == asked.root and pages.cached_tokens == len(cached) * PAGE
            self.records.remove(record)
            num_tokens = len(pages.pages) * PAGE
            ids = [*asked.ids, *range(5, 5 + num_tokens - len(asked.ids))]
            held = Held(pages, ids, num_tokens, len(cached), asked.holds)
            self.living.append(held)
            return held
        else:
            with pytest.raises((StaleAttempt, TransferRefused)):
                self.table.commit(*arguments)
        return multiple()

    @rule(record=grants)
    def release_grant(self, record: GrantRecord) -> None:
        state = self.state_of(record)
        self.table.release(record.grant_id)
        self.granted.pop(record.grant_id, None)
        if state is GrantState.CREDITED:
            self.records.remove(record)
        elif state is GrantState.BOUND:
            assert record.state is GrantState.QUARANTINED

    @rule(record=grants, writer=st.sampled_from(WRITERS), is_named=st.booleans())
    def writer_finished(self, record: GrantRecord, writer: WorkerRef, is_named: bool) -> None:
        ends = self.state_of(record) in (GrantState.BOUND, GrantState.QUARANTINED) and record.writer == writer
        self.table.writer_finished(record.ref, record.grant_id if is_named else None, writer)
        if ends:
            self.records.remove(record)
            self.granted.pop(record.grant_id, None)

    @rule(writer=st.sampled_from(WRITERS))
    def writer_lost(self, writer: WorkerRef) -> None:
        owing = [
            r for r in self.records if r.writer == writer and r.state in (GrantState.BOUND, GrantState.QUARANTINED)
        ]
        expected = {record.ref for record in owing if record.state is GrantState.BOUND}
        assert set(self.table.writer_lost(writer)) == expected
        self.records = [record for record in self.records if record not in owing]
        for record in owing:
            self.granted.pop(record.grant_id, None)

    # --- the model ---

    def prefix(self, root: bytes, ids: list[int], index: int) -> Prefix:
        return root, tuple(ids[: (index + 1) * PAGE])

    def known_prefix(self, root: bytes, ids: list[int]) -> list[int]:
        """Pages of the longest cached prefix that leaves at least one token to compute."""
        pages: list[int] = []
        for index in range((len(ids) - 1) // PAGE):
            page = self.cached.get(self.prefix(root, ids, index))
            if page is None:
                break
            pages.append(page)
        return pages

    def would_fit(self, root: bytes, ids: list[int], num_tokens: int, cached: list[int]) -> bool:
        locked = self.locked()
        own = {self.prefix(root, ids, index) for index in range(len(cached))}
        evictable = len(self.cached.keys() - locked - own)
        needed = -(-num_tokens // PAGE) - len(cached)
        return needed <= USABLE - len(self.pages_in_hands()) - len(self.cached) + evictable - self.num_credited()

    def locked(self) -> set[Prefix]:
        holders = [*self.living, *self.granted.values()]
        return {prefix for holder in holders for prefix in holder.holds}

    def num_credited(self) -> int:
        return sum(record.num_pages for record in self.records if record.state is GrantState.CREDITED)

    def num_available(self) -> int:
        locked = self.locked()
        free = USABLE - len(self.pages_in_hands()) - len(self.cached)
        return free + len(self.cached.keys() - locked) - self.num_credited()

    def state_of(self, record: GrantRecord) -> GrantState | None:
        return record.state if record in self.records else None

    def pages_in_hands(self) -> set[int]:
        """Owned, leased and quarantined."""
        pages = {page for held in self.living for page in held.pages.owned}
        return pages | {page for record in self.records for page in record.pages}

    def forget_evicted(self) -> None:
        """What the tree let go; nothing that is held may be among it, nor a page with a cached one behind it."""
        present = {node.page for node in self.manager.tree.nodes()}
        evicted = {prefix for prefix, page in self.cached.items() if page not in present}
        assert not evicted & self.locked()
        self.cached = {prefix: page for prefix, page in self.cached.items() if page in present}
        for root, ids in self.cached:
            assert len(ids) == PAGE or (root, ids[:-PAGE]) in self.cached

    def picture(self) -> object:
        nodes = sorted((node.page, node.locks) for node in self.manager.tree.nodes())
        order = [node.page for node in self.manager.tree.unlocked()]
        return self.manager.counts(), nodes, order, self.manager.num_available

    # --- what always holds ---

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        self.manager.check_integrity()
        assert sum(self.manager.counts().values()) == USABLE
        in_hands = [page for held in self.living for page in held.pages.owned]
        in_hands += [page for record in self.records for page in record.pages]
        everywhere = [*in_hands, *self.cached.values()]
        assert len(everywhere) == len(set(everywhere))
        assert 0 not in everywhere

    @invariant()
    def the_tree_is_the_dictionary(self) -> None:
        assert {node.page for node in self.manager.tree.nodes()} == set(self.cached.values())

    @invariant()
    def counts_are_those_of_the_model(self) -> None:
        by_state = {state: sum(len(r.pages) for r in self.records if r.state is state) for state in GrantState}
        counts = self.manager.counts()
        assert counts["owned"] == sum(len(held.pages.owned) for held in self.living)
        assert counts["leased"] == by_state[GrantState.BOUND]
        assert counts["quarantined"] == by_state[GrantState.QUARANTINED]
        assert len(self.table) == len(self.records)

    @invariant()
    def what_is_held_is_locked_as_often_as_it_is_held(self) -> None:
        holders = [*self.living, *self.granted.values()]
        expected = Counter(self.cached[prefix] for holder in holders for prefix in holder.holds)
        assert {node.page: node.locks for node in self.manager.tree.nodes() if node.locks} == expected

    @invariant()
    def promises_can_be_kept(self) -> None:
        assert self.manager.num_available == self.num_available() >= 0

    def teardown(self) -> None:
        """When everybody has left, every page is free or cached."""
        for held in self.living:
            self.manager.release(held.pages)
        for record in self.records:
            self.table.release(record.grant_id)
        for writer in WRITERS:
            self.table.writer_lost(writer)
        self.manager.clear_cache()
        assert self.manager.counts() == {"free": USABLE, "cached": 0, "owned": 0, "leased": 0, "quarantined": 0}


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


class ForgetsAPage(CacheManager):
    def release(self, sequence: SequencePages) -> None:
        if len(sequence.owned) > 1:
            sequence.owned.remove(max(sequence.owned))
            self._num_owned -= 1
        super().release(sequence)


class LocksTwice(CacheManager):
    def reserve(self, root: bytes, ids: Sequence[int], num_tokens: int, spare_pages: int = 0) -> SequencePages | None:
        pages = super().reserve(root, ids, num_tokens, spare_pages)
        if pages is not None:
            self.tree.lock(pages.path)
        return pages


class EvictsTheLocked(CacheManager):
    def _take(self, count: int) -> list[int]:
        locked = [node for node in self.tree.nodes() if node.locks and node.first is None]
        if count > self._allocator.num_free and locked:
            self.tree._remove(locked[0])
            self._allocator.free([locked[0].page])
        return super()._take(count)


class LocksAfterTaking(CacheManager):
    """What makes room for a sequence may be its own prefix."""

    def reserve(self, root: bytes, ids: Sequence[int], num_tokens: int, spare_pages: int = 0) -> SequencePages | None:
        path = self.tree.match(root, ids, len(ids) - 1)
        if not self._has_room([], num_tokens - len(path) * self.page_tokens, spare_pages):
            return None
        needed = self.pages_for(num_tokens) - len(path)
        fresh = self._take(needed)
        self.tree.lock([node for node in path if node.parent is not None])
        self._num_owned += needed
        cached_tokens = len(path) * self.page_tokens
        return SequencePages(root, [node.page for node in path] + fresh, path, set(fresh), cached_tokens)


class EndsQuarantineEarly(CacheManager):
    def quarantine_leased(self, pages: Sequence[int]) -> None:
        super().quarantine_leased(pages)
        super().free_quarantined(pages)

    def free_quarantined(self, pages: Sequence[int]) -> None:
        return


class LosesWhatItExtends(CacheManager):
    def extend(self, sequence: SequencePages, num_tokens: int) -> bool:
        before = len(sequence.pages)
        if not super().extend(sequence, num_tokens):
            return False
        if len(sequence.pages) > before:
            sequence.owned.remove(sequence.pages.pop())
        return True


class BreaksPromises(CacheManager):
    """Gives away what credits have been promised."""

    @property
    def num_available(self) -> int:
        return self._allocator.num_free + self.tree.num_unlocked


class CountsThePathAsRoom(CacheManager):
    def offer(self, root: bytes, ids: Sequence[int], num_tokens: int, spare_pages: int = 0) -> int | None:
        return self.match_tokens(root, ids)

    def _has_room(self, path: Sequence[Node], num_tokens: int, spare_pages: int) -> bool:
        return super()._has_room([], num_tokens - len(path) * self.page_tokens, spare_pages)


class SharesAndKeeps(CacheManager):
    """A page that the tree took stays the sequence's own, too."""

    def share(self, sequence: SequencePages, ids: Sequence[int], num_written: int) -> None:
        own, count = set(sequence.owned), self._num_owned
        super().share(sequence, ids, num_written)
        sequence.owned, self._num_owned = own, count


@pytest.mark.parametrize(
    "broken",
    [
        ForgetsAPage,
        LocksTwice,
        EvictsTheLocked,
        LocksAfterTaking,
        EndsQuarantineEarly,
        LosesWhatItExtends,
        BreaksPromises,
        CountsThePathAsRoom,
        SharesAndKeeps,
    ],
)
def test_a_broken_manager_is_caught(broken: type[CacheManager]) -> None:
    assert_machine_catches(type("Broken", (PoolMachine,), {"part": broken}))


class KeepsWhatItHeld(GrantTable):
    def _let_go(self, record: GrantRecord) -> None:
        record.path = []


class GivesBackTwice(GrantTable):
    def _let_go(self, record: GrantRecord) -> None:
        held = record.path
        super()._let_go(record)
        self._manager.let_go(held)


class HoldsWithoutALock(CacheManager):
    def hold(self, root: bytes, ids: Sequence[int], num_tokens: int, spare_pages: int = 0) -> list[Node] | None:
        path = super().hold(root, ids, num_tokens, spare_pages)
        if path is not None:
            self.let_go(path)
        return path


class HoldsTheLastToken(CacheManager):
    """Then nothing of the prompt is left to be written."""

    def hold(self, root: bytes, ids: Sequence[int], num_tokens: int, spare_pages: int = 0) -> list[Node] | None:
        return super().hold(root, [*ids, 0], num_tokens, spare_pages)


class ForgetsThePromiseOfWhatItHolds(CacheManager):
    def hold_more(self, root: bytes, ids: Sequence[int], path: list[Node]) -> int:
        more = super().hold_more(root, ids, path)
        self._num_credited += more
        return more


@pytest.mark.parametrize("broken", [KeepsWhatItHeld, GivesBackTwice])
def test_a_broken_table_of_grants_is_caught(broken: type[GrantTable]) -> None:
    assert_machine_catches(type("Broken", (PoolMachine,), {"granting": broken}))


@pytest.mark.parametrize("broken", [HoldsWithoutALock, HoldsTheLastToken, ForgetsThePromiseOfWhatItHolds])
def test_a_manager_that_holds_wrongly_is_caught(broken: type[CacheManager]) -> None:
    assert_machine_catches(type("Broken", (PoolMachine,), {"part": broken}))
