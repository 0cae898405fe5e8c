"""Attention over pages: what a step's rows see of the pool, for whoever computes the rest of the model.

All sequences of a step are packed in one row. K and V of new tokens are written to the pool first, then each sequence
attends to its pages. Page 0 is never handed out: padding names it, and it stays zero.

    pool of one layer                                           block table of a sequence
    (2, pages, kv_heads, page_tokens, head_dim)                 [7, 3, 9]

    *strip*   (kind, page, head): page_tokens rows that lie together; what a context is gathered by
    *row*     a strip's place for one token; what a new token is written to

A whole strip is gathered, used or not, and what stands behind a sequence's last token is masked: weighed with zero. So
that zero times what stands there is zero, whatever was there before, a page is cleared when its first token is written.

This is the plain torch path; it runs on CPU and on any GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION_NAME = "triptych_paged"
SHORT_PAGES = 8
"""Sequences up to this long are attended to in one call, whatever each one's length; longer ones only with those that
are at least half as long."""

BLOCK_ROWS = 64
"""Rows of a chunk that a CPU attends with at once."""

Indices = npt.NDArray[np.int64]
BlockTable = Sequence[int]


@dataclass(frozen=True, slots=True)
class ExtendSpan:
    """One sequence's rows in the packed step, when they are more than one.

    Attributes:
        row, num_rows: its rows in the packed batch.
        num_context: all its tokens up to and including these rows.
        strips: of K, then of V, each head by head, int64 (2 * kv_heads * pages,); None when the rows are all there is.
        mask: what each row sees, added to the scores: (num_rows, num_context); None when the rows are all there is,
            and on a CPU.
    """

    row: int
    num_rows: int
    num_context: int
    strips: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences that add a single row each, attended to in one padded call.

    Attributes:
        rows: their rows in the packed batch: a slice where they lie together, else int64 (sequences,).
        num_sequences, num_context: the longest context, in tokens.
        strips: of K, then of V; each sequence by sequence, within that head by head: int64
            (2 * sequences * kv_heads * pages,).
        gathered: where each layer's strips are put, one layer after another: what is taken anew for each layer is given
            to the process page by page, again and again.
        mask: added to the scores, (sequences, 1, 1, num_context); None when all contexts are equally long.
    """

    rows: slice | torch.Tensor
    num_sequences: int
    num_context: int
    strips: torch.Tensor
    gathered: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """What attention needs to know of a step.

    Attributes:
        pool: (layers, 2, pages, kv_heads, page_tokens, head_dim); index 0 of the second axis is K, 1 is V.
        write_rows: where each packed row's K and V go: K of each head, then V of each head, int64 (rows * 2 *
            kv_heads,).
        opened: strips that get their first token in this step, int64; None when there are none.
    """

    pool: torch.Tensor
    write_rows: torch.Tensor
    opened: torch.Tensor | None
    extends: tuple[ExtendSpan, ...]
    decodes: tuple[DecodeGroup, ...]

    def write(self, layer: int, new: torch.Tensor) -> None:
        """Puts K and V of the packed rows, (rows, 2 * kv_heads, head_dim), into the pages of a layer."""
        rows = self.pool[layer].view(-1, new.shape[-1])
        if self.opened is not None:
            self._strips(layer).index_fill_(0, self.opened, 0)
        rows.index_copy_(0, self.write_rows, new.reshape(-1, new.shape[-1]))

    def attend(self, layer: int, query: torch.Tensor, new: torch.Tensor, scale: float) -> torch.Tensor:
        """(rows, heads, head_dim) of every sequence over its context, as (rows, heads, head_dim). `new` is what was
        written for these rows."""
        if len(self.decodes) == 1 and not self.extends:
            return self._decode(layer, query, self.decodes[0], scale)
        out = torch.empty_like(query)
        for span in self.extends:
            end = span.row + span.num_rows
            out[span.row : end] = self._extend(layer, query[span.row : end], new[span.row : end], span, scale)
        for group in self.decodes:
            out[group.rows] = self._decode(layer, query[group.rows], group, scale)
        return out

    def _extend(
        self, layer: int, query: torch.Tensor, new: torch.Tensor, span: ExtendSpan, scale: float
    ) -> torch.Tensor:
        """A chunk over its cached prefix: causal within the chunk, everything before it visible."""
        kv_heads, dim = new.shape[1] // 2, new.shape[2]
        if span.strips is None:
            both = new.view(-1, 2, kv_heads, dim).permute(1, 2, 0, 3)
        else:
            gathered = self._strips(layer).index_select(0, span.strips)
            both = gathered.view(2, kv_heads, -1, dim)[:, :, : span.num_context]
        if attends_blockwise(query.device):
            return _blockwise_attention(query, both[0], both[1], scale)
        out = scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),
            both[0].unsqueeze(0),
            both[1].unsqueeze(0),
            attn_mask=span.mask,
            is_causal=span.mask is None,
            scale=scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)

    def _decode(self, layer: int, query: torch.Tensor, group: DecodeGroup, scale: float) -> torch.Tensor:
        """One query row a sequence; the heads that share a K/V head become the rows of one small attention."""
        dim, kv_heads = query.shape[2], self.pool.shape[3]
        torch.index_select(self._strips(layer), 0, group.strips, out=group.gathered)
        both = group.gathered.view(2, group.num_sequences, kv_heads, -1, dim)[:, :, :, : group.num_context]
        q = query.reshape(group.num_sequences, kv_heads, -1, dim)
        if q.dtype is torch.bfloat16 and q.device.type == "cpu":
            return _small_attention(q, both[0], both[1], group.mask, scale).view(query.shape)
        out = scaled_dot_product_attention(q, both[0], both[1], attn_mask=group.mask, scale=scale)
        return out.reshape(query.shape)

    def _strips(self, layer: int) -> torch.Tensor:
        page_tokens, dim = self.pool.shape[4:]
        return self.pool[layer].view(-1, page_tokens * dim)


