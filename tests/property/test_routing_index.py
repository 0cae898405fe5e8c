"""The router's index against the radix tree itself, over any interleaving of caching, evicting, losses of messages,
restarts and resyncs; the rendezvous hash against what it promises."""

from __future__ import annotations

import itertools
from collections import Counter, deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.router.routing.index import Applied, CacheIndex
from services.router.routing.rendezvous import EncoderLoad, bound_patches, choose_encoder, in_order
from tests.property.promises import assert_machine_catches, steps
from triptych.core.cache_feed import FeedKind, FeedMessage, Holding, WorkerLoad
from triptych.core.ids import WorkerRef
from triptych.kv.journal import Journal
from triptych.kv.page_chain import page_numbers
from triptych.kv.radix import RadixTree

PAGE = 2
ids = st.lists(st.integers(0, 1), max_size=9)
roots = st.sampled_from([b"", b"salt"])


class FeedMachine(RuleBasedStateMachine):
    """One worker with a real tree and journal, one router with an index, and a wire in between that loses, repeats and
    delays. The truth is what the tree matches."""

    part: type[CacheIndex] = CacheIndex

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0
        self.index = self.part()
        self.wire: deque[FeedMessage] = deque()
        self.wants_snapshot = True
        self.sent = 0
        self.begin()

    def begin(self) -> None:
        self.epoch += 1
        self.ref = WorkerRef("p-0", self.epoch)
        self.journal = Journal(self.epoch, max_batches=3)
        self.tree = RadixTree(PAGE, self.journal)
        self.pages = itertools.count()
        self.wants_snapshot = True

    # -- the worker ---------------------------------------------------------------------------------------------------

    @rule(root=roots, prompt=ids)
    def cache(self, root: bytes, prompt: list[int]) -> None:
        path = self.tree.match(root, prompt, len(prompt))
        self.tree.lock(path)
        for start in range(len(path) * PAGE, len(prompt) - PAGE + 1, PAGE):
            parent = path[-1] if path else None
            path.append(self.tree.insert(root, parent, self.tree.key(prompt, start), next(self.pages))[0])
        self.tree.unlock(path)

    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        self.tree.evict(count)

    @rule()
    def restart(self) -> None:
        """As another process on the same port; what is on the wire arrives late. The registry tells the router."""
        self.begin()
        self.index.keep([self.ref])

    # -- the feed -----------------------------------------------------------------------------------------------------

    @rule()
    def publish(self) -> None:
        """What the worker's publisher does: cut, and write what the listener has not had."""
        self.journal.cut(WorkerLoad())
        batches = None if self.wants_snapshot else self.journal.since(self.sent)
        self.wire.extend(self.journal.snapshot() if batches is None else batches)
        self.sent, self.wants_snapshot = self.journal.sequence, False

    @rule(count=st.integers(1, 5))
    def run_ahead(self, count: int) -> None:
        """The worker goes on while the listener is slow: its place in the journal may be gone then."""
        for number in range(count):
            self.tree.evict(1)
            self.journal.cut(WorkerLoad(waiting_tokens=number))

    @rule(count=st.integers(1, 3))
    def deliver(self, count: int) -> None:
        for message in [self.wire.popleft() for _ in range(min(count, len(self.wire)))]:
            if self.index.apply(self.ref, message) is Applied.GAP:
                self.wants_snapshot = True

    @rule(root=roots, prompt=ids, count=st.integers(0, 2), is_lost=st.booleans())
    def live(self, root: bytes, prompt: list[int], count: int, is_lost: bool) -> None:
        """What happens all the time, in one: so that searches come far."""
        self.cache(root, prompt)
        self.tree.evict(count)
        before = len(self.wire)
        self.publish()
        while is_lost and len(self.wire) > before:
            self.wire.pop()
        self.deliver(len(self.wire))

    @rule(place=st.integers(0, 2))
    def lose(self, place: int) -> None:
        if place < len(self.wire):
            del self.wire[place]

    @rule(place=st.integers(0, 2))
    def repeat(self, place: int) -> None:
        if place < len(self.wire):
            self.wire.append(self.wire[place])

    @rule()
    def reconnect(self) -> None:
        self.wire.clear()
        self.index.lost_feed(self.ref)
        self.wants_snapshot = True

    def settle(self) -> None:
        """Whatever happened: two rounds of publishing and delivering, and the index is right."""
        for _ in range(2):
            self.publish()
            self.deliver(len(self.wire) or 1)
            # The last message may have been lost with nothing after it: the stream's end is what tells then.
            if self.index.sequence(self.ref) != self.journal.sequence:
                self.wants_snapshot = True

    @rule(root=roots, prompt=ids)
    def ask(self, root: bytes, prompt: list[int]) -> None:
        self.settle()
        for asked in (prompt, prompt[:-1], [*prompt, 0, 1, 1, 0]):
            numbers = page_numbers(root, np.array(asked, dtype=np.int64), PAGE)
            truth = len(self.tree.match(root, asked, len(asked)))
            assert self.index.num_pages(self.ref, numbers) == truth
        assert self.index.num_entries(self.ref) == self.tree.num_pages

    @invariant()
    def is_bounded_and_knows_the_living_only(self) -> None:
        assert self.index.num_entries(WorkerRef("p-0", self.epoch - 1)) == 0
        if not self.index.is_synced(self.ref):
            assert self.index.num_entries(self.ref) == 0


