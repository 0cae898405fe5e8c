"""Paged attention against plain attention over the whole sequence, in random chunks, page tables and batch mixes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from triptych.kv.pool import PoolPages, PoolShape, copy_pages, view_pool
from triptych.model import paged
from triptych.model.paged import SHORT_PAGES, build_batch, paged_attention

LAYERS, PAGES, PAGE, HEADS, KV_HEADS, DIM = 2, 40, 4, 4, 2, 8
CPU = torch.device("cpu")


@dataclass
class Stream:
    """One sequence: all that it will ever feed in, and where it is."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    pages: list[int]
    done: int = 0
    out: list[torch.Tensor] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.query.shape[2]

    def expected(self) -> torch.Tensor:
        """(tokens, heads, dim): causal attention over everything at once."""
        plain = scaled_dot_product_attention(self.query, self.key, self.value, is_causal=True, enable_gqa=True)
        return plain[0].transpose(0, 1)


def stream(length: int, free: list[int]) -> Stream:
    query = torch.randn(1, HEADS, length, DIM)
    key, value = torch.randn(1, KV_HEADS, length, DIM), torch.randn(1, KV_HEADS, length, DIM)
    return Stream(query, key, value, [free.pop() for _ in range(-(-length // PAGE))])


def step(pool: torch.Tensor, layer: int, chunks: list[tuple[Stream, int]]) -> None:
    batch = build_batch(pool, [(s.pages, s.done, count) for s, count in chunks], CPU)
    packed = [torch.cat([part(s)[:, :, s.done : s.done + n] for s, n in chunks], dim=2) for part in PARTS]
    module: Any = SimpleNamespace(layer_idx=layer)
    out, _ = paged_attention(module, *packed, None, paged=batch)
    assert out.shape == (1, packed[0].shape[2], HEADS, DIM)
    row = 0
    for each, count in chunks:
        each.out.append(out[0, row : row + count])
        each.done += count
        row += count


PARTS = (lambda s: s.query, lambda s: s.key, lambda s: s.value)


def empty_pool() -> torch.Tensor:
    """Every page poisoned but the reserved one."""
    pool = torch.full((LAYERS, 2, PAGES, KV_HEADS, PAGE, DIM), float("nan"))
    pool[:, :, 0] = 0
    return pool


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("is_blockwise", [True, False])
@pytest.mark.parametrize("block_rows", [1, 4, 64])
def test_it_is_plain_attention_in_any_chunks_and_mixes(
    seed: int, layer: int, is_blockwise: bool, block_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged, "attends_blockwise", lambda _: is_blockwise)
    monkeypatch.setattr(paged, "BLOCK_ROWS", block_rows)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(12):
        pool, free = empty_pool(), list(range(1, PAGES))
        rng.shuffle(free)
        streams = [stream(rng.randint(1, 25), free) for _ in range(rng.randint(1, 5))]
        while living := [each for each in streams if each.done < each.length]:
            chosen = rng.sample(living, rng.randint(1, len(living)))
            step(pool, layer, [(s, min(s.length - s.done, rng.choice([1, 1, 2, 5, 30]))) for s in chosen])
        for each in streams:
            torch.testing.assert_close(torch.cat(each.out), each.expected(), rtol=1e-5, atol=1e-5)
        assert not pool[:, :, 0].any(), "the reserved page was written"
        assert pool[1 - layer, :, 1:].isnan().all(), "another layer was written"


def test_only_the_places_of_new_tokens_are_written_and_the_rest_of_a_new_page_is_cleared() -> None:
    torch.manual_seed(0)
    pool = empty_pool()
    each = stream(10, [7, 3, 9])
    step(pool, 0, [(each, 6)])
    assert each.pages == [9, 3, 7]
    touched = ~pool[0, 0, :, 0, :, 0].isnan()
    touched[0] = False
    assert touched.nonzero().tolist() == [[page, offset] for page in (3, 9) for offset in range(PAGE)]
    assert torch.equal(pool[0, 0, 3, :, 1], each.key[0, :, 5])
    assert torch.equal(pool[0, 1, 3, :, 1], each.value[0, :, 5])
    assert not pool[0, :, 3, :, 2:].any()
    kept = pool[0, :, 9].clone()
    step(pool, 0, [(each, 1)])
    assert torch.equal(pool[0, :, 9], kept) and torch.equal(pool[0, 0, 3, :, 2], each.key[0, :, 6])


def test_long_sequences_do_not_pad_short_ones() -> None:
    pool = torch.zeros(1, 2, 400, 1, PAGE, DIM)
    lengths = {"a": 1, "b": 20 * PAGE, "c": 41 * PAGE, "d": 3, "e": 44 * PAGE - 1}
    tables = [list(range(1, 2 + (length - 1) // PAGE)) for length in lengths.values()]
    rows = [(table, length - 1, 1) for table, length in zip(tables, lengths.values(), strict=True)]
    groups = build_batch(pool, rows, CPU).decodes
    names = ["".join("abcde"[int(row)] for row in torch.arange(5)[group.rows]) for group in groups]
    assert names == ["ce", "b", "ad"]
    assert [group.num_context for group in groups] == [44 * PAGE, 20 * PAGE, PAGE]
    assert groups[1].mask is None, "a single sequence needs none"
    together = build_batch(pool, [(list(range(1, 1 + SHORT_PAGES)), SHORT_PAGES * PAGE - 1, 1), ([9], 0, 1)], CPU)
    assert [group.rows for group in together.decodes] == [slice(0, 2)]


def test_bfloat16_is_near_what_float32_gives(seed: int) -> None:
    torch.manual_seed(seed)
    outs = []
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(seed)
        pool, free = empty_pool().to(dtype), list(range(1, PAGES))
        streams = [stream(length, free) for length in (3, 13, 24)]
        for each in streams:
            rounded = (part(each).to(torch.bfloat16).to(dtype) for part in PARTS)
            each.query, each.key, each.value = rounded
            step(pool, 0, [(each, each.length - 2)])
        for _ in range(2):
            step(pool, 0, [(each, 1) for each in streams])
        outs.append([torch.cat(each.out).float() for each in streams])
    for rough, exact in zip(*outs, strict=True):
        torch.testing.assert_close(rough, exact, rtol=0.02, atol=0.02)


def test_sequences_share_the_pages_of_a_common_prefix() -> None:
    torch.manual_seed(0)
    pool, free = empty_pool(), list(range(1, PAGES))
    first = stream(13, free)
    second = Stream(*(part(first).clone() for part in PARTS), pages=[*first.pages[:2], free.pop(), free.pop()], done=8)
    second.query[:, :, 8:], second.key[:, :, 8:], second.value[:, :, 8:] = (
        torch.randn(1, n, 5, DIM) for n in (4, 2, 2)
    )
    step(pool, 0, [(first, 13)])
    step(pool, 0, [(second, 5)])
    torch.testing.assert_close(torch.cat(second.out), second.expected()[8:])
    torch.testing.assert_close(torch.cat(first.out), first.expected())


def test_the_given_scale_is_used() -> None:
    torch.manual_seed(0)
    pool, each = empty_pool(), stream(5, [1, 2])
    batch = build_batch(pool, [(each.pages, 0, 5)], CPU)
    module: Any = SimpleNamespace(layer_idx=0)
    out, _ = paged_attention(module, each.query, each.key, each.value, None, scaling=0.01, paged=batch)
    plain = scaled_dot_product_attention(each.query, each.key, each.value, is_causal=True, enable_gqa=True, scale=0.01)
    torch.testing.assert_close(out[0], plain[0].transpose(0, 1))


def test_a_mask_from_outside_is_a_bug() -> None:
    each: Any = stream(2, [1])
    with pytest.raises(AssertionError):
        paged_attention(each, each.query, each.key, each.value, torch.zeros(2, 2), paged=None)


# --- pools ------------------------------------------------------------------------------------------------------------


def test_pages_copied_to_another_pool_carry_all_layers() -> None:
    torch.manual_seed(0)
    source = torch.randn(LAYERS, 2, 6, KV_HEADS, PAGE, DIM)
    target = torch.zeros(LAYERS, 2, 9, KV_HEADS, PAGE, DIM)
    moved = copy_pages(source, [5, 1, 2], target, [1, 8, 3])
    assert torch.equal(target[:, :, [1, 8, 3]], source[:, :, [5, 1, 2]])
    assert not target[:, :, [0, 2, 4, 5, 6, 7]].any()
    assert moved == 3 * PoolShape(LAYERS, 6, PAGE, KV_HEADS, DIM).page_bytes(torch.float32)
    assert copy_pages(source, [], target, []) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_pages_are_the_pools_bytes_page_by_page_and_plane_by_plane(dtype: torch.dtype) -> None:
    shape = PoolShape(LAYERS, 6, PAGE, KV_HEADS, DIM)
    pool = torch.randn(shape.dims).to(dtype)
    source = PoolPages(pool)
    assert source.layout == shape.layout(dtype) and source.layout.page_bytes == shape.page_bytes(dtype)
    cells = source.gather([5, 1, 2])
    assert cells.shape == (3, 2 * LAYERS, source.layout.cell_bytes) and cells.flags.c_contiguous
    for row, page in enumerate((5, 1, 2)):
        for layer in range(LAYERS):
            for kind in range(2):
                raw = pool[layer, kind, page].contiguous().view(torch.uint8).numpy().tobytes()
                assert cells[row, 2 * layer + kind].tobytes() == raw


def test_a_pool_is_a_view_of_its_memory() -> None:
    shape = PoolShape(LAYERS, 3, PAGE, KV_HEADS, DIM)
    buffer = bytearray(shape.pool_bytes(torch.bfloat16) + 10)
    pool = view_pool(memoryview(buffer), shape, torch.bfloat16)
    assert pool.shape == shape.dims
    pool[1, 1, 2, 1, 3, 7] = 1.0
    assert buffer[-12:-10] == b"\x80\x3f"
    with pytest.raises(ValueError, match="does not fit"):
        view_pool(memoryview(bytearray(10)), shape, torch.bfloat16)