def _small_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """(sequences, kv_heads, few rows, head_dim) over (sequences, kv_heads, context, head_dim).

    torch's fused attention for bfloat16 on the CPU is made for many rows; two products are twice as fast for few.
    """
    sequences, kv_heads, rows, dim = query.shape
    flat = query.reshape(-1, rows, dim).mul(scale).transpose(1, 2)
    scores = torch.bmm(key.flatten(0, 1), flat).transpose(1, 2)
    if mask is not None:
        scores = (scores.reshape(sequences, kv_heads, rows, -1) + mask).view(-1, rows, key.shape[2])
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.bmm(weights, value.flatten(0, 1))


def attends_blockwise(device: torch.device) -> bool:
    """Whether chunks are attended with in blocks of rows; else by torch's fused attention."""
    return device.type == "cpu"


def _blockwise_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """(rows, heads, head_dim), the last rows of a context, over all of it: (kv_heads, context, head_dim). Causal.

    As products over a block of rows and what the last of them sees: what no row sees is hardly computed, and the
    heads that share a K/V head share a product. On CPUs that is faster than torch's fused attention (in bfloat16 more
    than twice), and the scores of a block stay in cache.
    """
    (rows, _, dim), (kv_heads, context, _) = query.shape, key.shape
    grouped = query.view(rows, kv_heads, -1, dim).permute(1, 2, 0, 3).mul(scale)
    out = torch.empty_like(query)
    into = out.view(rows, kv_heads, -1, dim).permute(1, 2, 0, 3)
    hidden = torch.full((BLOCK_ROWS, BLOCK_ROWS), float("-inf"), dtype=query.dtype).triu_(1)
    for first in range(0, rows, BLOCK_ROWS):
        count = min(BLOCK_ROWS, rows - first)
        seen = context - rows + first + count
        block = grouped[:, :, first : first + count].reshape(kv_heads, -1, dim)
        scores = torch.bmm(block, key[:, :seen].transpose(1, 2)).view(kv_heads, -1, count, seen)
        scores[..., seen - count :] += hidden[:count, :count]
        weights = torch.softmax(scores, dim=-1).view(kv_heads, -1, seen)
        into[:, :, first : first + count] = torch.bmm(weights, value[:, :seen]).view(kv_heads, -1, count, dim)
    return out