FeedMachine.TestCase.settings = steps(60)
TestFeed = FeedMachine.TestCase


class TakesWhatComes(CacheIndex):
    """Broken: a gap is not noticed."""

    def apply(self, worker: WorkerRef, message: FeedMessage) -> Applied:
        account = self._accounts.get(worker)
        if account is not None and account.sequence is not None and message.kind is FeedKind.DELTA:
            account.sequence = message.sequence - 1
        return super().apply(worker, message)


class KeepsTheDead(CacheIndex):
    """Broken: a snapshot adds to what was there."""

    def apply(self, worker: WorkerRef, message: FeedMessage) -> Applied:
        account = self._accounts.get(worker)
        before = {holding: set(numbers) for holding, numbers in account.held.items()} if account else {}
        applied = super().apply(worker, message)
        for holding, numbers in before.items() if message.kind is FeedKind.SNAPSHOT else ():
            self._accounts[worker].held[holding] |= numbers
        return applied


@pytest.mark.parametrize("broken", [TakesWhatComes, KeepsTheDead])
def test_a_broken_index_is_caught(broken: type[CacheIndex]) -> None:
    assert_machine_catches(type("Broken", (FeedMachine,), {"part": broken}))


@given(st.lists(st.tuples(st.sampled_from(list(Holding)), st.integers(0, 30), st.booleans()), max_size=60))
def test_one_worker_takes_no_more_than_its_bound(changes: list[tuple[Holding, int, bool]]) -> None:
    index, ref, journal = CacheIndex(max_entries=5), WorkerRef("p-0", 1), Journal(1)
    for holding, number, is_there in changes:
        (journal.stored if is_there else journal.removed)(holding, number)
        if number % 3 == 0:
            journal.cut(WorkerLoad())
            for message in (
                journal.snapshot() if not index.is_synced(ref) else journal.since(index.sequence(ref) or 0) or []
            ):
                assert index.apply(ref, message) is Applied.DONE
        assert index.num_entries(ref) <= 5


# --- rendezvous -------------------------------------------------------------------------------------------------------

names = st.lists(st.text("abcdef", min_size=1, max_size=4), min_size=1, max_size=6, unique=True)
pictures = st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=40, unique=True)


def idle(workers: list[str]) -> list[EncoderLoad]:
    return [EncoderLoad(name, 0, 1e6) for name in workers]


def homes(found: list[bytes], workers: list[str]) -> dict[bytes, str]:
    return {one: workers[choose_encoder(one, 10, idle(workers))] for one in found}


@settings(deadline=None)
@given(pictures, names, st.data())
def test_when_an_encoder_leaves_or_comes_only_its_own_pictures_move(
    found: list[bytes], workers: list[str], data: st.DataObject
) -> None:
    before = homes(found, workers)
    leaving = data.draw(st.sampled_from(workers))
    others = [name for name in workers if name != leaving]
    if others:
        after = homes(found, others)
        assert all(after[one] == before[one] for one in found if before[one] != leaving)
    shuffled = data.draw(st.permutations(workers))
    assert homes(found, shuffled) == before, "the order in which encoders are listed says nothing"


def test_pictures_are_spread_evenly() -> None:
    found = [number.to_bytes(32, "big") for number in range(3000)]
    counts = Counter(homes(found, ["e-0", "e-1", "e-2"]).values())
    assert all(900 < count < 1100 for count in counts.values()), counts


loads = st.lists(st.tuples(st.integers(0, 10**6), st.floats(1e2, 1e6)), min_size=1, max_size=6)


@settings(deadline=None)
@given(st.binary(min_size=32, max_size=32), st.integers(1, 10**5), loads)
def test_the_load_is_bounded(identity: bytes, num_patches: int, waiting: list[tuple[int, float]]) -> None:
    """Nobody gets a picture beyond his bound while another would stay within; the first within it in order does."""
    encoders = [EncoderLoad(f"e-{number}", patches, rate) for number, (patches, rate) in enumerate(waiting)]
    total = sum(encoder.waiting_patches for encoder in encoders)

    def fits(encoder: EncoderLoad) -> bool:
        bound = bound_patches(encoder, num_patches, total, len(encoders))
        return encoder.waiting_patches + num_patches <= bound

    chosen = choose_encoder(identity, num_patches, encoders)
    within = [index for index in in_order(identity, encoders) if fits(encoders[index])]
    if within:
        assert chosen == within[0]
    else:
        assert encoders[chosen].waiting_patches == min(encoder.waiting_patches for encoder in encoders)


@settings(deadline=None)
@given(pictures, names)
def test_a_flood_is_shared_out_within_the_bound(found: list[bytes], workers: list[str]) -> None:
    """However the hashes fall, no encoder has more than its bound when all have been given out."""
    num_patches, waiting = 1000, dict.fromkeys(workers, 0.0)
    for one in found:
        encoders = [EncoderLoad(name, waiting[name], 1.0) for name in workers]
        waiting[workers[choose_encoder(one, num_patches, encoders)]] += num_patches
    even = sum(waiting.values()) / len(workers)
    assert max(waiting.values()) <= max(1.25 * even, even + num_patches) + 1
