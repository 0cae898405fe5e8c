"""Turns compact ids into the full sequence and back-checks every range. One function for all stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from triptych.core.errors import InvalidRequest, MediaMismatch
from triptych.core.plan import Item, TokenRange

IdArray = npt.NDArray[np.int64]
Ids = Sequence[int] | npt.NDArray[Any]


def expand(compact_ids: Ids, items: Sequence[Item], fills: Sequence[IdArray]) -> IdArray:
    """The full prompt.

    Args:
        compact_ids: the prompt, one placeholder per range.
        items: in order of their first range.
        fills: for each item int64 of shape (num_tokens,): what stands at its rows (sentinels, or the placeholder id).

    Returns:
        int64 of shape (prompt_tokens,), a new array; the arguments are only read.

    Raises:
        MediaMismatch: a range is out of order, overlaps, is empty, or does not lie where its offset says.
        InvalidRequest: an id is not a whole number of at most 64 bits.
    """
    check_ranges(compact_ids, items)
    assert [len(fill) for fill in fills] == [item.num_tokens for item in items]
    pieces: list[IdArray] = []
    source = id_array(compact_ids)
    cursor = 0
    for item_index, row, run in _runs_in_order(items):
        pieces.append(source[cursor : run.compact_index])
        pieces.append(fills[item_index][row : row + run.length])
        cursor = run.compact_index + 1
    pieces.append(source[cursor:])
    return np.concatenate(pieces, dtype=np.int64)


def id_array(ids: Ids) -> IdArray:
    """The ids as int64 of shape (n,), to be read only: it may share the argument's memory.

    Raises InvalidRequest for anything but a flat sequence of whole numbers that fit signed 64 bits; nothing is rounded
    or wrapped.
    """
    if len(ids) == 0:
        return np.empty(0, dtype=np.int64)
    array = np.asarray(ids)
    too_large = array.dtype.kind == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max
    if array.ndim != 1 or array.dtype.kind not in "iu" or too_large:
        raise InvalidRequest("token ids must be a flat list of whole numbers of at most 64 bits")
    return array.astype(np.int64, copy=False)


def check_ranges(compact_ids: Ids, items: Sequence[Item]) -> None:
    """Raises MediaMismatch unless the ranges of all items tile the placeholders in order and add up, and the items
    themselves stand in the order of their first ranges."""
    first = 0
    for index, item in enumerate(items):
        check_own_ranges(item, f"item {index}")
        if item.offset < first:
            raise MediaMismatch(f"item {index}: it stands before the item that precedes it in the list")
        first = item.offset
    grown, compact_end = 0, 0
    for item_index, _, run in _runs_in_order(items):
        if run.compact_index < compact_end or run.compact_index >= len(compact_ids):
            raise MediaMismatch(f"item {item_index}: a range lies outside the prompt or overlaps another item's")
        if run.offset != run.compact_index + grown:
            raise MediaMismatch(f"item {item_index}: a range is not where its offset says")
        grown += run.length - 1
        compact_end = run.compact_index + 1


def check_own_ranges(item: Item, name: str) -> None:
    """What can be said of an item's ranges without the prompt.

    Raises MediaMismatch, which calls the item `name`, unless there is one, they ascend without overlap, none is empty
    and their lengths add up to `num_tokens`.
    """
    if not item.ranges or sum(run.length for run in item.ranges) != item.num_tokens:
        raise MediaMismatch(f"{name}: ranges do not add up to its {item.num_tokens} tokens")
    end, compact_end = 0, 0
    for run in item.ranges:
        if run.length < 1 or run.offset < end or run.compact_index < compact_end:
            raise MediaMismatch(f"{name}: a range is empty, out of order or overlaps another")
        end, compact_end = run.end, run.compact_index + 1


def _runs_in_order(items: Sequence[Item]) -> list[tuple[int, int, TokenRange]]:
    """(item index, first row of the run within its item, run), by position in the prompt."""
    runs: list[tuple[int, int, TokenRange]] = []
    for index, item in enumerate(items):
        row = 0
        for run in item.ranges:
            runs.append((index, row, run))
            row += run.length
    return sorted(runs, key=lambda entry: entry[2].compact_index)
