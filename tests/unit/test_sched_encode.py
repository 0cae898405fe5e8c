"""Which pictures share a pass."""

from __future__ import annotations

import pytest

from triptych.sched.aging import Aging
from triptych.sched.encode import PassBudget, PictureView, plan_batch, plan_entry

BUDGET = PassBudget(max_patches=100, max_items=4)
AGING = Aging(patience_s=1.0, units_per_s=100.0)


def plan(*pictures: int | tuple[int, float]) -> list[int]:
    """From patches, or patches and seconds of waiting."""
    views = [PictureView(*one) if isinstance(one, tuple) else PictureView(one, 0.0) for one in pictures]
    return plan_batch(views, BUDGET, AGING)


@pytest.mark.parametrize(
    ("patches", "chosen"),
    [
        ([], []),
        ([100], [0]),
        ([101], [0]),  # alone it goes, however large
        ([101, 102], [0]),
        ([50, 50], [0, 1]),
        ([50, 51], [0]),
        ([60, 50, 10], [2, 1]),  # the short first
        ([10] * 9, [0, 1, 2, 3]),
        ([101, 5], [1]),  # what is larger than a pass waits for one of its own
    ],
)
def test_a_pass_takes_the_short_first_as_many_as_fit(patches: list[int], chosen: list[int]) -> None:
    assert plan(*patches) == chosen


def test_waiting_makes_shorter() -> None:
    assert plan(60, (80, 0.3)) == [1]
    assert plan(60, (80, 0.1)) == [0]


def test_the_overdue_go_first_and_what_still_fits_goes_along() -> None:
    assert plan(10, (90, 2.0)) == [1, 0]
    assert plan(10, (95, 2.0)) == [1]
    assert plan((20, 1.3), (90, 2.0), (30, 1.9)) == [2, 0]  # the third is the latest; the second no longer fits
    assert plan(1, (500, 6.0)) == [1]


@pytest.mark.parametrize(
    ("pictures", "left", "is_empty", "chosen"),
    [
        ([], 100, True, []),
        ([50, 60, 40], 100, False, [2, 0]),
        ([50, 200], 100, False, [0]),
        ([200, 300], 100, True, [0]),  # alone, whatever its size
        ([200, 50], 100, True, [1]),
        ([200], 100, False, []),
        ([10, (90, 2.0)], 50, False, []),  # an overdue one lets nobody by
        ([10, (90, 1.5)], 50, False, [0]),  # before it is overdue it does
        ([10, (90, 2.0)], 90, False, [1]),
        ([10, (190, 3.0)], 100, True, [1]),
    ],
)
def test_room_is_given_in_the_order_of_passes(
    pictures: list[int | tuple[int, float]], left: int, is_empty: bool, chosen: list[int]
) -> None:
    views = [PictureView(*one) if isinstance(one, tuple) else PictureView(one, 0.0) for one in pictures]
    assert plan_entry(views, left, is_empty, AGING) == chosen
