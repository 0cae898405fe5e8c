"""Paged attention as a function that transformers calls through `AttentionInterface`.

All sequences of a step are packed in one row. K and V of new tokens are written to the pool first, then each sequence
attends to its pages. A *slot* is a token's place in the pool: page * page_tokens + offset. Page 0 is never handed out:
padding rows name it, and it stays zero.

    pool of one layer            block table of a sequence      slots of its context
    (pages, page_tokens, …)      [7, 3, 9]                      7*16+0 … 7*16+15, 3*16+0 …

This is the plain torch path (SDPA); it runs on CPU and on any GPU.
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

SlotArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ExtendSpan:
    """One sequence's rows in the packed step, when they are more than one.

    Attributes:
        row, num_rows: its rows in the packed batch.
        context: slots of all its tokens up to and including these rows, int64 (context,) on the device.
    """

    row: int
    num_rows: int
    context: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """All sequences that add a single row, attended to in one padded call.

    Attributes:
        rows: their rows in the packed batch, int64 (sequences,).
        context: slots, int64 (sequences, longest); padded with slot 0.
        mask: True where a slot is real, bool (sequences, 1, 1, longest).
    """

    rows: torch.Tensor
    context: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """What attention needs to know of a step.

    Attributes:
        pool: (layers, 2, pages, page_tokens, kv_heads, head_dim); index 0 of the second axis is K, 1 is V.
        write_slots: where each packed row's K and V go, int64 (rows,).
    """

    pool: torch.Tensor
    write_slots: torch.Tensor
    extends: tuple[ExtendSpan, ...]
    decodes: DecodeGroup | None


def context_slots(pages: Sequence[int], num_tokens: int, page_tokens: int) -> SlotArray:
    """Slots of a sequence's first `num_tokens` tokens, int64 (num_tokens,)."""
    table = np.asarray(pages[: -(-num_tokens // page_tokens)], dtype=np.int64)
    return (table[:, None] * page_tokens + np.arange(page_tokens)).reshape(-1)[:num_tokens]


def build_batch(
    pool: torch.Tensor, page_tokens: int, rows: Sequence[tuple[Sequence[int], int, int]], device: torch.device
) -> PagedBatch:
    """A batch from (block table, first new token's index, new tokens) of each sequence, in packed order."""
    writes: list[SlotArray] = []
    extends: list[ExtendSpan] = []
    singles: list[tuple[int, SlotArray]] = []
    row = 0
    for pages, start, count in rows:
        slots = context_slots(pages, start + count, page_tokens)
        writes.append(slots[start:])
        if count == 1:
            singles.append((row, slots))
        else:
            extends.append(ExtendSpan(row, count, torch.from_numpy(slots).to(device)))
        row += count
    write_slots = torch.from_numpy(np.concatenate(writes)).to(device)
    return PagedBatch(pool, write_slots, tuple(extends), _decode_group(singles, device))


def _decode_group(singles: Sequence[tuple[int, SlotArray]], device: torch.device) -> DecodeGroup | None:
    if not singles:
        return None
    longest = max(len(slots) for _, slots in singles)
    context = np.zeros((len(singles), longest), dtype=np.int64)
    mask = np.zeros((len(singles), 1, 1, longest), dtype=np.bool_)
    for index, (_, slots) in enumerate(singles):
        context[index, : len(slots)] = slots
        mask[index, ..., : len(slots)] = True
    rows = np.array([row for row, _ in singles], dtype=np.int64)
    return DecodeGroup(*(torch.from_numpy(array).to(device) for array in (rows, context, mask)))


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
    layer = paged.pool[cast(int, module.layer_idx)]
    keys, values = (half.view(-1, *half.shape[2:]) for half in (layer[0], layer[1]))
    keys.index_copy_(0, paged.write_slots, key[0].transpose(0, 1))
    values.index_copy_(0, paged.write_slots, value[0].transpose(0, 1))
    out = torch.empty_like(query[0].transpose(0, 1))
    for span in paged.extends:
        out[span.row : span.row + span.num_rows] = _extend(query[0], keys, values, span, scaling)
    if paged.decodes is not None:
        out[paged.decodes.rows] = _decode(query[0], keys, values, paged.decodes, scaling)
    return out.unsqueeze(0), None


def _extend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: ExtendSpan, scaling: float | None
) -> torch.Tensor:
    """A chunk over its cached prefix: causal within the chunk, everything before it visible."""
    q = query[:, span.row : span.row + span.num_rows].unsqueeze(0)
    k = keys[span.context].transpose(0, 1).unsqueeze(0)
    v = values[span.context].transpose(0, 1).unsqueeze(0)
    context, rows = span.context.shape[0], span.num_rows
    mask = None
    if context != rows:
        mask = torch.ones(rows, context, dtype=torch.bool, device=q.device).tril(context - rows)
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True)
    return out[0].transpose(0, 1)


def _decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: DecodeGroup, scaling: float | None
) -> torch.Tensor:
    """One query row a sequence; the heads that share a K/V head become the rows of one small attention."""
    num_sequences, kv_heads = group.rows.shape[0], keys.shape[1]
    q = query[:, group.rows].transpose(0, 1)
    q = q.reshape(num_sequences, kv_heads, -1, q.shape[-1])
    k = keys[group.context].transpose(1, 2)
    v = values[group.context].transpose(1, 2)
    out = scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scaling)
    return out.reshape(num_sequences, -1, q.shape[-1])


def register_paged_attention() -> None:
    """Makes `attn_implementation="triptych_paged"` known to transformers. It has no mask function: none is built."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
