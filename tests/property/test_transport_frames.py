"""Data frames under arbitrary damage: what lands is exactly what was sent for an open grant, or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.core.errors import Aborted, TransferRefused
from triptych.core.ids import AttemptRef
from triptych.transport.data_frame import (
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    BadFrame,
    DataHeader,
    PayloadKind,
    pack,
    unpack,
)
from triptych.transport.landings import Landing, LandingSession, PagesTarget, SlotTarget
from triptych.transport.pages import scatter

ByteArray = npt.NDArray[np.uint8]
KEY, CAPABILITY = b"k" * 16, b"c" * 16
REF = AttemptRef("req-1")
TICKET, GENERATION, SESSION = 7, 3, 11

headers = st.builds(
    DataHeader,
    kind=st.sampled_from(PayloadKind),
    session=st.integers(0, 2**64 - 1),
    session_key=st.binary(min_size=16, max_size=16),
    ticket=st.integers(0, 2**64 - 1),
    capability=st.binary(min_size=16, max_size=16),
    generation=st.integers(0, 2**64 - 1),
    offset=st.integers(0, 2**64 - 1),
    length=st.just(0),
)
payloads = st.binary(min_size=1, max_size=200)


def packed(header: DataHeader, payload: bytes) -> bytes:
    return pack(replace(header, length=len(payload)), memoryview(payload))


@given(headers, payloads)
def test_a_header_comes_back_as_it_was(header: DataHeader, payload: bytes) -> None:
    raw = packed(header, payload)
    assert len(raw) == HEADER_BYTES
    assert unpack(memoryview(raw), memoryview(payload)) == replace(header, length=len(payload))


@given(headers, payloads, st.data())
def test_any_changed_byte_is_noticed(header: DataHeader, payload: bytes, data: st.DataObject) -> None:
    whole = bytearray(packed(header, payload) + payload)
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(BadFrame):
        unpack(memoryview(whole)[:HEADER_BYTES], memoryview(whole)[HEADER_BYTES:])


@given(headers, payloads)
def test_a_frame_that_is_cut_anywhere_is_no_frame(header: DataHeader, payload: bytes) -> None:
    whole = packed(header, payload) + payload
    for end in range(len(whole)):
        with pytest.raises(BadFrame):
            unpack(memoryview(whole)[: min(end, HEADER_BYTES)], memoryview(whole)[HEADER_BYTES:end])


@given(st.binary(max_size=HEADER_BYTES + 9), st.binary(max_size=9))
def test_noise_is_never_a_frame(raw: bytes, payload: bytes) -> None:
    with pytest.raises(BadFrame):
        unpack(memoryview(raw), memoryview(payload))


def test_a_payload_of_another_length_is_refused() -> None:
    header = DataHeader(PayloadKind.SLOT, 1, KEY, 1, CAPABILITY, 1, 0, 0)
    for length, payload in ((0, b""), (4, b"abc"), (MAX_PAYLOAD_BYTES + 1, bytes(MAX_PAYLOAD_BYTES + 1))):
        raw = pack(replace(header, length=length), memoryview(payload))
        with pytest.raises(BadFrame, match="malformed"):
            unpack(memoryview(raw), memoryview(payload))


# --- pages ------------------------------------------------------------------------------------------------------------


@st.composite
def page_streams(draw: st.DrawFn) -> tuple[tuple[int, int, int], list[int], bytes, list[int]]:
    """Shape of a pool, the grant's pages, the stream's bytes, and where it is cut."""
    num_planes, num_pages, cell_bytes = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 9))
    pages = draw(st.lists(st.integers(0, num_pages - 1), min_size=1, max_size=num_pages, unique=True))
    size = len(pages) * num_planes * cell_bytes
    stream = draw(st.binary(min_size=size, max_size=size))
    cuts = sorted(draw(st.sets(st.integers(1, size), max_size=5)) | {size})
    return (num_planes, num_pages, cell_bytes), pages, stream, cuts


def naive_pool(shape: tuple[int, int, int], pages: Sequence[int], stream: bytes) -> ByteArray:
    """Byte by byte, from the definition of the stream."""
    pool = np.full(shape, 0xEE, dtype=np.uint8)
    rest = iter(stream)
    for page in pages:
        for plane in range(shape[0]):
            for byte in range(shape[2]):
                pool[plane, page, byte] = next(rest)
    return pool


@given(page_streams())
def test_a_page_stream_cut_anywhere_finds_its_cells(
    case: tuple[tuple[int, int, int], list[int], bytes, list[int]],
) -> None:
    shape, pages, stream, cuts = case
    pool = np.full(shape, 0xEE, dtype=np.uint8)
    start = 0
    for end in cuts:
        scatter(pool, np.array(pages), start, np.frombuffer(stream[start:end], dtype=np.uint8))
        start = end
    assert (pool == naive_pool(shape, pages, stream)).all()


# --- landing ----------------------------------------------------------------------------------------------------------


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[bytes, list[tuple[int, bytes]], list[tuple[str, int]]]:
    """A grant's bytes, its frames (offset, payload), and what happens to them on the way, in order."""
    data = draw(st.binary(min_size=1, max_size=40))
    cuts = sorted(draw(st.sets(st.integers(1, len(data)), max_size=4)) | {len(data)})
    starts = [0, *cuts[:-1]]
    frames = [(start, data[start:end]) for start, end in zip(starts, cuts, strict=True)]
    order = draw(st.permutations(range(len(frames)))) if draw(st.booleans()) else list(range(len(frames)))
    events: list[tuple[str, int]] = []
    for index in order:
        events += [(draw(st.sampled_from(["sound", "sound", "sound", "lost", "twice", *FORGERIES])), index)]
    for _ in range(draw(st.integers(0, 2))):
        events.insert(draw(st.integers(0, len(events))), (draw(st.sampled_from(["abort", "reuse"])), 0))
    return data, frames, events


