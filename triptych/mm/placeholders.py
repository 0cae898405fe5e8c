"""Placeholders: where the rows of items stand in token ids, and ids with sentinels in those places.

A prompt comes in one of two ways. Either every row is one *placeholder token* (the token id tells the modality), or
the rows are whatever stands between a *start and an end token*, crops within or behind the picture they belong to. Both
give the same: a `Placement`, from which `core.expansion.expand` makes the full sequence again.

Arguments are only read. A result has the length of its argument, and ids keep all their 64 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from triptych.core.errors import InvalidRequest, MediaMismatch
from triptych.core.expansion import IdArray, Ids, check_own_ranges, id_array
from triptych.core.plan import Item, Modality, TokenRange
from triptych.mm.sentinels import item_sentinels


@dataclass(frozen=True, slots=True)
class ItemRuns:
    """What is known of an item before its place is. `lengths` are those of its runs, or None: then the item has one
    run, as long as the prompt makes it (token placeholders), or the runs that its tokens enclose (pairs)."""

    modality: Modality
    lengths: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """A prompt in its compact form, one placeholder a run, and each item's runs, in the order of the items."""

    compact_ids: tuple[int, ...]
    ranges: tuple[tuple[TokenRange, ...], ...]


@dataclass(frozen=True, slots=True)
class PairTokens:
    """Start and end tokens of one modality.

    An item begins with `item_start`. A pair within an open one is a crop of that item, and so is a `crop` pair that
    stands by itself: it belongs to the item before it. Rows are the tokens of innermost pairs; with `data_id`, the
    tokens of that id within any pair, and what stands between them (row breaks) is text.
    """

    modality: Modality
    item_start: int
    item_end: int
    crop: tuple[int, int] | None = None
    data_id: int | None = None

    @property
    def ends(self) -> dict[int, int]:
        """Start token -> its end token."""
        pairs = {self.item_start: self.item_end}
        if self.crop is not None:
            pairs[self.crop[0]] = self.crop[1]
        return pairs


Span = tuple[int, int]
"""A run in the full sequence: first token and length."""


# --- one placeholder token a row -------------------------------------------------------------------------------------


def place_by_token(ids: Ids, token_modalities: Mapping[int, Modality], items: Sequence[ItemRuns]) -> Placement:
    """Gives the runs of placeholder tokens to the items, in order.

    Args:
        ids: the full prompt, a placeholder token for every row.
        token_modalities: placeholder token -> what it stands for.
        items: in the order of the prompt. Items with lengths may share a run with the next (two pictures side by side).

    Raises MediaMismatch, naming the item, when modality, number or lengths of the runs are not those of the items.
    """
    array = id_array(ids)
    runs = _Runs(_token_runs(array, token_modalities))
    spans = [runs.take(index, item) for index, item in enumerate(items)]
    if not runs.are_used:
        raise MediaMismatch(f"the prompt holds more placeholders than its {len(items)} items need")
    return _placement(array, spans)


def _token_runs(array: IdArray, token_modalities: Mapping[int, Modality]) -> list[tuple[Modality, Span]]:
    """Maximal runs of one placeholder token, in order."""
    known = np.array(sorted(token_modalities), dtype=np.int64)
    at = np.flatnonzero(np.isin(array, known))
    breaks = np.flatnonzero((np.diff(at) != 1) | (np.diff(array[at]) != 0)) + 1
    pieces = np.split(at, breaks) if len(at) else []
    return [(token_modalities[int(array[piece[0]])], (int(piece[0]), len(piece))) for piece in pieces]


class _Runs:
    """The prompt's runs, used up from the front."""

    def __init__(self, runs: list[tuple[Modality, Span]]) -> None:
        self._runs = runs[::-1]

    @property
    def are_used(self) -> bool:
        return not self._runs

    def take(self, index: int, item: ItemRuns) -> list[Span]:
        wanted = [None] if item.lengths is None else list(item.lengths)
        if not wanted or any(length is not None and length < 1 for length in wanted):
            raise MediaMismatch(f"item {index}: a run of an item has at least one token")
        return [self._take_run(index, item.modality, length) for length in wanted]

    def _take_run(self, index: int, modality: Modality, length: int | None) -> Span:
        if not self._runs:
            raise MediaMismatch(f"item {index}: the prompt holds no placeholder for it")
        found, (start, available) = self._runs.pop()
        if found is not modality:
            raise MediaMismatch(
                f"item {index} is {modality.value}; the prompt has a placeholder for {found.value} there"
            )
        taken = available if length is None else length
        if taken > available:
            raise MediaMismatch(f"item {index}: the prompt has {available} placeholders where {taken} are needed")
        if taken < available:
            self._runs.append((found, (start + taken, available - taken)))
        return start, taken


