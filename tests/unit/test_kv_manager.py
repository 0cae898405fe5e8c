"""The cache manager and the grants: reservations, sharing, and pages that a peer may still write to."""

from __future__ import annotations

import pytest

from triptych.core.errors import NoRoom, RequestTooLarge, StaleAttempt, TransferRefused
from triptych.core.grant import Region
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.kv.allocator import PageAllocator
from triptych.kv.grants import GrantRecord, GrantTable
from triptych.kv.manager import CacheManager, SequencePages

PAGE = 4
ROOT = b""
REF = AttemptRef("req-1")
WRITER = WorkerRef("prefill-0", 11)
OTHER = WorkerRef("prefill-0", 12)  # the same name after a restart


def reserved(manager: CacheManager, ids: list[int], num_tokens: int, root: bytes = ROOT) -> SequencePages:
    pages = manager.reserve(root, ids, num_tokens)
    assert pages is not None
    return pages


def cache(manager: CacheManager, ids: list[int], root: bytes = ROOT) -> None:
    pages = reserved(manager, ids, len(ids), root)
    manager.share(pages, ids, len(ids))
    manager.release(pages)


# --- allocator --------------------------------------------------------------------------------------------------------


def test_the_reserved_page_is_never_handed_out() -> None:
    allocator = PageAllocator(6)
    assert allocator.num_usable == 5
    assert sorted(allocator.allocate(5)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("page", [0, -1, 6, 3])
def test_freeing_what_is_not_out_is_a_bug(page: int) -> None:
    with pytest.raises(AssertionError):
        PageAllocator(6).free([page])


def test_a_pool_of_the_reserved_page_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 1 page"):
        PageAllocator(1)


# --- manager ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_ids", "cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (14, 12), (20, 12)]
)
def test_the_last_token_is_never_taken_from_the_cache(num_ids: int, cached: int) -> None:
    """Its logits are needed, so its page is computed again even when all of it is cached."""
    manager = CacheManager(20, PAGE)
    cache(manager, list(range(12)))
    ids = list(range(num_ids))
    assert manager.match_tokens(ROOT, ids) == cached
    assert reserved(manager, ids, num_ids + 1).cached_tokens == cached


def test_a_reservation_is_all_or_nothing() -> None:
    manager = CacheManager(9, PAGE)
    cache(manager, list(range(8)))
    held = reserved(manager, [9] * 16, 16)
    before, order = manager.counts(), [node.page for node in manager.tree.unlocked()]
    assert manager.reserve(ROOT, list(range(8)), 28) is None
    assert manager.counts() == before
    assert [node.page for node in manager.tree.unlocked()] == order
    manager.release(held)
    assert manager.reserve(ROOT, list(range(8)), 28) is not None
    manager.check_integrity()


def test_the_prefix_that_a_reservation_shares_is_no_room_for_it() -> None:
    manager, ids = CacheManager(5, PAGE), list(range(8))
    cache(manager, ids)  # two pages cached, two free
    assert manager.reserve(ROOT, [*ids, 8], 20) is None
    assert reserved(manager, [*ids, 8], 16).cached_tokens == 8
    manager.check_integrity()


def test_two_sequences_that_compute_the_same_page_share_one_copy_later() -> None:
    manager, ids = CacheManager(20, PAGE), list(range(8))
    first, second = reserved(manager, ids, 9), reserved(manager, ids, 9)
    assert not set(first.pages) & set(second.pages)
    for sequence in (first, second):
        manager.share(sequence, ids, 8)
        manager.check_integrity()
    assert manager.counts()["cached"] == 2
    manager.release(first)
    manager.release(second)
    manager.check_integrity()
    assert manager.counts() == {"free": 17, "cached": 2, "owned": 0, "leased": 0, "quarantined": 0}
    assert [node.page for node in manager.tree.match(ROOT, ids, 8)] == first.pages[:2]


def test_a_partial_tail_stays_private() -> None:
    manager = CacheManager(20, PAGE)
    sequence = reserved(manager, list(range(7)), 7)
    manager.share(sequence, list(range(7)), 7)
    assert manager.counts()["cached"] == 1
    assert sequence.owned == {sequence.pages[1]}


