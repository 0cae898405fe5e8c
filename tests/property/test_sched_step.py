"""The promises of `triptych/sched/language.py`, over random workloads in virtual time; and that broken policies break
them, so that the checks are worth something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.property.promises import assert_caught, examples
from tests.property.step_model import Policy, Prompt, Simulation, Workload, check_step, workloads
from triptych.sched.aging import Aging
from triptych.sched.language import SequenceView, Slice, StepBudget, plan_step


@examples(300)
@given(workloads())
def test_everybody_is_served_within_the_bound(workload: Workload) -> None:
    Simulation(plan_step, workload).run()


@st.composite
def views(draw: st.DrawFn) -> SequenceView:
    num_prompt = draw(st.integers(1, 80))
    num_computed = draw(st.integers(0, num_prompt))
    waited_s, priority = draw(st.floats(0, 100)), draw(st.integers(-100, 100))
    if draw(st.booleans()):
        return SequenceView(num_prompt + num_computed, num_prompt, num_prompt, True, waited_s, priority)
    num_ready = draw(st.integers(num_computed, num_prompt))
    return SequenceView(num_computed, num_ready, num_prompt, False, waited_s, priority)


@given(
    st.lists(views(), max_size=20),
    st.builds(StepBudget, st.integers(1, 60), st.integers(1, 40), st.integers(1, 20)),
    st.builds(Aging, st.floats(0, 50), st.floats(1, 100)),
)
def test_any_step_keeps_the_rules(given_views: list[SequenceView], budget: StepBudget, aging: Aging) -> None:
    if budget.max_tokens > 1:
        check_step(given_views, plan_step(given_views, budget, aging), budget)
    else:
        assert sum(piece.count for piece in plan_step(given_views, budget, aging)) <= 1


def test_a_hundred_pictures_neither_starve_nor_are_starved() -> None:
    """256 tokens each, one every other step, in a stream of short prompts that would take the whole budget."""
    budget, aging = StepBudget(1024, 512, 32), Aging(2.0, 2048.0)
    album = tuple((256 * number, 2 * number) for number in range(1, 101))
    short = [Prompt(step, ((128, 0),), 0, 1) for step in range(150) for _ in range(8)]
    simulation = Simulation(plan_step, Workload(budget, aging, (Prompt(0, album, 0, 1), *short)))
    simulation.run()


# --- broken policies --------------------------------------------------------------------------------------------------


def without_aging(views: Sequence[SequenceView], budget: StepBudget, aging: Aging) -> list[Slice]:
    return plan_step([replace(view, waited_s=0.0) for view in views], budget, aging)


def without_priority(views: Sequence[SequenceView], budget: StepBudget, aging: Aging) -> list[Slice]:
    return plan_step([replace(view, priority=0) for view in views], budget, aging)


def with_priority_upside_down(views: Sequence[SequenceView], budget: StepBudget, aging: Aging) -> list[Slice]:
    return plan_step([replace(view, priority=-view.priority) for view in views], budget, aging)


def over_budget(views: Sequence[SequenceView], budget: StepBudget, aging: Aging) -> list[Slice]:
    return plan_step(views, replace(budget, max_tokens=budget.max_tokens + 1), aging)


def beyond_a_chunk(views: Sequence[SequenceView], budget: StepBudget, aging: Aging) -> list[Slice]:
    return plan_step(views, replace(budget, max_chunk_tokens=budget.max_chunk_tokens + 1), aging)


def past_the_missing_embedding(views: Sequence[SequenceView], budget: StepBudget, aging: Aging) -> list[Slice]:
    ready = [view if view.is_decoding else replace(view, num_ready=view.num_prompt) for view in views]
    return plan_step(ready, budget, aging)


def one_prompt_a_step(views: Sequence[SequenceView], budget: StepBudget, aging: Aging) -> list[Slice]:
    slices = plan_step(views, budget, aging)
    prompts = [piece for piece in slices if not views[piece.index].is_decoding]
    return [piece for piece in slices if views[piece.index].is_decoding] + prompts[:1]


def short_chunks_beside_others(views: Sequence[SequenceView], budget: StepBudget, aging: Aging) -> list[Slice]:
    return plan_step(views, replace(budget, min_partial_tokens=1), aging)


def prompts_first(views: Sequence[SequenceView], budget: StepBudget, aging: Aging) -> list[Slice]:
    prompts = plan_step([replace(view, is_decoding=False) for view in views], budget, aging)
    return prompts or plan_step(views, budget, aging)


def overdue_take_all(views: Sequence[SequenceView], budget: StepBudget, aging: Aging) -> list[Slice]:
    """The longest overdue first, in everything."""
    urgent = [
        replace(view, priority=-1000) if aging.lateness_s(view.num_prompt, view.waited_s) >= 0 else view
        for view in views
    ]
    return plan_step(urgent, budget, aging)


def first_come_first_served(views: Sequence[SequenceView], budget: StepBudget, aging: Aging) -> list[Slice]:
    return plan_step(views, budget, Aging(1e6, 1e6))


def longest_first(views: Sequence[SequenceView], budget: StepBudget, aging: Aging) -> list[Slice]:
    order = sorted(range(len(views)), key=lambda index: views[index].num_computed - views[index].num_prompt)
    slices, left = [], budget.max_tokens
    for index in [i for i in order if views[i].is_decoding] + [i for i in order if not views[i].is_decoding]:
        ready = 1 if views[index].is_decoding else views[index].num_ready - views[index].num_computed
        count = min(ready, budget.max_chunk_tokens, left)
        if count > 0:
            slices.append(Slice(index, count))
            left -= count
    return slices


STARVED = "an overdue prompt got nothing"
OUT_OF_TURN = "a more urgent or a shorter one wanted"


@pytest.mark.parametrize(
    ("policy", "promise"),
    [
        (without_aging, STARVED),
        (without_priority, OUT_OF_TURN),
        (with_priority_upside_down, OUT_OF_TURN),
        (over_budget, "the budget is kept"),
        (beyond_a_chunk, "at most a chunk"),
        (past_the_missing_embedding, "a slice holds what can run"),
        (one_prompt_a_step, "the budget is used"),
        (short_chunks_beside_others, "a short partial chunk runs alone"),
        (prompts_first, "decoding sequences come first"),
        (overdue_take_all, "more than their share"),
        (first_come_first_served, STARVED),
        (longest_first, OUT_OF_TURN),
    ],
)
def test_a_broken_policy_is_caught(policy: Policy, promise: str, seed: int) -> None:
    assert_caught(workloads(), lambda workload: Simulation(policy, workload).run(), promise, seed)