# --- start and end tokens --------------------------------------------------------------------------------------------


def place_by_pairs(ids: Ids, pairs: Sequence[PairTokens], items: Sequence[ItemRuns]) -> Placement:
    """Finds what start and end tokens enclose, and gives it to the items, in order.

    Raises:
        MediaMismatch: a start without its end, an end without its start, pairs that cross, a pair around nothing, a
            crop before any item, another number of items, or other modalities or lengths than expected. Names the item.
        InvalidRequest: one token has two meanings in `pairs`.
    """
    array = id_array(ids)
    reader = _PairReader(array, pairs)
    cursor = 0
    for position in np.flatnonzero(np.isin(array, reader.marks)).tolist():
        reader.read_between(cursor, position)
        reader.read_mark(int(array[position]))
        cursor = position + 1
    reader.read_between(cursor, len(array))
    found = reader.finish()
    if len(found) < len(items):
        raise MediaMismatch(f"item {len(found)}: the prompt holds no start token for it")
    if len(found) > len(items):
        raise MediaMismatch(f"the prompt encloses {len(found)} items in start and end tokens; {len(items)} were given")
    for index, (item, (modality, spans)) in enumerate(zip(items, found, strict=True)):
        _check_expected(index, item, modality, spans)
    return _placement(array, [spans for _, spans in found])


def _check_expected(index: int, item: ItemRuns, modality: Modality, spans: list[Span]) -> None:
    if item.modality is not modality:
        raise MediaMismatch(f"item {index} is {item.modality.value}; the prompt encloses {modality.value} there")
    lengths = tuple(length for _, length in spans)
    if item.lengths is not None and item.lengths != lengths:
        raise MediaMismatch(
            f"item {index}: its runs have {list(item.lengths)} tokens, those of the prompt {list(lengths)}"
        )


@dataclass(slots=True)
class _OpenPair:
    """A pair whose end has not come. `first_span`: how many spans its item had when it began."""

    end: int
    first_span: int
    has_inner: bool = False


class _PairReader:
    """Reads a prompt from mark to mark. `_open` are the pairs around the current place, outermost first."""

    def __init__(self, array: IdArray, pairs: Sequence[PairTokens]) -> None:
        self._array = array
        self._by_start = _pairs_by_start(pairs)
        ends = {end for tokens in pairs for end in tokens.ends.values()}
        self.marks = np.array(sorted(self._by_start.keys() | ends), dtype=np.int64)
        self._data = np.array([tokens.data_id for tokens in pairs if tokens.data_id is not None], dtype=np.int64)
        self._open: list[_OpenPair] = []
        self._items: list[tuple[PairTokens, list[Span]]] = []

    def read_mark(self, token: int) -> None:
        if token in self._by_start:
            self._begin(token, self._by_start[token])
        else:
            self._end(token)

    def read_between(self, start: int, stop: int) -> None:
        """What stands between two marks: rows within an innermost pair, text elsewhere."""
        block = self._array[start:stop]
        if not self._open:
            if np.isin(block, self._data).any():
                raise MediaMismatch(f"{self._place}: a placeholder stands outside of start and end tokens")
            return
        tokens, spans = self._items[-1]
        if tokens.data_id is not None:
            spans += [(start + first, length) for first, length in _stretches(block == tokens.data_id)]
        elif stop > start and not self._open[-1].has_inner:
            spans.append((start, stop - start))

    def finish(self) -> list[tuple[Modality, list[Span]]]:
        if self._open:
            raise MediaMismatch(f"{self._place}: a start token has no end token")
        return [(tokens.modality, spans) for tokens, spans in self._items]

    @property
    def _place(self) -> str:
        return f"item {len(self._items) - 1}" if self._items else "before the first item"

    def _begin(self, token: int, tokens: PairTokens) -> None:
        if not self._open and token == tokens.item_start:
            self._items.append((tokens, []))
        elif not self._items or self._items[-1][0] is not tokens:
            raise MediaMismatch(f"{self._place}: a crop does not belong to the item before it")
        spans = self._items[-1][1]
        if self._open:
            outer = self._open[-1]
            if tokens.data_id is None and not outer.has_inner:
                del spans[outer.first_span :]  # it was text beside crops, now that there are crops
            outer.has_inner = True
        self._open.append(_OpenPair(tokens.ends[token], len(spans)))

    def _end(self, token: int) -> None:
        if not self._open:
            raise MediaMismatch(f"{self._place}: an end token has no start token")
        pair = self._open.pop()
        if pair.end != token:
            raise MediaMismatch(f"{self._place}: its start and end tokens cross each other")
        if len(self._items[-1][1]) == pair.first_span:
            raise MediaMismatch(f"{self._place}: a start and an end token enclose nothing")


