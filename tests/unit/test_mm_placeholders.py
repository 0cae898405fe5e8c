"""From token ids to ranges: runs of placeholder tokens, and what start and end tokens enclose."""

from __future__ import annotations

import numpy as np
import pytest

from triptych.core.errors import InvalidRequest, MediaMismatch
from triptych.core.plan import Grid, Item, Modality, TokenRange
from triptych.mm.placeholders import (
    ItemRuns,
    PairTokens,
    Placement,
    pad_ids,
    place_by_pairs,
    place_by_token,
)
from triptych.mm.sentinels import SENTINEL_BASE, item_sentinels

PIC, VID, AUD = 91, 92, 93
TOKENS = {PIC: Modality.IMAGE, VID: Modality.VIDEO, AUD: Modality.AUDIO}
IMAGE, VIDEO, AUDIO = ItemRuns(Modality.IMAGE), ItemRuns(Modality.VIDEO), ItemRuns(Modality.AUDIO)


def image(*lengths: int) -> ItemRuns:
    return ItemRuns(Modality.IMAGE, lengths)


def spans(placement: Placement) -> list[list[tuple[int, int]]]:
    return [[(run.offset, run.length) for run in runs] for runs in placement.ranges]


# --- placeholder tokens -----------------------------------------------------------------------------------------------


def test_each_item_takes_one_run_of_its_modality() -> None:
    ids = [1, PIC, PIC, PIC, 2, VID, VID, AUD, 3, PIC]
    found = place_by_token(ids, TOKENS, [IMAGE, VIDEO, AUDIO, IMAGE])
    assert spans(found) == [[(1, 3)], [(5, 2)], [(7, 1)], [(9, 1)]]
    assert found.compact_ids == (1, PIC, 2, VID, AUD, 3, PIC)
    assert [run.compact_index for runs in found.ranges for run in runs] == [1, 3, 4, 6]


def test_an_item_may_own_several_runs() -> None:
    ids = [PIC, PIC, 7, PIC, PIC, 7, PIC, 8, PIC]
    found = place_by_token(ids, TOKENS, [image(2, 2, 1), image(1)])
    assert spans(found) == [[(0, 2), (3, 2), (6, 1)], [(8, 1)]]


def test_with_lengths_items_may_stand_side_by_side() -> None:
    found = place_by_token([PIC] * 7 + [5], TOKENS, [image(3), image(2, 2)])
    assert spans(found) == [[(0, 3)], [(3, 2), (5, 2)]]
    assert found.compact_ids == (PIC, PIC, PIC, 5)


def test_no_items_and_no_placeholders() -> None:
    assert place_by_token([1, 2], TOKENS, []) == Placement((1, 2), ())
    assert place_by_token([], TOKENS, []) == Placement((), ())


@pytest.mark.parametrize(
    ("ids", "items", "complaint"),
    [
        pytest.param([1, PIC], [IMAGE, IMAGE], "item 1: the prompt holds no placeholder", id="a run too few"),
        pytest.param([PIC, 1, PIC], [IMAGE], "more placeholders than its 1 items", id="a run too many"),
        pytest.param([PIC, PIC], [image(1)], "more placeholders", id="a token too many"),
        pytest.param([PIC, PIC], [image(3)], "item 0: the prompt has 2 placeholders where 3", id="a token too few"),
        pytest.param([PIC, 1, VID], [IMAGE, IMAGE], "item 1 is image; .* video", id="another modality"),
        pytest.param([PIC, VID], [image(2)], "item 0: the prompt has 1", id="a run that goes over to another modality"),
        pytest.param([PIC], [image()], "item 0: a run of an item has at least one", id="an item without a run"),
        pytest.param([PIC], [image(0, 1)], "item 0: a run of an item has at least one", id="an empty run"),
        pytest.param([PIC], [image(-1)], "item 0: a run of an item has at least one", id="a negative run"),
        pytest.param([1, 2], [AUDIO], "item 0: the prompt holds no placeholder", id="no placeholder at all"),
    ],
)
def test_runs_that_are_not_the_items_are_refused(ids: list[int], items: list[ItemRuns], complaint: str) -> None:
    with pytest.raises(MediaMismatch, match=complaint):
        place_by_token(ids, TOKENS, items)


# --- start and end tokens ---------------------------------------------------------------------------------------------

