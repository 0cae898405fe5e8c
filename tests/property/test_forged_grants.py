"""What a grant says and what a commit shows, with one field forged at a time to anything: refused before memory is
touched or changes hands, and the honest one is taken after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.errors import AttemptError, StaleAttempt, TransferRefused
from triptych.core.grant import Grant, GroupRegions, Region
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.kv_format import KvDtype, PageFormat
from triptych.core.plan import Grid
from triptych.engine.landed_cache import Content
from triptych.engine.landing import LandingTable, Wanted
from triptych.kv.grants import GrantTable
from triptych.kv.manager import CacheManager
from triptych.kv.pages import PageLayout
from triptych.transport.carrier import MemoryCarrier, WriterEvents
from triptych.transport.data_frame import BadFrame, DataHeader, PayloadKind, pack, unpack
from triptych.transport.landings import Landing, LandingSession, SlotTarget
from triptych.transport.shm import SharedSegment
from triptych.transport.slots import SlotAllocator
from triptych.transport.types import SlotGrant

REF, WRITER = AttemptRef("req-1", 1, 2), WorkerRef("prefill-0", 11)
u64 = st.integers(0, 2**64 - 1)
capabilities = st.binary(min_size=16, max_size=16)
refs = st.builds(AttemptRef, st.sampled_from(["req-1", "req-2"]), st.integers(0, 2), st.integers(0, 3))
workers = st.builds(WorkerRef, st.sampled_from(["prefill-0", "prefill-1"]), st.integers(10, 12))


def one_forged(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[tuple[str, Any]]:
    """A field and another value for it, which may be the right one by chance."""
    return st.one_of(*(st.tuples(st.just(name), values) for name, values in fields.items()))


# --- embeddings -------------------------------------------------------------------------------------------------------


@given(
    one_forged(
        {
            "ref": refs,
            "item_index": st.integers(0, 3),
            "writer": workers,
            "slot_id": u64,
            "generation": u64,
            "capability": capabilities | st.binary(max_size=20),
        }
    )
)
def test_a_forged_commit_of_an_embedding_changes_nothing(forged: tuple[str, Any]) -> None:
    table = LandingTable(SlotAllocator(4096, 64))
    content = Content(b"i" * 32, 4, Grid(1, 4, 4))
    assert table.try_reserve(REF, {0: Wanted(content, 64), 1: Wanted(content._replace(identity=b"j" * 32), 64)})
    slot = table.hand(REF, 0, WRITER)
    honest: dict[str, Any] = {
        "ref": REF,
        "item_index": 0,
        "writer": WRITER,
        "slot_id": slot.slot_id,
        "generation": slot.generation,
        "capability": slot.capability,
    }
    name, value = forged
    before = table.counts_bytes()
    if honest[name] != value:
        with pytest.raises(AttemptError):
            table.check(**{**honest, name: value})
    assert table.counts_bytes() == before and table.rows(REF, 0) is None
    assert table.check(**honest) == slot


# --- KV ---------------------------------------------------------------------------------------------------------------


@given(
    one_forged({"ref": refs, "grant_id": st.text(max_size=30), "capability": capabilities}),
    one_forged(
        {
            "ref": refs,
            "grant_id": st.text(max_size=30),
            "generation": u64,
            "capability": capabilities,
            "writer": workers,
        }
    ),
)
def test_forged_bindings_and_commits_of_kv_change_nothing(binding: tuple[str, Any], commit: tuple[str, Any]) -> None:
    manager = CacheManager(20, 4)
    grants = GrantTable(WorkerRef("decode-0", 1), manager)
    record = grants.issue(REF, 12)
    honest: dict[str, Any] = {
        "ref": REF,
        "grant_id": record.grant_id,
        "capability": record.capability,
        "writer": WRITER,
    }
    _refused(grants.bind, honest, binding, manager)
    grants.bind(**honest)
    honest["generation"] = record.generation
    _refused(grants.commit, honest, commit, manager)
    pages = grants.commit(**honest)
    assert len(pages.pages) == record.num_pages and len(grants) == 0
    manager.check_integrity()


def _refused(
    action: Callable[..., object], honest: dict[str, Any], forged: tuple[str, Any], manager: CacheManager
) -> None:
    name, value = forged
    if honest[name] == value:
        return
    before = manager.counts()
    with pytest.raises((StaleAttempt, TransferRefused)):
        action(**{**honest, name: value})
    assert manager.counts() == before


# --- what a receiver grants, seen by the one who writes ---------------------------------------------------------------

GUARD = 64
EVENTS = WriterEvents(failed=lambda error: None, relieved=lambda: None)


@given(offset=st.integers(-(2**63), 2**64), num_bytes=st.integers(0, 2**64), size=st.integers(0, 96))
async def test_nothing_is_written_outside_of_the_mapped_arena(offset: int, num_bytes: int, size: int) -> None:
    """Wherever a grant points: the arena lies between two guards here."""
    memory = np.zeros(GUARD + 64 + GUARD, dtype=np.uint8)
    carrier = MemoryCarrier("shm", memoryview(memory)[GUARD : GUARD + 64])
    fits = num_bytes == size and 0 <= offset <= 64 - size
    grant = SlotGrant(1, offset, num_bytes, 1, b"c" * 16)
    if fits:
        await carrier.write_slot(grant, memoryview(b"x" * size))
        assert (memory[GUARD + offset : GUARD + offset + size] == ord("x")).all()
    else:
        with pytest.raises(TransferRefused):
            await carrier.write_slot(grant, memoryview(b"x" * size))
    assert int((memory != 0).sum()) == (size if fits else 0)


class _Source:
    layout = PageLayout(num_planes=2, cell_bytes=8, format=PageFormat(1, KvDtype.FLOAT32))


@given(st.lists(st.tuples(st.integers(-4, 2**40), st.integers(0, 6)), max_size=4))
def test_pages_that_the_pool_does_not_have_are_refused_before_any_is_written(runs: list[tuple[int, int]]) -> None:
    memory = np.zeros(GUARD + 4 * 2 * 8 + GUARD, dtype=np.uint8)
    carrier = MemoryCarrier("shm", memoryview(memory)[GUARD:-GUARD])
    regions = tuple(Region(start, count) for start, count in runs)
    grant = Grant("grant-1", "decode-0", 1, b"c" * 16, 4, 1, (GroupRegions(0, 0, regions),))
    pages = [start + n for start, count in runs for n in range(count)]
    if not pages or min(pages) < 0 or max(pages) >= 4:
        with pytest.raises(TransferRefused):
            carrier.page_writer(1, grant, _Source(), EVENTS)  # type: ignore[arg-type]
    else:
        carrier.page_writer(1, grant, _Source(), EVENTS)  # type: ignore[arg-type]
    assert not memory.any()


@given(st.text(max_size=40) | st.from_regex(r"triptych-[a-z]{1,16}-[0-9a-f]{16}", fullmatch=True), u64)
def test_a_forged_segment_is_never_mapped(name: str, num_bytes: int) -> None:
    with pytest.raises(TransferRefused):
        SharedSegment.open(name, num_bytes)


# --- data frames ------------------------------------------------------------------------------------------------------


@given(
    one_forged(
        {
            "kind": st.sampled_from(PayloadKind),
            "session_key": capabilities,
            "ticket": u64,
            "capability": capabilities,
            "generation": u64,
            "offset": u64,
            "length": st.integers(0, 2**32 - 1),
        }
    )
)
def test_a_data_frame_with_a_forged_field_writes_nothing(forged: tuple[str, Any]) -> None:
    """Sound in all else: it has the checksum of what it says."""
    memory = np.zeros(GUARD + 32 + GUARD, dtype=np.uint8)
    session = LandingSession(b"k" * 16)
    landing = Landing(PayloadKind.SLOT, b"c" * 16, 3, SlotTarget(memory[GUARD:-GUARD]))
    session.expect((REF, 0), 7, landing)
    honest = DataHeader(PayloadKind.SLOT, 11, b"k" * 16, 7, b"c" * 16, 3, 0, 32)
    payload = memoryview(b"x" * 32)
    header = replace(honest, **{forged[0]: forged[1]})
    if header != honest:
        with pytest.raises(BadFrame):
            session.take(unpack(memoryview(pack(header, payload)), payload), payload)
        assert not memory.any()
    session.take(unpack(memoryview(pack(honest, payload)), payload), payload)
    assert (memory[GUARD:-GUARD] == ord("x")).all() and int((memory != 0).sum()) == 32


# --- builds that must be found ----------------------------------------------------------------------------------------

BROKEN = {
    "capabilities are not compared": (
        "hmac.compare_digest",
        lambda shown, known: True,
        (
            test_a_forged_commit_of_an_embedding_changes_nothing,
            test_forged_bindings_and_commits_of_kv_change_nothing,
            test_a_data_frame_with_a_forged_field_writes_nothing,
        ),
    ),
    "pages are taken as they are named": (
        "triptych.transport.carrier.granted_pages",
        lambda grant, num_pages: [page for group in grant.groups for page in group.pages],
        (test_pages_that_the_pool_does_not_have_are_refused_before_any_is_written,),
    ),
    "frames are landed wherever they say": (
        "triptych.transport.landings.Landing.take",
        lambda self, header, payload: self.target.write(0, np.frombuffer(payload, dtype=np.uint8)),
        (test_a_data_frame_with_a_forged_field_writes_nothing,),
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_build_that_looks_away_is_found(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, how, finders = BROKEN[broken]
    monkeypatch.setattr(place, how)
    for finder in finders:
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            finder()