def _pairs_by_start(pairs: Sequence[PairTokens]) -> dict[int, PairTokens]:
    starts = [start for tokens in pairs for start in tokens.ends]
    ends = {end for tokens in pairs for end in tokens.ends.values()}
    data = {tokens.data_id for tokens in pairs}
    crops_without_meaning = any(tokens.crop is not None and tokens.crop[0] == tokens.item_start for tokens in pairs)
    if len(set(starts)) != len(starts) or crops_without_meaning or ends & set(starts) or data & (ends | set(starts)):
        raise InvalidRequest("a token is named twice among the start, end and placeholder tokens")
    return {start: tokens for tokens in pairs for start in tokens.ends}


# --- results ---------------------------------------------------------------------------------------------------------


def pad_ids(ids: Ids, items: Sequence[Item]) -> IdArray:
    """The full prompt with each item's sentinels at its rows.

    Args:
        ids: the full prompt; it is not written to.
        items: whose ranges' `offset` and `length` say where; their compact indices do not matter here.

    Returns:
        int64 of the same length, a new array.

    Raises:
        MediaMismatch: a range is empty, out of order, outside the prompt, or overlaps another. Names the item.
    """
    padded = id_array(ids).copy()
    taken = np.zeros(len(padded), dtype=bool)
    for index, item in enumerate(items):
        check_own_ranges(item, f"item {index}")
        if item.end > len(padded):
            raise MediaMismatch(f"item {index}: a range lies outside the prompt of {len(padded)} tokens")
        if any(taken[run.offset : run.end].any() for run in item.ranges):
            raise MediaMismatch(f"item {index}: a range overlaps another item's")
        fill, row = item_sentinels(item.identity, item.num_tokens), 0
        for run in item.ranges:
            padded[run.offset : run.end] = fill[row : row + run.length]
            taken[run.offset : run.end] = True
            row += run.length
    return padded


def _placement(array: IdArray, spans: Sequence[Sequence[Span]]) -> Placement:
    """Folds each run into its first token. The spans of all items together must ascend, as found in a prompt.

    full:     a b P P P c P P d
    compact:  a b P     c P   d
    """
    compact: list[int] = []
    ranges: list[tuple[TokenRange, ...]] = []
    cursor = 0
    for item_spans in spans:
        runs = []
        for start, length in item_spans:
            compact += array[cursor : start + 1].tolist()
            runs.append(TokenRange(len(compact) - 1, start, length))
            cursor = start + length
        ranges.append(tuple(runs))
    return Placement((*compact, *array[cursor:].tolist()), tuple(ranges))


def _stretches(is_row: npt.NDArray[np.bool_]) -> Iterator[Span]:
    """(first, length) of each maximal stretch of True."""
    edges = np.diff(np.concatenate(([False], is_row, [False])).astype(np.int8))
    for first, stop in zip(np.flatnonzero(edges == 1).tolist(), np.flatnonzero(edges == -1).tolist(), strict=True):
        yield first, stop - first
