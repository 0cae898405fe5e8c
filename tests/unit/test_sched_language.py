"""Which tokens run next."""

from __future__ import annotations

import random

from triptych.sched.language import SequenceView, Slice, StepBudget, plan_step

BUDGET = StepBudget(max_tokens=100, max_chunk_tokens=40, min_partial_tokens=8)


def decoding(num_computed: int = 50) -> SequenceView:
    return SequenceView(num_computed, num_computed, 20, is_decoding=True)


def prompt(num_prompt: int, num_computed: int = 0, num_ready: int | None = None) -> SequenceView:
    return SequenceView(num_computed, num_prompt if num_ready is None else num_ready, num_prompt, is_decoding=False)


def test_decoding_sequences_come_first_wherever_they_stand() -> None:
    views = [prompt(30), decoding(), prompt(30), decoding()]
    assert plan_step(views, BUDGET) == [Slice(1, 1), Slice(3, 1), Slice(0, 30), Slice(2, 30)]


def test_prompts_share_what_is_left_of_the_budget_in_order_of_arrival() -> None:
    views = [decoding(), prompt(35), prompt(40), prompt(30), prompt(30)]
    assert plan_step(views, BUDGET) == [Slice(0, 1), Slice(1, 35), Slice(2, 40), Slice(3, 24)]


def test_no_prompt_takes_more_than_its_chunk() -> None:
    assert plan_step([prompt(500, 120)], BUDGET) == [Slice(0, 40)]


def test_a_chunk_ends_at_the_first_missing_embedding() -> None:
    assert plan_step([prompt(60, 10, num_ready=23)], BUDGET) == [Slice(0, 13)]


def test_a_prompt_that_waits_for_an_embedding_does_not_hold_up_the_next() -> None:
    assert plan_step([prompt(60, 23, num_ready=23), prompt(10)], BUDGET) == [Slice(1, 10)]


def test_a_short_partial_chunk_waits_while_others_run() -> None:
    views = [prompt(60, 0, num_ready=7), prompt(10)]
    assert plan_step(views, BUDGET) == [Slice(1, 10)]
    assert plan_step([prompt(60, 0, num_ready=7), decoding()], BUDGET) == [Slice(1, 1)]


def test_a_partial_chunk_of_the_least_size_runs_beside_others() -> None:
    assert plan_step([prompt(60, 0, num_ready=8), prompt(10)], BUDGET) == [Slice(0, 8), Slice(1, 10)]


def test_a_short_partial_chunk_runs_when_nothing_else_does() -> None:
    views = [prompt(60, 23, num_ready=23), prompt(60, 0, num_ready=3), prompt(60, 0, num_ready=5)]
    assert plan_step(views, BUDGET) == [Slice(1, 3)]


def test_the_short_end_of_a_prompt_is_no_partial_chunk() -> None:
    assert plan_step([prompt(42, 40), decoding()], BUDGET) == [Slice(1, 1), Slice(0, 2)]


def test_a_chunk_cut_short_by_the_budget_runs_all_the_same() -> None:
    tight = StepBudget(max_tokens=3, max_chunk_tokens=40, min_partial_tokens=8)
    assert plan_step([prompt(60, 0, num_ready=50)], tight) == [Slice(0, 3)]


def test_nothing_runs_when_nothing_can() -> None:
    assert plan_step([], BUDGET) == []
    assert plan_step([prompt(60, 23, num_ready=23), prompt(5, 5)], BUDGET) == []


def test_a_step_keeps_its_budget_and_is_never_empty_while_something_can_run(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(3_000):
        budget = StepBudget(rng.randint(1, 60), rng.randint(1, 40), rng.randint(1, 20))
        views = [random_view(rng) for _ in range(rng.randint(0, 12))]
        slices = plan_step(views, budget)
        can_run = any(view.is_decoding or view.num_ready > view.num_computed for view in views)
        assert bool(slices) == can_run
        assert sum(piece.count for piece in slices) <= budget.max_tokens
        assert len({piece.index for piece in slices}) == len(slices)
        for piece in slices:
            view = views[piece.index]
            if view.is_decoding:
                assert piece.count == 1
            else:
                assert 1 <= piece.count <= min(view.num_ready - view.num_computed, budget.max_chunk_tokens)
        prompts_run = [piece.index for piece in slices if not views[piece.index].is_decoding]
        assert prompts_run == sorted(prompts_run)
        decodes = [index for index, view in enumerate(views) if view.is_decoding]
        assert [piece.index for piece in slices if views[piece.index].is_decoding] == decodes[: budget.max_tokens]


def random_view(rng: random.Random) -> SequenceView:
    if rng.random() < 0.4:
        return decoding(rng.randint(20, 90))
    num_prompt = rng.randint(1, 80)
    num_computed = rng.randint(0, num_prompt)
    return prompt(num_prompt, num_computed, rng.choice([num_prompt, rng.randint(num_computed, num_prompt)]))
