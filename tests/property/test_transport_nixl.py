"""Where `nixl` writes: every byte to its place once, whatever the shape of the pool and of the blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.kv_format import KvDtype, PageFormat
from triptych.kv.pages import PageLayout
from triptych.transport import nixl_carrier
from triptych.transport.layout import checksum64
from triptych.transport.nixl_api import check_runs
from triptych.transport.nixl_arena import sum_of_pages
from triptych.transport.nixl_carrier import Delivery, cut_runs, page_pieces, page_runs, slot_pieces
from triptych.transport.types import SlotGrant


@st.composite
def transfers(draw: st.DrawFn) -> tuple[PageLayout, int, list[int], int, bytes]:
    """A pool's layout and pages, those that are written, the size of a block, and the stream."""
    layout = PageLayout(draw(st.integers(1, 5)), draw(st.integers(1, 9)), PageFormat(1, KvDtype.FLOAT32))
    num_pages = draw(st.integers(1, 8))
    targets = draw(st.lists(st.integers(0, num_pages - 1), min_size=1, max_size=num_pages, unique=True))
    size = len(targets) * layout.page_bytes
    return layout, num_pages, targets, draw(st.integers(1, 100)), draw(st.binary(min_size=size, max_size=size))


def written(pieces: Iterator[nixl_carrier.Piece], arena: bytearray, block_bytes: int) -> list[int]:
    """Byte by byte, as the runs say; how often each was written."""
    times = [0] * len(arena)
    for piece in pieces:
        assert piece.data.size <= block_bytes
        check_runs(piece.runs, len(arena))
        data = iter(piece.data.tobytes())
        for begin, length in piece.runs.tolist():
            for at in range(begin, begin + length):
                arena[at] = next(data)
                times[at] += 1
        assert next(data, None) is None
    return times


def nothing(*_: Any) -> None:
    """Whoever is told."""


@given(transfers())
def test_pages_go_where_the_stream_says(case: tuple[PageLayout, int, list[int], int, bytes]) -> None:
    layout, num_pages, targets, block_bytes, stream = case
    cells = np.frombuffer(stream, dtype=np.uint8).reshape(len(targets), layout.num_planes, layout.cell_bytes)
    arena = bytearray(num_pages * layout.page_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nixl_carrier, "BLOCK_BYTES", block_bytes)
        pieces = page_pieces(Delivery(nothing), layout, num_pages, cells, targets, nothing)
        times = written(pieces, arena, block_bytes)
    pool = np.frombuffer(arena, dtype=np.uint8).reshape(layout.num_planes, num_pages, layout.cell_bytes)
    for place, page in enumerate(targets):
        assert (pool[:, page] == cells[place]).all()
    assert sum(times) == len(stream) and max(times) == 1
    assert sum_of_pages(pool, targets) == checksum64(stream)


@given(st.binary(min_size=1, max_size=300), st.integers(0, 50), st.integers(1, 100))
def test_a_slot_is_written_in_blocks(data: bytes, offset: int, block_bytes: int) -> None:
    grant, arena = SlotGrant(1, offset, len(data), 1, b"c" * 16), bytearray(400)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nixl_carrier, "BLOCK_BYTES", block_bytes)
        written(slot_pieces(Delivery(nothing), grant, memoryview(data)), arena, block_bytes)
    assert bytes(arena) == bytes(offset) + data + bytes(400 - offset - len(data))


@given(transfers(), st.data())
def test_runs_cut_anywhere_are_the_same_bytes(
    case: tuple[PageLayout, int, list[int], int, bytes], data: st.DataObject
) -> None:
    layout, num_pages, targets, _, stream = case
    runs = page_runs(layout, num_pages, targets)
    cut = data.draw(st.integers(0, len(stream)))
    parts = [cut_runs(runs, 0, cut), cut_runs(runs, cut, len(stream))]
    assert [int(part[:, 1].sum()) for part in parts] == [cut, len(stream) - cut]
    assert _bytes_of(np.concatenate(parts)) == _bytes_of(runs)


def _bytes_of(runs: Any) -> list[int]:
    return [at for begin, length in runs.tolist() for at in range(begin, begin + length)]