S, E, CS, CE, D = 81, 82, 83, 84, 80
PAIRS = [PairTokens(Modality.IMAGE, S, E, crop=(CS, CE))]
WITH_DATA = [PairTokens(Modality.IMAGE, S, E, crop=(CS, CE), data_id=D)]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        pytest.param([1, S, 5, 6, E, 2], [[(2, 2)]], id="one pair"),
        pytest.param([S, 5, E, S, 6, 7, E], [[(1, 1)], [(4, 2)]], id="two pairs"),
        pytest.param([S, CS, 5, CE, CS, 6, 7, CE, E], [[(2, 1), (5, 2)]], id="crops within"),
        pytest.param([S, 9, CS, 5, CE, 9, CS, 6, CE, 9, E], [[(3, 1), (7, 1)]], id="text beside crops is no row"),
        pytest.param(
            [S, 5, E, CS, 6, CE, 9, CS, 7, CE, 1, S, 8, E], [[(1, 1), (4, 1), (8, 1)], [(12, 1)]], id="behind"
        ),
        pytest.param([S, S, 5, E, S, 6, E, E], [[(2, 1), (5, 1)]], id="pictures within a picture"),
        pytest.param([S, CS, CS, 5, CE, CE, E], [[(3, 1)]], id="a crop of a crop"),
        pytest.param([S, 5, E, CS, S, 6, E, 9, S, 7, E, CE], [[(1, 1), (5, 1), (9, 1)]], id="pictures within a crop"),
    ],
)
def test_rows_are_what_innermost_pairs_enclose(ids: list[int], expected: list[list[tuple[int, int]]]) -> None:
    found = place_by_pairs(ids, PAIRS, [IMAGE] * len(expected))
    assert spans(found) == expected
    with_lengths = [image(*(length for _, length in runs)) for runs in expected]
    assert place_by_pairs(ids, PAIRS, with_lengths) == found


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        pytest.param([S, D, D, 9, D, E], [[(1, 2), (4, 1)]], id="row breaks"),
        pytest.param([S, D, D, CS, D, CE, 9, CS, D, CE, E], [[(1, 2), (4, 1), (8, 1)]], id="an overview and its crops"),
        pytest.param([S, 9, D, D, 9, E, D][:-1], [[(2, 2)]], id="text at both ends"),
    ],
)
def test_with_a_placeholder_token_only_those_are_rows(ids: list[int], expected: list[list[tuple[int, int]]]) -> None:
    assert spans(place_by_pairs(ids, WITH_DATA, [IMAGE] * len(expected))) == expected


def test_several_modalities_each_with_their_tokens() -> None:
    pairs = [PairTokens(Modality.IMAGE, S, E), PairTokens(Modality.AUDIO, 71, 72)]
    found = place_by_pairs([S, 5, E, 71, 6, 7, 72, S, 8, E], pairs, [IMAGE, AUDIO, IMAGE])
    assert spans(found) == [[(1, 1)], [(4, 2)], [(8, 1)]]


@pytest.mark.parametrize(
    ("ids", "items", "complaint"),
    [
        pytest.param([1, S, 5], [IMAGE], "item 0: a start token has no end", id="a start without an end"),
        pytest.param(
            [S, 5, E, S, CS, 6, CE], [IMAGE, IMAGE], "item 1: a start token has no end", id="an open outer pair"
        ),
        pytest.param([5, E], [IMAGE], "before the first item: an end token has no start", id="an end without a start"),
        pytest.param([S, 5, E, 6, E], [IMAGE], "item 0: an end token has no start", id="two ends"),
        pytest.param([S, CS, 5, E, CE], [IMAGE], "item 0: its start and end tokens cross", id="crossing"),
        pytest.param([S, E], [IMAGE], "item 0: .* enclose nothing", id="nothing"),
        pytest.param([S, 5, E, S, CS, CE, E], [IMAGE, IMAGE], "item 1: .* enclose nothing", id="an empty crop"),
        pytest.param([CS, 5, CE], [IMAGE], "before the first item: a crop does not belong", id="a crop of nothing"),
        pytest.param([S, 5, E], [], "encloses 1 items in start and end tokens; 0 were given", id="an item too few"),
        pytest.param([S, 5, E], [IMAGE, IMAGE], "item 1: the prompt holds no start token", id="an item too many"),
        pytest.param([S, 5, 6, E], [image(1)], r"item 0: its runs have \[1\] tokens, .* \[2\]", id="another length"),
        pytest.param([S, 5, E], [AUDIO], "item 0 is audio; the prompt encloses image", id="another modality"),
    ],
)
def test_pairs_that_do_not_match_are_refused(ids: list[int], items: list[ItemRuns], complaint: str) -> None:
    with pytest.raises(MediaMismatch, match=complaint):
        place_by_pairs(ids, PAIRS, items)


def test_a_placeholder_outside_of_any_pair_is_refused() -> None:
    for ids in ([D, S, D, E], [S, D, E, D], [S, D, E, 1, D, 2, S, D, E]):
        with pytest.raises(MediaMismatch, match="outside of start and end"):
            place_by_pairs(ids, WITH_DATA, [IMAGE])
    with pytest.raises(MediaMismatch, match="enclose nothing"):
        place_by_pairs([S, 5, 6, E], WITH_DATA, [IMAGE])