FORGERIES: dict[str, Callable[[DataHeader], DataHeader]] = {
    "key": lambda header: replace(header, session_key=b"x" * 16),
    "ticket": lambda header: replace(header, ticket=header.ticket + 1),
    "capability": lambda header: replace(header, capability=b"x" * 16),
    "generation": lambda header: replace(header, generation=header.generation + 1),
    "kind": lambda header: replace(header, kind=PayloadKind(3 - header.kind)),
    "below zero": lambda header: replace(header, offset=2**64 - 1 - header.offset),
    "beyond": lambda header: replace(header, offset=header.offset + 2**40),
}


def deliver(session: LandingSession, header: DataHeader, payload: bytes) -> bool:
    """As the data port does; whether it was taken."""
    raw = pack(header, memoryview(payload))
    try:
        session.take(unpack(memoryview(raw), memoryview(payload)), memoryview(payload))
    except BadFrame:
        return False
    return True


@settings(deadline=None)
@given(deliveries())
def test_bytes_land_whole_and_in_order_or_the_commit_is_refused(
    case: tuple[bytes, list[tuple[int, bytes]], list[tuple[str, int]]],
) -> None:
    asyncio.run(_land(*case))


async def _land(data: bytes, frames: list[tuple[int, bytes]], events: list[tuple[str, int]]) -> None:
    arena = np.full(len(data) + 32, 0xEE, dtype=np.uint8)
    slot = arena[16 : 16 + len(data)]
    session = LandingSession(KEY)
    session.expect((REF, 0), TICKET, Landing(PayloadKind.SLOT, CAPABILITY, GENERATION, SlotTarget(slot)))
    landed, is_open = 0, True
    for what, index in events:
        if what == "abort":
            session.forget(REF, None)
            is_open = False
            slot[:] = 0xEE  # the slot is somebody else's now
            landed = 0
            continue
        if what == "reuse":  # the same slot, handed out again: a new ticket
            other = Landing(PayloadKind.SLOT, CAPABILITY, GENERATION, SlotTarget(slot))
            session.expect((REF, 0), TICKET + 100, other)
            is_open = False
            slot[:] = 0xEE
            landed = 0
            continue
        offset, payload = frames[index]
        header = DataHeader(PayloadKind.SLOT, SESSION, KEY, TICKET, CAPABILITY, GENERATION, offset, len(payload))
        for _ in range({"lost": 0, "twice": 2}.get(what, 1)):
            forged = FORGERIES.get(what, lambda sound: sound)(header)
            should = what not in FORGERIES and is_open and offset == landed
            assert deliver(session, forged, payload) == should
            landed += len(payload) if should else 0
        assert bytes(slot[:landed]) == data[:landed]
        assert (slot[landed:] == 0xEE).all()
        assert (arena[:16] == 0xEE).all() and (arena[-16:] == 0xEE).all()
    is_whole = is_open and landed == len(data)
    assert await commits(session, len(data)) == is_whole
    late = DataHeader(PayloadKind.SLOT, SESSION, KEY, TICKET, CAPABILITY, GENERATION, 0, len(data))
    before = bytes(arena)
    assert not deliver(session, late, data)
    assert bytes(arena) == before