def test_sharing_goes_on_where_it_stopped() -> None:
    manager, ids = CacheManager(20, PAGE), list(range(16))
    sequence = reserved(manager, ids, 16)
    for written in (3, 4, 5, 11, 16):
        manager.share(sequence, ids, written)
        assert len(sequence.path) == written // PAGE
        manager.check_integrity()


def test_releasing_twice_frees_once() -> None:
    manager = CacheManager(20, PAGE)
    sequence = reserved(manager, [1, 2], 2)
    manager.release(sequence)
    manager.release(sequence)
    manager.check_integrity()
    assert manager.counts()["free"] == 19


def test_salts_do_not_share() -> None:
    manager, ids = CacheManager(20, PAGE), list(range(9))
    cache(manager, ids, b"tenant a")
    assert manager.match_tokens(b"tenant a", ids) == 8
    assert manager.match_tokens(b"tenant b", ids) == 0
    assert reserved(manager, ids, 9, b"tenant b").cached_tokens == 0


def test_a_promise_is_kept_against_later_reservations() -> None:
    manager = CacheManager(9, PAGE)
    assert manager.credit(6)
    assert not manager.credit(3)
    assert manager.reserve(ROOT, [1] * 9, 12) is None
    held = manager.reserve(ROOT, [1] * 8, 8)
    assert held is not None
    assert len(manager.bind_credit(6)) == 6
    manager.check_integrity()


def test_sharing_a_page_that_is_cached_already_never_eats_into_a_promise() -> None:
    """Another sequence cached the same page and left. Holding on to it would take a page that was promised."""
    manager, ids = CacheManager(4, PAGE), [1, 2, 3, 4]
    first, second = reserved(manager, ids, 4), reserved(manager, ids, 4)
    manager.share(first, ids, 4)
    manager.release(first)  # one cached page that may be evicted, one owned, one free
    assert manager.credit(2)
    manager.share(second, ids, 4)
    manager.check_integrity()
    assert len(manager.bind_credit(2)) == 2


def test_clearing_the_cache_leaves_what_is_held() -> None:
    manager, ids = CacheManager(20, PAGE), list(range(8))
    cache(manager, [9] * 8)
    sequence = reserved(manager, ids, 9)
    manager.share(sequence, ids, 8)
    assert manager.clear_cache() == 2
    assert manager.match_tokens(ROOT, [9] * 9) == 0
    assert manager.match_tokens(ROOT, [*ids, 8]) == 8
    manager.check_integrity()


# --- grants -----------------------------------------------------------------------------------------------------------


class Table:
    def __init__(self, num_pages: int = 9) -> None:
        self.manager = CacheManager(num_pages, PAGE)
        self.grants = GrantTable(WorkerRef("decode-0", 5), self.manager)

    def bound(self, num_tokens: int = 8, ref: AttemptRef = REF) -> tuple[str, int, bytes]:
        record = self.grants.issue(ref, num_tokens)
        self.grants.bind(ref, record.grant_id, record.capability, WRITER)
        return record.grant_id, record.generation, record.capability


def test_a_grant_is_a_credit_until_it_is_bound() -> None:
    table = Table()
    record = table.grants.issue(REF, 30)
    assert table.grants.grant_of(record).groups == ()
    assert table.manager.counts()["free"] == 8
    assert table.manager.num_available == 0
    table.grants.bind(REF, record.grant_id, record.capability, WRITER)
    grant = table.grants.grant_of(record)
    assert grant.groups[0].pages == record.pages
    assert grant.groups[0].regions == (Region(1, 8),)
    assert table.manager.counts()["leased"] == 8


def test_no_room_now_and_never_are_different_errors() -> None:
    table = Table()
    table.grants.issue(REF, 20)
    with pytest.raises(NoRoom):
        table.grants.issue(REF, 16)
    with pytest.raises(RequestTooLarge, match="max_tokens"):
        table.grants.issue(REF, 33)