def build_batch(pool: torch.Tensor, rows: Sequence[tuple[BlockTable, int, int]], device: torch.device) -> PagedBatch:
    """A batch from (block table, first new token's index, new tokens) of each sequence, in packed order."""
    _, _, num_pages, kv_heads, page_tokens, dim = pool.shape
    strips = _Strips(num_pages, kv_heads, page_tokens * dim, pool.dtype, device)
    writes: list[Indices] = []
    opened: list[int] = []
    extends: list[ExtendSpan] = []
    singles: list[tuple[int, BlockTable, int]] = []
    row = 0
    for table, start, count in rows:
        tokens = np.arange(start, start + count)
        pages = np.asarray(table, dtype=np.int64)[tokens // page_tokens]
        writes.append(strips.of_pages(pages) * page_tokens + (tokens % page_tokens)[:, None])
        opened += pages[tokens % page_tokens == 0].tolist()
        if count == 1:
            singles.append((row, table[: -(-(start + 1) // page_tokens)], start + 1))
        else:
            extends.append(strips.extend(row, table[: -(-(start + count) // page_tokens)], start, count))
        row += count
    return PagedBatch(
        pool,
        strips.to_device(np.concatenate(writes).reshape(-1)),
        strips.to_device(strips.of_pages(np.asarray(opened, dtype=np.int64)).reshape(-1)) if opened else None,
        tuple(extends),
        tuple(strips.group(part, page_tokens) for part in _alike(singles)),
    )


@dataclass(frozen=True, slots=True)
class _Strips:
    """Numbers the strips of a layer: (kind * pages + page) * kv_heads + head; each has `width` elements."""

    num_pages: int
    kv_heads: int
    width: int
    dtype: torch.dtype
    device: torch.device

    def of_pages(self, pages: Indices) -> Indices:
        """int64 (pages, 2 * kv_heads): K of each head, then V of each head."""
        kinds = (np.arange(2) * self.num_pages)[:, None] * self.kv_heads + np.arange(self.kv_heads)
        strips: Indices = pages[:, None] * self.kv_heads + kinds.reshape(-1)
        return strips

    def extend(self, row: int, table: BlockTable, start: int, count: int) -> ExtendSpan:
        if start == 0:
            return ExtendSpan(row, count, count, None, None)
        strips = self.of_pages(np.asarray(table, dtype=np.int64)).T.reshape(-1)
        mask = None
        if not attends_blockwise(self.device):
            mask = self._mask(torch.ones(count, start + count, dtype=torch.bool).tril(start))
        return ExtendSpan(row, count, start + count, self.to_device(strips), mask)

    def group(self, singles: Sequence[tuple[int, BlockTable, int]], page_tokens: int) -> DecodeGroup:
        count, lengths = len(singles), np.array([length for _, _, length in singles])
        longest = max(len(table) for _, table, _ in singles)
        tables = np.zeros((count, longest), dtype=np.int64)
        for index, (_, table, _) in enumerate(singles):
            tables[index, : len(table)] = table
        kinds = (np.arange(2) * self.num_pages)[:, None, None, None]
        strips = (kinds + tables[None, :, None, :]) * self.kv_heads + np.arange(self.kv_heads)[:, None]
        mask, num_context = None, int(lengths.max())
        if (lengths != num_context).any():
            num_context = longest * page_tokens
            seen = np.arange(num_context) < lengths[:, None]
            mask = self._mask(torch.from_numpy(seen)[:, None, None])
        rows = [row for row, _, _ in singles]
        together = rows[-1] - rows[0] == count - 1 and sorted(rows) == rows
        place = slice(rows[0], rows[-1] + 1) if together else self.to_device(np.array(rows, dtype=np.int64))
        gathered = torch.empty((strips.size, self.width), dtype=self.dtype, device=self.device)
        return DecodeGroup(place, count, num_context, self.to_device(strips.reshape(-1)), gathered, mask)

    def to_device(self, array: Indices) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _mask(self, seen: torch.Tensor) -> torch.Tensor:
        return torch.zeros(seen.shape, dtype=self.dtype).masked_fill_(~seen, float("-inf")).to(self.device)


def _alike(singles: Sequence[tuple[int, BlockTable, int]]) -> list[list[tuple[int, BlockTable, int]]]:
    """Sequences in groups of like length, so that a long one does not pad the others to its own."""
    if not singles:
        return []
    longest = max(len(table) for _, table, _ in singles)
    if longest <= SHORT_PAGES or 2 * min(len(table) for _, table, _ in singles) >= longest:
        return [list(singles)]
    long = [single for single in singles if 2 * len(single[1]) >= longest]
    return [long, *_alike([single for single in singles if 2 * len(single[1]) < longest])]


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    paged: PagedBatch | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Called by transformers for each layer.

    Args:
        query: (1, heads, rows, head_dim); key and value: (1, kv_heads, rows, head_dim), rotated.

    Returns:
        (1, rows, heads, head_dim).
    """
    assert paged is not None and attention_mask is None, "paged attention needs its batch and no mask"
    layer, scale = cast(int, module.layer_idx), query.shape[-1] ** -0.5 if scaling is None else scaling
    new = torch.cat([key[0], value[0]]).transpose(0, 1).contiguous()
    paged.write(layer, new)
    return paged.attend(layer, query[0].transpose(0, 1), new, scale).unsqueeze(0), None


def register_paged_attention() -> None:
    """Makes `attn_implementation="triptych_paged"` known to transformers. It has no mask function: none is built."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