async def commits(session: LandingSession, num_bytes: int, checksum: int | None = None) -> bool:
    """Whether a commit is taken, however little patience there is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("triptych.transport.landings.STALLED_S", 0.001)
        try:
            await session.complete((REF, 0), num_bytes, checksum)
        except (TransferRefused, Aborted):
            return False
        return True


async def test_a_commit_waits_for_frames_that_are_on_their_way() -> None:
    slot = np.zeros(8, dtype=np.uint8)
    session = LandingSession(KEY)
    session.expect((REF, 0), TICKET, Landing(PayloadKind.SLOT, CAPABILITY, GENERATION, SlotTarget(slot)))
    waiting = asyncio.create_task(session.complete((REF, 0), 8, None))
    for offset in (0, 4):
        await asyncio.sleep(0.01)
        assert not waiting.done()
        header = DataHeader(PayloadKind.SLOT, SESSION, KEY, TICKET, CAPABILITY, GENERATION, offset, 4)
        assert deliver(session, header, b"abcd")
    await waiting
    assert bytes(slot) == b"abcdabcd"


@pytest.mark.parametrize("end", ["forget", "close", "gap"])
async def test_a_commit_that_waits_in_vain_is_refused_at_once(end: str) -> None:
    slot = np.zeros(8, dtype=np.uint8)
    session = LandingSession(KEY)
    session.expect((REF, 0), TICKET, Landing(PayloadKind.SLOT, CAPABILITY, GENERATION, SlotTarget(slot)))
    waiting = asyncio.create_task(session.complete((REF, 0), 8, None))
    await asyncio.sleep(0.01)
    if end == "forget":
        session.forget(REF, 0)
    elif end == "close":
        session.close()
    else:
        header = DataHeader(PayloadKind.SLOT, SESSION, KEY, TICKET, CAPABILITY, GENERATION, 4, 4)
        assert not deliver(session, header, b"abcd")
    with pytest.raises(TransferRefused if end == "gap" else Aborted):
        await asyncio.wait_for(waiting, 1)


async def test_a_session_that_is_over_expects_nothing() -> None:
    session = LandingSession(KEY)
    session.close()
    slot = np.zeros(8, dtype=np.uint8)
    session.expect((REF, 0), TICKET, Landing(PayloadKind.SLOT, CAPABILITY, GENERATION, SlotTarget(slot)))
    assert len(session) == 0


async def test_pages_are_summed_up_over_the_whole_stream() -> None:
    pool = np.zeros((2, 4, 8), dtype=np.uint8)
    stream = bytes(range(32))
    session = LandingSession(KEY)

    def expect() -> None:
        landing = Landing(PayloadKind.PAGES, CAPABILITY, GENERATION, PagesTarget(pool, [3, 1]))
        session.expect((REF, "grant-1"), TICKET, landing)

    def send() -> None:
        for offset in (0, 20):
            payload = stream[offset : offset + 20]
            header = DataHeader(PayloadKind.PAGES, SESSION, KEY, TICKET, CAPABILITY, GENERATION, offset, len(payload))
            assert deliver(session, header, payload)

    expect()
    send()
    with pytest.raises(TransferRefused, match="checksum"):
        await session.complete((REF, "grant-1"), 32, xxhash.xxh3_64_intdigest(stream) ^ 1)
    expect()
    send()
    await session.complete((REF, "grant-1"), 32, xxhash.xxh3_64_intdigest(stream))
    expected = np.zeros_like(pool)
    expected[:, [3, 1]] = naive_pool((2, 4, 8), [3, 1], stream)[:, [3, 1]]
    assert (pool == expected).all()


@pytest.mark.parametrize("kind", PayloadKind)
def test_a_frame_that_reaches_beyond_its_grant_writes_nothing(kind: PayloadKind) -> None:
    pool = np.zeros((2, 4, 8), dtype=np.uint8)
    target = SlotTarget(pool.reshape(-1)[16:48]) if kind is PayloadKind.SLOT else PagesTarget(pool, [3, 1])
    session = LandingSession(KEY)
    session.expect((REF, 0), TICKET, Landing(kind, CAPABILITY, GENERATION, target))
    sound = DataHeader(kind, SESSION, KEY, TICKET, CAPABILITY, GENERATION, 0, 24)
    assert deliver(session, sound, b"s" * 24)
    before = pool.copy()
    assert not deliver(session, replace(sound, offset=24, length=9), b"x" * 9)
    assert (pool == before).all()
    assert deliver(session, replace(sound, offset=24, length=8), b"s" * 8)