def test_only_the_holder_binds_and_only_once() -> None:
    table = Table()
    record = table.grants.issue(REF, 8)
    later = AttemptRef("req-1", 0, 1)
    for ref, capability in (
        (AttemptRef("req-2"), record.capability),
        (REF, bytes(16)),
        (later, record.capability),
    ):
        with pytest.raises(TransferRefused):
            table.grants.bind(ref, record.grant_id, capability, WRITER)
    with pytest.raises(StaleAttempt):
        table.grants.bind(REF, "grant-unknown", record.capability, WRITER)
    table.grants.bind(REF, record.grant_id, record.capability, WRITER)
    with pytest.raises(TransferRefused):
        table.grants.bind(REF, record.grant_id, record.capability, WRITER)
    table.manager.check_integrity()


def test_a_commit_must_show_everything_and_a_refused_one_changes_nothing() -> None:
    table = Table()
    grant_id, generation, capability = table.bound()
    wrong: list[tuple[AttemptRef, int, bytes, WorkerRef]] = [
        (AttemptRef("req-2"), generation, capability, WRITER),
        (REF, generation + 1, capability, WRITER),
        (REF, generation, bytes(16), WRITER),
        (REF, generation, capability, OTHER),
    ]
    for ref, a_generation, a_capability, writer in wrong:
        with pytest.raises(TransferRefused):
            table.grants.commit(ref, grant_id, a_generation, a_capability, writer)
    pages = table.grants.commit(REF, grant_id, generation, capability, WRITER)
    assert pages.owned == set(pages.pages) == {1, 2}
    assert len(table.grants) == 0
    with pytest.raises(StaleAttempt):
        table.grants.commit(REF, grant_id, generation, capability, WRITER)


def test_a_credit_cannot_be_committed() -> None:
    table = Table()
    record = table.grants.issue(REF, 8)
    with pytest.raises(TransferRefused):
        table.grants.commit(REF, record.grant_id, record.generation, record.capability, WRITER)


def test_pages_that_a_peer_may_write_to_are_quarantined_until_it_is_done() -> None:
    table = Table()
    grant_id, generation, capability = table.bound()
    table.grants.release(grant_id)
    table.grants.release(grant_id)
    assert table.manager.counts()["quarantined"] == 2
    with pytest.raises(StaleAttempt):
        table.grants.commit(REF, grant_id, generation, capability, WRITER)
    table.grants.writer_finished(REF, grant_id, OTHER)
    table.grants.writer_finished(AttemptRef("req-2"), grant_id, WRITER)
    assert table.manager.counts()["quarantined"] == 2
    table.grants.writer_finished(REF, None, WRITER)
    assert table.manager.counts()["free"] == 8
    assert len(table.grants) == 0


def test_a_lost_writer_ends_what_it_owed_and_leaves_what_it_delivered() -> None:
    table = Table(20)
    delivered = table.bound(ref=AttemptRef("delivered"))
    table.grants.commit(AttemptRef("delivered"), *delivered, WRITER)
    table.bound(ref=AttemptRef("owed"))
    gone = table.bound(ref=AttemptRef("gone"))
    table.grants.release(gone[0])
    table.grants.issue(AttemptRef("credit"), 4)
    assert table.grants.writer_lost(OTHER) == []
    assert table.grants.writer_lost(WRITER) == [AttemptRef("owed")]
    assert table.manager.counts() == {"free": 17, "cached": 0, "owned": 2, "leased": 0, "quarantined": 0}
    assert len(table.grants) == 1


def test_a_writer_that_gives_up_frees_the_pages_and_a_later_release_frees_nothing_more() -> None:
    table = Table()
    grant_id, _, _ = table.bound()
    table.grants.writer_finished(REF, grant_id, WRITER)
    table.grants.release(grant_id)
    table.manager.check_integrity()
    assert table.manager.counts()["free"] == 8


def test_generations_and_capabilities_never_repeat() -> None:
    table = Table(200)
    records = [table.grants.issue(AttemptRef(str(number)), 4) for number in range(100)]
    assert len({record.generation for record in records}) == 100
    assert len({record.capability for record in records}) == 100
    assert all(len(record.capability) == 16 for record in records)


# --- grants over what is cached ---------------------------------------------------------------------------------------

PROMPT = list(range(10))


def held_grant(table: Table, num_tokens: int = 12) -> GrantRecord:
    """A grant for PROMPT, of which two pages are cached."""
    cache(table.manager, PROMPT[:8])
    record = table.grants.issue(REF, num_tokens, 0, ROOT, PROMPT)
    assert [node.page for node in record.path] == [1, 2] and record.num_pages == 1
    return record


