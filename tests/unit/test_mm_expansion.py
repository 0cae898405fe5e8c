"""Compact prompts to full ones and what is refused on the way."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.errors import MediaMismatch
from triptych.core.expansion import check_ranges, expand
from triptych.core.plan import Grid, Item, Modality, Plan, Sampling, TokenRange
from triptych.mm.sentinels import SENTINEL_BASE, item_sentinels

PLACEHOLDER = 7


@dataclass(frozen=True)
class Prompt:
    """`pieces` tells the truth: text tokens as they are, and (item, rows) for each run."""

    compact: tuple[int, ...]
    items: tuple[Item, ...]
    pieces: tuple[int | tuple[int, int], ...]


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    """Items with up to three runs each (row breaks stand between), text of any length around them, none also."""
    compact: list[int] = []
    items: list[Item] = []
    pieces: list[int | tuple[int, int]] = []
    offset = 0

    def text(most: int) -> None:
        nonlocal offset
        for token in draw(st.lists(st.integers(0, 500), max_size=most)):
            compact.append(token)
            pieces.append(token)
            offset += 1

    text(4)
    for number in range(draw(st.integers(0, 4))):
        ranges = []
        for _ in range(draw(st.integers(1, 3))):
            length = draw(st.integers(1, 6))
            ranges.append(TokenRange(len(compact), offset, length))
            compact.append(PLACEHOLDER)
            pieces.append((number, length))
            offset += length
            text(2)
        num_tokens = sum(run.length for run in ranges)
        items.append(Item(Modality.IMAGE, bytes([number]) * 32, num_tokens, tuple(ranges), Grid(1, 1, num_tokens)))
        text(3)
    return Prompt(tuple(compact), tuple(items), tuple(pieces))


def sentinels(prompt: Prompt) -> list[np.ndarray]:
    return [item_sentinels(item.identity, item.num_tokens) for item in prompt.items]


@given(prompts())
def test_the_full_prompt_is_text_with_each_items_rows_in_their_place(prompt: Prompt) -> None:
    fills = [iter(fill.tolist()) for fill in sentinels(prompt)]
    truth: list[int] = []
    for piece in prompt.pieces:
        truth += [piece] if isinstance(piece, int) else [next(fills[piece[0]]) for _ in range(piece[1])]
    expanded = expand(prompt.compact, prompt.items, sentinels(prompt))
    assert expanded.dtype == np.int64
    assert expanded.tolist() == truth


@given(prompts())
def test_lengths_and_offsets_agree_with_the_plan(prompt: Prompt) -> None:
    expanded = expand(prompt.compact, prompt.items, sentinels(prompt))
    plan = Plan(prompt.compact, prompt.items, Sampling(max_tokens=5), 1.0)
    assert len(expanded) == plan.num_prompt_tokens == plan.num_total_tokens - 5
    for item in prompt.items:
        rows = np.concatenate([expanded[run.offset : run.end] for run in item.ranges])
        assert rows.tolist() == item_sentinels(item.identity, item.num_tokens).tolist()
        assert (item.offset, item.end) == (item.ranges[0].offset, item.ranges[-1].end)
    assert np.count_nonzero(expanded >= SENTINEL_BASE) == sum(item.num_tokens for item in prompt.items)


@given(prompts())
def test_collapsing_the_full_prompt_gives_the_compact_one(prompt: Prompt) -> None:
    expanded = expand(prompt.compact, prompt.items, sentinels(prompt)).tolist()
    for run in sorted((run for item in prompt.items for run in item.ranges), key=lambda run: -run.offset):
        expanded[run.offset : run.end] = [PLACEHOLDER]
    assert tuple(expanded) == prompt.compact


@given(prompts().filter(lambda prompt: prompt.items), st.data())
def test_any_moved_or_resized_range_is_refused(prompt: Prompt, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(prompt.items) - 1))
    item = prompt.items[number]
    at = data.draw(st.integers(0, len(item.ranges) - 1))
    name = data.draw(st.sampled_from(["compact_index", "offset", "length"]))
    change = data.draw(st.integers(-3, 3).filter(bool))
    run = item.ranges[at]
    moved = dataclasses.replace(run, **{name: getattr(run, name) + change})
    broken = dataclasses.replace(item, ranges=(*item.ranges[:at], moved, *item.ranges[at + 1 :]))
    items = (*prompt.items[:number], broken, *prompt.items[number + 1 :])
    with pytest.raises(MediaMismatch):
        check_ranges(prompt.compact, items)
    with pytest.raises(MediaMismatch):
        expand(prompt.compact, items, sentinels(prompt))


def test_ranges_of_an_item_in_another_order_are_refused() -> None:
    """Rows are dealt out along the list, so that order decides which row stands where."""
    runs = (TokenRange(1, 1, 2), TokenRange(2, 3, 2))
    check_ranges([1, PLACEHOLDER, PLACEHOLDER, 3], [item_at(*runs)])
    with pytest.raises(MediaMismatch, match=r"item 0: .* out of order"):
        check_ranges([1, PLACEHOLDER, PLACEHOLDER, 3], [item_at(*runs[::-1])])


def test_items_in_another_order_than_the_prompts_are_refused() -> None:
    """Prefill computes up to the first item that is missing: the first in the list must be the first in the prompt."""
    first, second = item_at(TokenRange(1, 1, 2)), item_at(TokenRange(2, 3, 2))
    check_ranges([1, PLACEHOLDER, PLACEHOLDER, 3], [first, second])
    with pytest.raises(MediaMismatch, match="item 1: it stands before"):
        check_ranges([1, PLACEHOLDER, PLACEHOLDER, 3], [second, first])


def test_items_may_stand_within_each_other() -> None:
    around = item_at(TokenRange(0, 0, 2), TokenRange(2, 3, 1))
    within = item_at(TokenRange(1, 2, 1))
    fills = [np.array([11, 12, 13]), np.array([21])]
    assert expand([7, 7, 7], [around, within], fills).tolist() == [11, 12, 21, 13]


def item_at(*runs: TokenRange, num_tokens: int | None = None) -> Item:
    total = sum(run.length for run in runs)
    return Item(Modality.IMAGE, bytes(32), total if num_tokens is None else num_tokens, runs, Grid(1, 1, 1))


@pytest.mark.parametrize(
    "items",
    [
        pytest.param([item_at()], id="no range"),
        pytest.param([item_at(TokenRange(1, 1, 0))], id="an empty range"),
        pytest.param([item_at(TokenRange(1, 1, 2), num_tokens=3)], id="lengths that do not add up"),
        pytest.param([item_at(TokenRange(1, 1, -1))], id="a negative length"),
        pytest.param([item_at(TokenRange(-1, -1, 2))], id="before the prompt"),
        pytest.param([item_at(TokenRange(4, 4, 2))], id="behind the prompt"),
        pytest.param([item_at(TokenRange(1, 1, 2)), item_at(TokenRange(1, 1, 2))], id="two items in one place"),
        pytest.param([item_at(TokenRange(1, 1, 2), TokenRange(1, 2, 2))], id="two ranges in one place"),
        pytest.param([item_at(TokenRange(1, 2, 2))], id="an offset that is not where it is"),
    ],
)
def test_malformed_items_are_refused(items: list[Item]) -> None:
    with pytest.raises(MediaMismatch):
        check_ranges([1, PLACEHOLDER, 2, 3], items)
