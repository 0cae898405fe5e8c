"""Which tokens run next."""

from __future__ import annotations

from triptych.sched.aging import Aging
from triptych.sched.language import SequenceView, Slice, StepBudget, plan_step

BUDGET = StepBudget(max_tokens=100, max_chunk_tokens=40, min_partial_tokens=8)


AGING = Aging(patience_s=2.0, units_per_s=10.0)


def decoding(num_computed: int = 50, waited_s: float = 0.0) -> SequenceView:
    return SequenceView(num_computed, num_computed, 20, True, waited_s)


def prompt(
    num_prompt: int, num_computed: int = 0, num_ready: int | None = None, waited_s: float = 0.0, priority: int = 0
) -> SequenceView:
    num_ready = num_prompt if num_ready is None else num_ready
    return SequenceView(num_computed, num_ready, num_prompt, False, waited_s, priority)


def test_decoding_sequences_come_first_wherever_they_stand() -> None:
    views = [prompt(30), decoding(), prompt(30), decoding()]
    assert plan_step(views, BUDGET) == [Slice(1, 1), Slice(3, 1), Slice(0, 30), Slice(2, 30)]


def test_prompts_share_what_is_left_of_the_budget_short_first_and_equals_in_order_of_arrival() -> None:
    views = [decoding(), prompt(35), prompt(40), prompt(30), prompt(30)]
    assert plan_step(views, BUDGET) == [Slice(0, 1), Slice(3, 30), Slice(4, 30), Slice(1, 35), Slice(2, 4)]


def test_short_is_what_has_little_left_of_the_whole_prompt() -> None:
    views = [prompt(200, 0, num_ready=10), prompt(60, 20), prompt(50)]
    tight = StepBudget(60, 40, 8)
    assert plan_step(views, tight) == [Slice(1, 40), Slice(2, 20)]


def test_who_has_waited_counts_as_shorter() -> None:
    views = [prompt(40), prompt(45, waited_s=0.5), prompt(51, waited_s=1.0)]
    tight = StepBudget(60, 60, 8)
    assert plan_step(views, tight, AGING) == [Slice(0, 40), Slice(1, 20)]  # 40 and 40: in order of arrival
    views[2] = prompt(49, waited_s=1.0)
    assert plan_step(views, tight, AGING) == [Slice(2, 49), Slice(0, 11)]


def test_the_more_urgent_go_first_however_long() -> None:
    views = [prompt(10), prompt(90, priority=-1), prompt(10, priority=1)]
    assert plan_step(views, StepBudget(55, 40, 8)) == [Slice(1, 40), Slice(0, 10), Slice(2, 5)]


def test_an_overdue_prompt_has_a_quarter_of_the_budget_first() -> None:
    late = prompt(300, waited_s=32.0, priority=100)
    short = prompt(90, priority=-100)
    big = StepBudget(100, 90, 8)
    assert plan_step([short, late], big, AGING) == [Slice(1, 25), Slice(0, 75)]
    almost = prompt(300, waited_s=31.9, priority=100)
    assert plan_step([short, almost], big, AGING) == [Slice(0, 90), Slice(1, 10)]


def test_the_share_goes_to_the_longest_overdue() -> None:
    views = [prompt(100, waited_s=12.0), prompt(100, waited_s=13.0, priority=5), prompt(95, priority=-1)]
    assert plan_step(views, StepBudget(100, 80, 8), AGING) == [Slice(1, 25), Slice(2, 75)]


def test_what_the_overdue_do_not_need_of_their_share_is_not_kept_from_answers() -> None:
    answers = [decoding() for _ in range(8)]
    late = prompt(1, waited_s=50.0)
    assert [piece.index for piece in plan_step([late, *answers], StepBudget(8, 8, 1), AGING)] == [*range(1, 8), 0]


def test_more_answers_than_the_budget_take_turns() -> None:
    views = [decoding(waited_s=waited_s) for waited_s in (0.1, 0.3, 0.2, 0.4)]
    assert plan_step(views, StepBudget(2, 2, 1)) == [Slice(3, 1), Slice(1, 1)]


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
    assert plan_step([prompt(60, 0, num_ready=8), prompt(10)], BUDGET) == [Slice(1, 10), Slice(0, 8)]


def test_a_short_partial_chunk_runs_when_nothing_else_does() -> None:
    views = [prompt(60, 23, num_ready=23), prompt(60, 0, num_ready=3), prompt(60, 0, num_ready=5)]
    assert plan_step(views, BUDGET) == [Slice(1, 3)]
    assert plan_step(views[1:], StepBudget(2, 40, 8)) == [Slice(0, 2)]


def test_the_short_end_of_a_prompt_is_no_partial_chunk() -> None:
    assert plan_step([prompt(42, 40), decoding()], BUDGET) == [Slice(1, 1), Slice(0, 2)]


def test_a_chunk_cut_short_by_the_budget_runs_all_the_same() -> None:
    tight = StepBudget(max_tokens=3, max_chunk_tokens=40, min_partial_tokens=8)
    assert plan_step([prompt(60, 0, num_ready=50)], tight) == [Slice(0, 3)]


def test_nothing_runs_when_nothing_can() -> None:
    assert plan_step([], BUDGET) == []
    assert plan_step([prompt(60, 23, num_ready=23), prompt(5, 5)], BUDGET) == []