def locked(manager: CacheManager) -> list[int]:
    return sorted(node.page for node in manager.tree.nodes() if node.locks)


def test_a_grant_covers_only_what_is_not_cached_and_keeps_the_rest_where_it_is() -> None:
    table = Table()
    record = held_grant(table)
    assert table.grants.grant_of(record).num_held_tokens == 0, "it is told with the pages"
    assert table.manager.num_available == 8 - 2 - 1
    assert table.manager.clear_cache() == 0
    table.grants.bind(REF, record.grant_id, record.capability, WRITER)
    grant = table.grants.grant_of(record)
    assert (grant.num_held_tokens, grant.groups[0].pages) == (8, [3])
    pages = table.grants.commit(REF, record.grant_id, record.generation, record.capability, WRITER)
    assert (pages.pages, pages.owned, pages.cached_tokens, pages.root) == ([1, 2, 3], {3}, 8, ROOT)
    table.manager.release(pages)
    assert locked(table.manager) == []
    assert table.manager.counts() == {"free": 6, "cached": 2, "owned": 0, "leased": 0, "quarantined": 0}


def test_the_last_token_is_written_although_its_page_is_cached() -> None:
    table = Table()
    cache(table.manager, PROMPT[:8])
    record = table.grants.issue(REF, 8, 0, ROOT, PROMPT[:8])
    assert (len(record.path), record.num_pages) == (1, 1)


def test_what_was_cached_meanwhile_is_held_from_the_binding_on() -> None:
    table = Table(5)
    record = table.grants.issue(REF, 12, 0, ROOT, PROMPT)
    assert record.num_pages == 3
    cache(table.manager, PROMPT[:4])
    assert table.manager.num_available == 1
    table.grants.bind(REF, record.grant_id, record.capability, WRITER)
    assert (table.grants.grant_of(record).num_held_tokens, len(record.pages)) == (4, 2)
    assert table.manager.num_available == 1, "nobody else has less room than before"
    table.manager.check_integrity()


def test_another_tenants_pages_are_not_held() -> None:
    table = Table(20)
    cache(table.manager, PROMPT[:8], b"tenant a")
    assert table.grants.issue(REF, 12, 0, b"tenant b", PROMPT).path == []


@pytest.mark.parametrize("is_bound", [False, True])
@pytest.mark.parametrize(
    "ending", ["release", "finished", "lost", "release, finished", "finished, release", "lost, release"]
)
def test_what_a_grant_held_is_given_back_once_however_it_ends(is_bound: bool, ending: str) -> None:
    """Somebody else holds the same pages all the while: one lock too few would be his."""
    table = Table(20)
    record = held_grant(table)
    other = reserved(table.manager, PROMPT, 12)
    if is_bound:
        table.grants.bind(REF, record.grant_id, record.capability, WRITER)
    for event in ending.split(", "):
        match event:
            case "release":
                table.grants.release(record.grant_id)
            case "finished":
                table.grants.writer_finished(REF, None, WRITER)
            case "lost":
                table.grants.writer_lost(WRITER)
    is_over = is_bound or "release" in ending
    assert [node.locks for node in table.manager.tree.nodes()] == [1 if is_over else 2] * 2
    table.grants.release(record.grant_id)
    table.grants.writer_lost(WRITER)
    assert [node.locks for node in table.manager.tree.nodes()] == [1, 1]
    table.manager.release(other)
    assert table.manager.num_available == table.manager.num_usable
    table.manager.check_integrity()


def test_a_refused_commit_keeps_what_is_held() -> None:
    table = Table()
    record = held_grant(table)
    table.grants.bind(REF, record.grant_id, record.capability, WRITER)
    with pytest.raises(TransferRefused):
        table.grants.commit(REF, record.grant_id, record.generation + 1, record.capability, WRITER)
    assert locked(table.manager) == [1, 2]
    assert table.grants.num_held_pages(record.grant_id) == 2
    table.grants.commit(REF, record.grant_id, record.generation, record.capability, WRITER)
    assert table.grants.num_held_pages(record.grant_id) is None