def test_a_crop_of_another_modality_is_refused() -> None:
    pairs = [PairTokens(Modality.IMAGE, S, E, crop=(CS, CE)), PairTokens(Modality.AUDIO, 71, 72)]
    for ids in ([71, 5, 72, CS, 6, CE], [S, 71, 5, 72, E]):
        with pytest.raises(MediaMismatch, match="item 0: a crop does not belong"):
            place_by_pairs(ids, pairs, [IMAGE])


@pytest.mark.parametrize(
    "pairs",
    [
        [PairTokens(Modality.IMAGE, S, S)],
        [PairTokens(Modality.IMAGE, S, E, crop=(S, CE))],
        [PairTokens(Modality.IMAGE, S, E, crop=(E, S))],
        [PairTokens(Modality.IMAGE, S, E, data_id=E)],
        [PairTokens(Modality.IMAGE, S, E), PairTokens(Modality.AUDIO, S, CE)],
    ],
)
def test_a_token_with_two_meanings_is_refused(pairs: list[PairTokens]) -> None:
    with pytest.raises(InvalidRequest, match="named twice"):
        place_by_pairs([1], pairs, [])


# --- padding ----------------------------------------------------------------------------------------------------------


def item(number: int, *runs: tuple[int, int]) -> Item:
    ranges = tuple(TokenRange(index, offset, length) for index, (offset, length) in enumerate(runs))
    total = sum(length for _, length in runs)
    return Item(Modality.IMAGE, bytes([number]) * 32, total, ranges, Grid(1, 1, 1))


def test_sentinels_stand_at_the_rows_and_go_on_from_run_to_run() -> None:
    ids = np.array([1, 2**31, 3, 4, 5, 2**40, 7, 8], dtype=np.int64)
    padded = pad_ids(ids, [item(1, (1, 2), (4, 3))])
    fill = item_sentinels(bytes([1]) * 32, 5)
    assert padded.tolist() == [1, *fill[:2].tolist(), 4, *fill[2:].tolist(), 8]
    assert ids.tolist() == [1, 2**31, 3, 4, 5, 2**40, 7, 8]


def test_wide_ids_and_wide_sentinels_survive() -> None:
    wide = [2**31, 2**32 + 1, 2**62, 2**63 - 1, -(2**63), 0]
    padded = pad_ids(wide, [item(3, (5, 1))])
    assert padded.dtype == np.int64
    assert padded[:5].tolist() == wide[:5]
    assert SENTINEL_BASE <= padded[5] < SENTINEL_BASE + 2**62
    assert max(int(pad_ids([0], [item(n, (0, 1))])[0]) for n in range(50)) > 2**60


@pytest.mark.parametrize(
    ("items", "complaint"),
    [
        ([item(1, (1, 2)), item(2, (2, 2))], "item 1: a range overlaps"),
        ([item(1, (0, 4)), item(2, (1, 1))], "item 1: a range overlaps"),
        ([item(1, (0, 1)), item(2, (3, 2))], "item 1: a range lies outside the prompt of 4"),
        ([item(1, (4, 1))], "item 0: a range lies outside"),
        ([item(1, (2, 1), (0, 1))], "item 0: a range is empty, out of order"),
        ([item(1, (0, 2), (1, 1))], "item 0: a range is empty, out of order"),
        ([item(1, (-1, 1))], "item 0: a range is empty, out of order"),
        ([item(1, (0, 0))], "item 0"),
        ([item(1)], "item 0"),
    ],
)
def test_ranges_that_do_not_fit_are_refused(items: list[Item], complaint: str) -> None:
    with pytest.raises(MediaMismatch, match=complaint):
        pad_ids([1, 2, 3, 4], items)


@pytest.mark.parametrize(
    "ids",
    [
        [1.0, 2.0],
        [1, 2.5],
        np.array([1.0, 2.0]),
        [True, False],
        [[1, 2], [3, 4]],
        np.zeros((2, 2), np.int64),
        [2**63],
        [-1, 2**63],
        np.array([2**63], dtype=np.uint64),
        ["1", "2"],
    ],
)
def test_what_are_no_ids_is_refused_and_never_rounded(ids: object) -> None:
    for work in (lambda: pad_ids(ids, []), lambda: place_by_token(ids, TOKENS, [])):  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="whole numbers"):
            work()


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.uint64, np.int64])
def test_any_whole_numbers_are_ids(dtype: type) -> None:
    padded = pad_ids(np.array([1, 2, 3], dtype=dtype), [item(1, (1, 1))])
    assert padded.dtype == np.int64
    assert padded[[0, 2]].tolist() == [1, 3]
