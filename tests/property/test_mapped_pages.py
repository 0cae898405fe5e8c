"""Pages copied into a pool that is mapped here, against one copy of each page by itself."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from triptych.kv.pool import PoolPages, PoolShape
from triptych.transport.pages import MappedPages, common_runs

NUM_PAGES = 12
SHAPE = PoolShape(num_layers=2, num_pages=NUM_PAGES, page_tokens=2, num_kv_heads=1, head_dim=3)


@st.composite
def ways(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """(pages here, pages there): with and without neighbours, each once."""
    numbers = st.permutations(range(NUM_PAGES)) | st.just(list(range(NUM_PAGES)))
    here, there = draw(numbers), draw(numbers)
    count, first = draw(st.integers(1, NUM_PAGES)), draw(st.integers(0, NUM_PAGES - 1))
    return list(here[first : first + count]), list(there[first : first + count])


@given(ways(), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 3))
def test_each_page_arrives_and_no_other_is_touched(
    way: tuple[list[int], list[int]], dtype: torch.dtype, first: int
) -> None:
    pages, target_pages = way
    pool = torch.randn(SHAPE.dims, generator=torch.Generator().manual_seed(len(pages))).to(dtype)
    source = PoolPages(pool)
    target = np.full((4, NUM_PAGES, source.layout.cell_bytes), 255, dtype=np.uint8)
    earlier = [0] * first  # pages of the grant that were written before
    moved = MappedPages(source, target, earlier + target_pages).copy(pages, first)

    expected = np.full_like(target, 255)
    cells = pool.view(4, NUM_PAGES, -1).view(torch.uint8).numpy()
    for here, there in zip(pages, target_pages, strict=True):
        expected[:, there] = cells[:, here]
    assert np.array_equal(target, expected)
    assert moved == len(pages) * SHAPE.page_bytes(dtype)


@given(ways())
def test_runs_are_all_pages_in_order_and_as_long_as_can_be(way: tuple[list[int], list[int]]) -> None:
    runs = list(common_runs(*way))
    pairs = [(here + step, there + step) for here, there, count in runs for step in range(count)]
    assert pairs == list(zip(*way, strict=True))
    ends = [(here + count, there + count) for here, there, count in runs[:-1]]
    assert not any(end == (here, there) for end, (here, there, _) in zip(ends, runs[1:], strict=True))
