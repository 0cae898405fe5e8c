"""Which waiting pictures share the next pass of the vision tower: by a budget in patches.

Shortest first with aging (`triptych.sched.aging`), and then whatever still fits. Who needs the same picture does not
show here: one computation serves all of them (`triptych.stages.embeddings`).

**Bound.** The first of the order goes into the pass whatever its size, and the overdue are first, the longest so before
all. So a picture that has waited for `patience_s + patches / units_per_s` starts after at most as many further passes
as there are pictures overdue for longer, however many small ones arrive.

Cost: O(n log n) in the number of waiting pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.sched.aging import Aging

# A small picture may be passed for a second, one that fills a pass of 16,384 patches for two.
PICTURE_AGING = Aging(patience_s=1.0, units_per_s=16384.0)


@dataclass(frozen=True, slots=True)
class PictureView:
    """What the policy may know of a waiting picture."""

    num_patches: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class PassBudget:
    """Limits of one pass. A picture of more than `max_patches` has a pass to itself."""

    max_patches: int
    max_items: int


def plan_batch(pictures: Sequence[PictureView], budget: PassBudget, aging: Aging = PICTURE_AGING) -> list[int]:
    """Indices of those that go into the next pass: at least one, if one waits."""
    chosen: list[int] = []
    left = budget.max_patches
    for index in sorted(range(len(pictures)), key=lambda index: _turn(pictures[index], aging, index)):
        if len(chosen) >= budget.max_items:
            break
        if not chosen or pictures[index].num_patches <= left:
            chosen.append(index)
            left -= pictures[index].num_patches
    return chosen


def plan_entry(
    pictures: Sequence[PictureView], left_patches: int, is_empty: bool, aging: Aging = PICTURE_AGING
) -> list[int]:
    """Indices of those whose bytes may be fetched now, with room for `left_patches` more between fetching and the pass.

    In the order of passes. What does not fit lets smaller ones by until it is overdue, and then nobody. When the room
    `is_empty` the first goes in whatever its size.
    """
    chosen: list[int] = []
    for index in sorted(range(len(pictures)), key=lambda index: _turn(pictures[index], aging, index)):
        picture = pictures[index]
        if picture.num_patches <= left_patches or (is_empty and not chosen):
            chosen.append(index)
            left_patches -= picture.num_patches
        elif aging.lateness_s(picture.num_patches, picture.waited_s) >= 0:
            break
    return chosen


def _turn(picture: PictureView, aging: Aging, index: int) -> tuple[int, float, int]:
    lateness_s = aging.lateness_s(picture.num_patches, picture.waited_s)
    if lateness_s >= 0:
        return 0, -lateness_s, index
    return 1, aging.rank(picture.num_patches, picture.waited_s), index
