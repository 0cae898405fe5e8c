"""Whatever the prompt: lengths stay, arguments stay, and places found are places filled."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.errors import MediaMismatch
from triptych.core.expansion import expand
from triptych.core.plan import Grid, Item, Modality
from triptych.mm.placeholders import ItemRuns, PairTokens, Placement, pad_ids, place_by_pairs, place_by_token
from triptych.mm.sentinels import SENTINEL_BASE, item_sentinels

TOKENS = {91: Modality.IMAGE, 92: Modality.VIDEO, 93: Modality.AUDIO}
TOKEN_OF = {modality: token for token, modality in TOKENS.items()}
PAIRS = [
    PairTokens(Modality.IMAGE, 81, 82, crop=(83, 84)),
    PairTokens(Modality.VIDEO, 71, 72, crop=(73, 74)),
    PairTokens(Modality.AUDIO, 61, 62),
]
text_ids = st.integers(100, 2**63 - 1) | st.integers(-(2**63), -1)


@dataclass(frozen=True)
class Prompt:
    """A full prompt, and the truth about its items: modality, and (offset, length) of each run."""

    ids: tuple[int, ...]
    items: tuple[tuple[Modality, tuple[tuple[int, int], ...]], ...]

    @property
    def runs(self) -> list[ItemRuns]:
        return [ItemRuns(modality, tuple(length for _, length in spans)) for modality, spans in self.items]


@st.composite
def token_prompts(draw: st.DrawFn) -> Prompt:
    """Runs of placeholder tokens, several to an item, with or without text between items."""
    ids: list[int] = draw(st.lists(text_ids, max_size=3))
    items = []
    for modality in draw(st.lists(st.sampled_from(Modality), max_size=5)):
        spans = []
        for length in draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)):
            spans.append((len(ids), length))
            ids += [TOKEN_OF[modality]] * length + draw(st.lists(text_ids, max_size=2))
        items.append((modality, tuple(spans)))
    return Prompt(tuple(ids), tuple(items))


@st.composite
def pair_prompts(draw: st.DrawFn) -> Prompt:
    """Pairs, with crops within or behind them, and text around."""
    ids: list[int] = draw(st.lists(text_ids, max_size=3))
    items = []

    def rows(start: int, end: int, spans: list[tuple[int, int]]) -> None:
        data = draw(st.lists(text_ids, min_size=1, max_size=4))
        spans.append((len(ids) + 1, len(data)))
        ids.extend([start, *data, end])

    for pair in draw(st.lists(st.sampled_from(PAIRS), max_size=4)):
        spans: list[tuple[int, int]] = []
        crops = draw(st.integers(0, 3)) if pair.crop is not None else 0
        if crops and draw(st.booleans()):
            ids.append(pair.item_start)
            for _ in range(crops):
                ids.extend(draw(st.lists(text_ids, max_size=2)))
                rows(*(pair.crop or (0, 0)), spans)
            ids.append(pair.item_end)
        else:
            rows(pair.item_start, pair.item_end, spans)
            for _ in range(crops):
                ids.extend(draw(st.lists(text_ids, max_size=2)))
                rows(*(pair.crop or (0, 0)), spans)
        ids.extend(draw(st.lists(text_ids, max_size=2)))
        items.append((pair.modality, tuple(spans)))
    return Prompt(tuple(ids), tuple(items))


def place(prompt: Prompt) -> Placement:
    return place_by_token(prompt.ids, TOKENS, prompt.runs)


def place_pairs(prompt: Prompt) -> Placement:
    return place_by_pairs(prompt.ids, PAIRS, prompt.runs)


def placed_items(prompt: Prompt, placement: Placement) -> list[Item]:
    return [
        Item(modality, bytes([number]) * 32, sum(run.length for run in ranges), ranges, Grid(1, 1, 1))
        for number, ((modality, _), ranges) in enumerate(zip(prompt.items, placement.ranges, strict=True))
    ]


def sentinels(items: list[Item]) -> list[np.ndarray]:
    return [item_sentinels(item.identity, item.num_tokens) for item in items]


both = pytest.mark.parametrize(
    ("prompts", "placing"), [(token_prompts(), place), (pair_prompts(), place_pairs)], ids=["tokens", "pairs"]
)


@both
@given(data=st.data())
def test_places_are_found_and_expanding_gives_the_prompt_again(
    prompts: st.SearchStrategy[Prompt], placing: Callable[[Prompt], Placement], data: st.DataObject
) -> None:
    prompt = data.draw(prompts)
    found = placing(prompt)
    truth = [spans for _, spans in prompt.items]
    assert [tuple((run.offset, run.length) for run in runs) for runs in found.ranges] == truth
    items = placed_items(prompt, found)
    own_ids = [
        np.concatenate([np.array(prompt.ids[run.offset : run.end], dtype=np.int64) for run in item.ranges])
        for item in items
    ]
    assert expand(found.compact_ids, items, own_ids).tolist() == list(prompt.ids)


@both
@given(data=st.data())
def test_padding_keeps_the_length_and_is_what_every_stage_expands_to(
    prompts: st.SearchStrategy[Prompt], placing: Callable[[Prompt], Placement], data: st.DataObject
) -> None:
    prompt = data.draw(prompts)
    placement = placing(prompt)
    items = placed_items(prompt, placement)
    padded = pad_ids(prompt.ids, items)
    assert padded.dtype == np.int64
    assert len(padded) == len(prompt.ids)
    assert np.array_equal(padded, expand(placement.compact_ids, items, sentinels(items)))
    rows = {index for item in items for run in item.ranges for index in range(run.offset, run.end)}
    assert all(
        padded[index] >= SENTINEL_BASE if index in rows else padded[index] == prompt.ids[index]
        for index in range(len(padded))
    )


@given(token_prompts(), st.data())
def test_a_prompt_with_one_placeholder_more_or_less_is_refused(prompt: Prompt, data: st.DataObject) -> None:
    token = data.draw(st.sampled_from(sorted(TOKENS)))
    longer = (*prompt.ids, token)
    with pytest.raises(MediaMismatch):
        place_by_token(longer, TOKENS, prompt.runs)
    at = [index for index, each in enumerate(prompt.ids) if each in TOKENS]
    if at:
        gone = data.draw(st.sampled_from(at))
        with pytest.raises(MediaMismatch):
            place_by_token(prompt.ids[:gone] + prompt.ids[gone + 1 :], TOKENS, prompt.runs)


@given(pair_prompts().filter(lambda prompt: prompt.items), st.data())
def test_a_prompt_that_lacks_one_mark_is_refused(prompt: Prompt, data: st.DataObject) -> None:
    marks = {mark for pair in PAIRS for start, end in pair.ends.items() for mark in (start, end)}
    gone = data.draw(st.sampled_from([index for index, each in enumerate(prompt.ids) if each in marks]))
    with pytest.raises(MediaMismatch):
        place_by_pairs(prompt.ids[:gone] + prompt.ids[gone + 1 :], PAIRS, prompt.runs)


# --- nothing is changed -----------------------------------------------------------------------------------------------


def forms(ids: tuple[int, ...]) -> list[Any]:
    """The same ids as whatever a caller may have: tuples, lists, arrays that can be written to and that cannot."""
    writable = np.array(ids, dtype=np.int64)
    locked = writable.copy()
    locked.setflags(write=False)
    return [ids, list(ids), writable, locked, writable.repeat(2)[::2]]


@both
@given(data=st.data())
def test_arguments_are_never_written_to_and_results_are_nobodys_memory(
    prompts: st.SearchStrategy[Prompt], placing: Callable[[Prompt], Placement], data: st.DataObject
) -> None:
    prompt = data.draw(prompts)
    placement = placing(prompt)
    items = placed_items(prompt, placement)
    fills = sentinels(items)
    for fill in fills:
        fill.setflags(write=False)
    works: list[Callable[[Any, Any], np.ndarray]] = [
        lambda full, _: pad_ids(full, items),
        lambda _, compact: expand(compact, items, fills),
    ]
    for full, compact in zip(forms(prompt.ids), forms(placement.compact_ids), strict=True):
        before = copy.deepcopy((full, compact, items, fills))
        for work in works:
            first = work(full, compact)
            assert first.flags.owndata or first.base is not full
            first[:] = -1  # whoever gets a result may do with it what they like
            assert np.array_equal(work(full, compact), pad_ids(prompt.ids, items))
        after = (full, compact, items, fills)
        assert type(before[0]) is type(after[0])
        assert all(np.array_equal(was, now) for was, now in zip(before[:2], after[:2], strict=True))
        assert before[2] == after[2]
        assert all(np.array_equal(was, now) for was, now in zip(before[3], after[3], strict=True))


@both
@given(data=st.data())
def test_placing_reads_any_form_and_changes_none(
    prompts: st.SearchStrategy[Prompt], placing: Callable[[Prompt], Placement], data: st.DataObject
) -> None:
    prompt = data.draw(prompts)
    for form in forms(prompt.ids):
        before = copy.deepcopy(form)
        placed = placing(dataclasses.replace(prompt, ids=form))
        assert placed == placing(prompt)
        assert np.array_equal(before, form)
        assert all(type(each) is int for each in placed.compact_ids)
