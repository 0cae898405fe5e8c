"""The promises of `triptych/sched/encode.py`, over random streams of pictures in virtual time; and that broken policies
break them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.property.promises import Broken, assert_caught, examples, promise
from triptych.sched.aging import Aging
from triptych.sched.encode import PassBudget, PictureView, plan_batch

Policy = Callable[[Sequence[PictureView], PassBudget, Aging], list[int]]
PASS_S = 0.25  # sums of it, and quotients by powers of two, are exact
MAX_PASSES = 2000


@dataclass(frozen=True)
class Workload:
    """`pictures`: (the pass before which it comes, its patches)."""

    budget: PassBudget
    aging: Aging
    pictures: tuple[tuple[int, int], ...]


@dataclass(eq=False)
class Waiting:
    arrived: int
    num_patches: int
    last_pass: int | None = None

    def due_s(self, aging: Aging) -> float:
        return self.arrived * PASS_S + aging.patience_s + self.num_patches / aging.units_per_s


def simulate(policy: Policy, workload: Workload) -> None:
    """Until every picture had its pass. Raises Broken."""
    coming = sorted(workload.pictures)
    waiting: list[Waiting] = []
    for number in range(MAX_PASSES):
        while coming and coming[0][0] <= number:
            waiting.append(Waiting(*coming.pop(0)))
        if not coming and not waiting:
            return
        note_overdue(waiting, workload.aging, number)
        views = [PictureView(one.num_patches, (number - one.arrived) * PASS_S) for one in waiting]
        chosen = policy(views, workload.budget, workload.aging)
        check_pass(waiting, chosen, workload, number)
        waiting = [one for index, one in enumerate(waiting) if index not in chosen]
    raise Broken("not every picture had its pass")


def note_overdue(waiting: list[Waiting], aging: Aging, number: int) -> None:
    """The last pass that each may start in: as many on as pictures are due before it."""
    order = sorted(waiting, key=lambda one: one.due_s(aging))
    for place, one in enumerate(order):
        if one.last_pass is None and number * PASS_S >= one.due_s(aging):
            one.last_pass = number + place


def check_pass(waiting: list[Waiting], chosen: list[int], workload: Workload, number: int) -> None:
    budget, aging = workload.budget, workload.aging
    sizes = [waiting[index].num_patches for index in chosen]
    promise(len(set(chosen)) == len(chosen), "each once")
    promise(bool(chosen) or not waiting, "no pass is empty while pictures wait")
    promise(len(chosen) <= budget.max_items, "no more pictures than allowed")
    promise(len(chosen) <= 1 or sum(sizes) <= budget.max_patches, "the budget is kept, but for one alone")
    left_out = [one for index, one in enumerate(waiting) if index not in chosen]
    if len(chosen) < budget.max_items:
        room = budget.max_patches - sum(sizes)
        promise(all(one.num_patches > room for one in left_out), "what still fits goes along")
    for one in left_out:
        promise(one.last_pass is None or number < one.last_pass, "an overdue picture waited beyond the bound")
    if any(one.last_pass is not None for one in waiting):
        return
    ranks = [aging.rank(waiting[index].num_patches, (number - waiting[index].arrived) * PASS_S) for index in chosen]
    for one in left_out:
        rank = aging.rank(one.num_patches, (number - one.arrived) * PASS_S)
        could_replace = [given for given, size in zip(ranks, sizes, strict=True) if one.num_patches <= size]
        promise(all(given <= rank for given in could_replace), "the shorter goes first")


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Some of any size, in a stream of small ones that alone would fill every pass."""
    budget = PassBudget(draw(st.integers(8, 64)), draw(st.integers(1, 6)))
    aging = Aging(draw(st.sampled_from([0.0, 0.5, 2.0])), draw(st.sampled_from([16.0, 64.0])))
    mixed = draw(st.lists(st.tuples(st.integers(0, 10), st.integers(1, 100)), min_size=1, max_size=10))
    each_pass, length = draw(st.integers(1, 8)), draw(st.integers(1, budget.max_patches))
    stream = [(number // each_pass, length) for number in range(draw(st.integers(0, 120)))]
    return Workload(budget, aging, tuple(mixed + stream))


@examples(300)
@given(workloads())
def test_every_picture_has_its_pass_within_the_bound(workload: Workload) -> None:
    simulate(plan_batch, workload)


# --- broken policies --------------------------------------------------------------------------------------------------


def without_aging(pictures: Sequence[PictureView], budget: PassBudget, aging: Aging) -> list[int]:
    return plan_batch([replace(picture, waited_s=0.0) for picture in pictures], budget, aging)


def in_order_of_arrival(pictures: Sequence[PictureView], budget: PassBudget, aging: Aging) -> list[int]:
    chosen: list[int] = []
    for index, picture in enumerate(pictures[: budget.max_items]):
        total = sum(pictures[other].num_patches for other in chosen) + picture.num_patches
        if chosen and total > budget.max_patches:
            break
        chosen.append(index)
    return chosen


def over_budget(pictures: Sequence[PictureView], budget: PassBudget, aging: Aging) -> list[int]:
    return plan_batch(pictures, replace(budget, max_patches=budget.max_patches + 1), aging)


def one_too_many(pictures: Sequence[PictureView], budget: PassBudget, aging: Aging) -> list[int]:
    return plan_batch(pictures, replace(budget, max_items=budget.max_items + 1), aging)


def never_the_oversized(pictures: Sequence[PictureView], budget: PassBudget, aging: Aging) -> list[int]:
    chosen = plan_batch(pictures, budget, aging)
    return [index for index in chosen if pictures[index].num_patches <= budget.max_patches]


def one_at_a_time(pictures: Sequence[PictureView], budget: PassBudget, aging: Aging) -> list[int]:
    return plan_batch(pictures, budget, aging)[:1]


def largest_first(pictures: Sequence[PictureView], budget: PassBudget, aging: Aging) -> list[int]:
    chosen, left = [], budget.max_patches
    for index in sorted(range(len(pictures)), key=lambda index: -pictures[index].num_patches):
        if len(chosen) < budget.max_items and (not chosen or pictures[index].num_patches <= left):
            chosen.append(index)
            left -= pictures[index].num_patches
    return chosen


@pytest.mark.parametrize(
    ("policy", "promised"),
    [
        (without_aging, "waited beyond the bound"),
        (in_order_of_arrival, "what still fits goes along"),
        (over_budget, "the budget is kept"),
        (one_too_many, "no more pictures than allowed"),
        (never_the_oversized, "no pass is empty"),
        (one_at_a_time, "what still fits goes along"),
        (largest_first, "the shorter goes first"),
    ],
)
def test_a_broken_policy_is_caught(policy: Policy, promised: str, seed: int) -> None:
    assert_caught(workloads(), lambda workload: simulate(policy, workload), promised, seed)
