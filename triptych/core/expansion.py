"""Turns compact ids into the full sequence and back-checks every range. One function for all stages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from triptych.core.errors import MediaMismatch
from triptych.core.plan import Item, TokenRange

IdArray = npt.NDArray[np.int64]


def expand(compact_ids: Sequence[int], items: Sequence[Item], fills: Sequence[IdArray]) -> IdArray:
    """The full prompt.

    Args:
        compact_ids: the prompt, one placeholder per range.
        items: in order of their first range.
        fills: for each item int64 of shape (num_tokens,): what stands at its rows (sentinels, or the placeholder id).

    Returns:
        int64 of shape (prompt_tokens,), a new array.

    Raises:
        MediaMismatch: a range is out of order, overlaps, is empty, or does not lie where its offset says.
    """
    check_ranges(compact_ids, items)
    pieces: list[IdArray] = []
    source = np.asarray(compact_ids, dtype=np.int64)
    cursor = 0
    for item_index, row, run in _runs_in_order(items):
        pieces.append(source[cursor : run.compact_index])
        pieces.append(fills[item_index][row : row + run.length])
        cursor = run.compact_index + 1
    pieces.append(source[cursor:])
    return np.concatenate(pieces)


def check_ranges(compact_ids: Sequence[int], items: Sequence[Item]) -> None:
    """Raises MediaMismatch unless the ranges of all items tile the placeholders in order and add up."""
    for index, item in enumerate(items):
        if not item.ranges or sum(run.length for run in item.ranges) != item.num_tokens:
            raise MediaMismatch(f"item {index}: ranges do not add up to its {item.num_tokens} tokens")
    grown, compact_end = 0, 0
    for item_index, _, run in _runs_in_order(items):
        if run.length < 1 or run.compact_index < compact_end or run.compact_index >= len(compact_ids):
            raise MediaMismatch(f"item {item_index}: a range is empty, out of order or overlaps another")
        if run.offset != run.compact_index + grown:
            raise MediaMismatch(f"item {item_index}: a range is not where its offset says")
        grown += run.length - 1
        compact_end = run.compact_index + 1


def _runs_in_order(items: Sequence[Item]) -> list[tuple[int, int, TokenRange]]:
    """(item index, first row of the run within its item, run), by position in the prompt."""
    runs: list[tuple[int, int, TokenRange]] = []
    for index, item in enumerate(items):
        row = 0
        for run in item.ranges:
            runs.append((index, row, run))
            row += run.length
    return sorted(runs, key=lambda entry: entry[2].compact_index)
