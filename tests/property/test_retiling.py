"""A prompt's KV from one pool into another of any page size and number format, against a plain tensor of all tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.core.kv_format import Conversion, KvDtype, PageFormat, conversion
from triptych.kv.pool import PoolPages
from triptych.transport import retiling
from triptych.transport.landings import PagesTarget
from triptych.transport.pages import ByteArray, MappedPages, PageSource
from triptych.transport.retiling import RetiledPages, RetilingHandoff

GUARD = 0xAB
pairs = st.sampled_from(
    [(one, other) for one in KvDtype for other in KvDtype if conversion(one, other) is not Conversion.IMPOSSIBLE]
)
page_sizes = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16])


@dataclass(frozen=True)
class Case:
    """A prompt of `num_tokens`, the first `num_held` of which the receiver has. `turns`: how many local pages the
    engine hands over at a time; `cuts`: how long the pieces are in which bytes arrive."""

    here: PageFormat
    there: PageFormat
    layers: int
    heads: int
    head_dim: int
    num_tokens: int
    num_held: int
    turns: tuple[int, ...]
    cuts: tuple[int, ...]
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dtypes, num_tokens = draw(pairs), draw(st.integers(1, 70))
    here, there = draw(page_sizes), draw(page_sizes)
    return Case(
        PageFormat(here, dtypes[0]),
        PageFormat(there, dtypes[1]),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
        num_tokens,
        draw(st.integers(0, (num_tokens - 1) // there)) * there,
        tuple(draw(st.lists(st.integers(0, 4), max_size=8))),
        tuple(draw(st.lists(st.integers(1, 300), min_size=1, max_size=6))),
        draw(st.integers(0, 2**32 - 1)),
    )


def torch_dtype(form: PageFormat) -> torch.dtype:
    return {KvDtype.FLOAT32: torch.float32, KvDtype.BFLOAT16: torch.bfloat16, KvDtype.FLOAT16: torch.float16}[
        form.dtype
    ]


class World:
    """Two pools, and the truth: `dense` is (layers, 2, tokens, heads, head_dim) in the sender's numbers."""

    def __init__(self, case: Case) -> None:
        random = np.random.default_rng(case.seed)
        torch.manual_seed(case.seed)
        self.case = case
        here, there = case.here.page_tokens, case.there.page_tokens
        self.num_pages_here, self.num_pages_there = -(-case.num_tokens // here), -(-case.num_tokens // there)
        self.dense = torch.randn(case.layers, 2, case.num_tokens, case.heads, case.head_dim).to(torch_dtype(case.here))
        pool = torch.full((case.layers, 2, self.num_pages_here + 3, case.heads, here, case.head_dim), torch.nan).to(
            torch_dtype(case.here)
        )
        self.pages_here = random.permutation(pool.shape[2])[: self.num_pages_here].tolist()
        for token in range(case.num_tokens):
            pool[:, :, self.pages_here[token // here], :, token % here] = self.dense[:, :, token]
        self.source = PoolPages(pool)
        self.num_held_pages = case.num_held // there
        self.num_sent = self.num_pages_there - self.num_held_pages
        num_pages = self.num_pages_there + 3
        self.granted = random.permutation(num_pages)[: self.num_sent].tolist()
        layout = self.source.layout.in_format(case.there)
        self.memory = np.full(layout.num_planes * num_pages * layout.cell_bytes, GUARD, dtype=np.uint8)
        self.planes = self.memory.reshape(layout.num_planes, num_pages, layout.cell_bytes)

    def landed(self, token: int) -> torch.Tensor:
        """(layers, 2, heads, head_dim) of the receiver's pool."""
        case = self.case
        dims = (case.layers, 2, -1, case.heads, case.there.page_tokens, case.head_dim)
        pool = torch.from_numpy(self.memory).view(torch_dtype(case.there)).view(dims)
        page, within = divmod(token - case.num_held, case.there.page_tokens)
        return pool[:, :, self.granted[page], :, within]

    def check(self, num_pages: int) -> None:
        """The first `num_pages` that were granted hold what they should, and nothing else was written to."""
        case = self.case
        end = min(case.num_held + num_pages * case.there.page_tokens, case.num_tokens)
        for token in range(case.num_held, end):
            assert torch.equal(self.landed(token), self.dense[:, :, token].to(torch_dtype(case.there)))
        written = set(self.granted[:num_pages])
        untouched = [page for page in range(self.planes.shape[1]) if page not in written]
        assert (self.planes[:, untouched] == GUARD).all()


class StreamWriter:
    """A page writer whose bytes go through the stream of data frames, in pieces of any length."""

    is_congested = False

    def __init__(self, source: PageSource, target: PagesTarget, cuts: Sequence[int]) -> None:
        self._source, self._target, self._cuts = source, target, cuts

    def copy(self, pages: Sequence[int], first: int) -> int:
        if not pages:
            return 0
        data: ByteArray = self._source.gather(pages).reshape(-1)
        begin, offset = first * self._source.layout.page_bytes, 0
        while offset < data.size:
            piece = data[offset : offset + self._cuts[offset % len(self._cuts)]]
            self._target.write(begin + offset, piece)
            offset += piece.size
        return data.size

    async def flush(self) -> int | None:
        return None

    def cancel(self) -> None:
        return

    async def settle(self) -> None:
        return


def mapped(world: World, source: PageSource) -> MappedPages:
    return MappedPages(source, world.planes, world.granted)


def streamed(world: World, source: PageSource) -> StreamWriter:
    return StreamWriter(source, PagesTarget(world.planes, world.granted), world.case.cuts)


@settings(report_multiple_bugs=False)
@given(cases(), st.sampled_from([mapped, streamed]))
def test_each_token_is_where_the_receiver_looks_for_it(
    case: Case, writer_of: Callable[[World, PageSource], MappedPages | StreamWriter]
) -> None:
    world, here, there = World(case), case.here.page_tokens, case.there.page_tokens
    pages = RetiledPages(world.source, case.there, case.num_held, case.num_tokens)
    handoff = RetilingHandoff(writer_of(world, pages), pages)
    skipped = case.num_held // here
    begin, moved = skipped, 0
    for turn in (*case.turns, world.num_pages_here):
        end = min(begin + turn, world.num_pages_here)
        moved += handoff.copy(world.pages_here[begin:end], begin - skipped)
        begin = end
        written = max(min(end * here, case.num_tokens) - case.num_held, 0)
        is_whole = end == world.num_pages_here
        world.check(world.num_sent if is_whole else written // there)
    assert moved == world.num_sent * pages.layout.page_bytes


@given(st.sampled_from(KvDtype), page_sizes, st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_pages_of_one_format_are_the_same_either_way(dtype: KvDtype, size: int, num_tokens: int, seed: int) -> None:
    """What is cut anew into what it was is what is sent as it is."""
    form = PageFormat(size, dtype)
    world = World(Case(form, form, 2, 2, 3, num_tokens, 0, (), (1,), seed))
    pages = RetiledPages(world.source, form, 0, num_tokens)
    pages.add(world.pages_here)
    assert (pages.gather(range(world.num_sent)) == world.source.gather(world.pages_here)).all()


BROKEN: dict[str, tuple[str, object]] = {
    "what is held is not skipped": (
        "_first",
        property(lambda self: 0, lambda self, value: None),
    ),
    "a page goes before it is full": (
        "num_ready",
        property(
            lambda self: -(-len(self._pages) * self._source.layout.format.page_tokens // self.layout.format.page_tokens)
        ),
    ),
    "the last page waits for ever": (
        "num_ready",
        property(
            lambda self: (
                min(self._num_tokens, len(self._pages) * self._source.layout.format.page_tokens - self._first)
                // self.layout.format.page_tokens
            )
        ),
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_build_that_cuts_wrongly_is_found(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retiling.RetiledPages, *BROKEN[broken], raising=False)
    with pytest.raises((AssertionError, IndexError, ValueError)):
        test_each_token_is_where_the_receiver_looks_for_it()
