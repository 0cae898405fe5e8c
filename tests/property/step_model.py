"""Prompts and answers in virtual time, run step by step under any policy, and what the policy owes them.

The promises are those of `triptych/sched/language.py`, stated here once more from the views alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from tests.property.promises import Broken, promise
from triptych.sched.aging import Aging
from triptych.sched.language import SequenceView, Slice, StepBudget

Policy = Callable[[Sequence[SequenceView], StepBudget, Aging], list[Slice]]
STEP_S = 0.25  # sums of it, and quotients by powers of two, are exact
MAX_STEPS = 3000


@dataclass(frozen=True)
class Prompt:
    """Comes at `step`. `parts`: the prompt is computable up to here from so many steps after its arrival on."""

    step: int
    parts: tuple[tuple[int, int], ...]
    priority: int
    num_answer: int

    @property
    def num_tokens(self) -> int:
        return self.parts[-1][0]

    def num_ready(self, step: int) -> int:
        ready = 0
        for end, delay in self.parts:
            if self.step + delay > step:
                break
            ready = end
        return ready


@dataclass(frozen=True)
class Workload:
    budget: StepBudget
    aging: Aging
    prompts: tuple[Prompt, ...]

    def due_s(self, prompt: Prompt) -> float:
        return prompt.step * STEP_S + self.aging.patience_s + prompt.num_tokens / self.aging.units_per_s


@dataclass
class Running:
    prompt: Prompt
    number: int
    num_computed: int = 0
    num_answered: int = 0
    ran_step: int = 0
    dry_overdue: int = 0
    most_dry: int | None = None
    last_step: int | None = None

    @property
    def rest(self) -> int:
        return max(0, self.prompt.num_tokens - self.num_computed)

    @property
    def is_decoding(self) -> bool:
        return self.rest == 0

    def view(self, step: int) -> SequenceView:
        since = self.ran_step if self.is_decoding else self.prompt.step
        return SequenceView(
            self.num_computed,
            self.num_computed if self.is_decoding else max(self.num_computed, self.prompt.num_ready(step)),
            self.prompt.num_tokens,
            self.is_decoding,
            (step - since) * STEP_S,
            self.prompt.priority,
        )


@dataclass
class Simulation:
    policy: Policy
    workload: Workload
    running: list[Running] = field(default_factory=list)
    by_due: list[int] = field(default_factory=list)
    most_decoding: int = 0

    def run(self) -> None:
        """Until every prompt has its answer. Raises Broken."""
        coming = sorted(enumerate(self.workload.prompts), key=lambda pair: pair[1].step)
        for step in range(MAX_STEPS):
            while coming and coming[0][1].step <= step:
                number, prompt = coming.pop(0)
                self.running.append(Running(prompt, number))
            if not self.running and not coming:
                return
            self._step(step)
        raise Broken("not everybody ended")

    def _step(self, step: int) -> None:
        views = [each.view(step) for each in self.running]
        slices = self.policy(views, self.workload.budget, self.workload.aging)
        check_step(views, slices, self.workload.budget)
        counts = {piece.index: piece.count for piece in slices}
        beside = runnable(views, self.workload.budget)
        self.by_due = self._by_due()
        self._check_shares(views, counts, beside, step)
        self._check_waits(counts, beside, step)
        for index, count in counts.items():
            each = self.running[index]
            each.num_answered += each.is_decoding
            each.num_computed += count
            each.ran_step = step
        self.running = [each for each in self.running if each.num_answered < each.prompt.num_answer or each.rest]

    def _overdue(self, index: int, step: int) -> bool:
        return step * STEP_S >= self.workload.due_s(self.running[index].prompt)

    def _by_due(self) -> list[int]:
        prompts = [place for place, each in enumerate(self.running) if not each.is_decoding]
        return sorted(prompts, key=lambda place: self.workload.due_s(self.running[place].prompt))

    def _before(self, index: int) -> list[int]:
        """Prompts that are due before this one."""
        return self.by_due[: self.by_due.index(index)]

    def _check_shares(
        self, views: list[SequenceView], counts: dict[int, int], beside: dict[int, int], step: int
    ) -> None:
        """Promise 1 for this step; and what the overdue take out of turn is no more than their share."""
        guaranteed = guaranteed_tokens(self.workload.budget)
        keys = {
            index: (views[index].priority, self.workload.aging.rank(self.running[index].rest, views[index].waited_s))
            for index in beside
        }
        unserved = [keys[index] for index, wanted in beside.items() if counts.get(index, 0) < wanted]
        out_of_turn = 0
        for index in beside:
            is_overdue, count = self._overdue(index, step), counts.get(index, 0)
            if is_overdue and not count:
                taken = sum(counts.get(other, 0) for other in self._before(index))
                promise(taken >= guaranteed, "an overdue prompt got nothing, and those before it not their share")
            if count and unserved and min(unserved) < keys[index]:
                promise(is_overdue, "a prompt got tokens that a more urgent or a shorter one wanted")
                out_of_turn += count
        promise(out_of_turn <= guaranteed, "the overdue took more than their share out of turn")

    def _check_waits(self, counts: dict[int, int], beside: dict[int, int], step: int) -> None:
        """Promises 1, 2 and 4 over time."""
        budget, guaranteed = self.workload.budget, guaranteed_tokens(self.workload.budget)
        for index in beside:
            each = self.running[index]
            if not self._overdue(index, step):
                continue
            before = sum(self.running[other].rest for other in self._before(index))
            if each.most_dry is None:
                each.most_dry = before // guaranteed
            each.dry_overdue += index not in counts
            promise(each.dry_overdue <= each.most_dry, "an overdue prompt stayed without tokens beyond the bound")
            if each.last_step is None and each.prompt.num_ready(step) == each.prompt.num_tokens:
                own = each.rest
                num_steps = (before + own) // guaranteed + own // budget.max_chunk_tokens + 1
                each.last_step = step + num_steps - 1
            promise(each.last_step is None or step <= each.last_step, "an overdue prompt was not done within the bound")
        decoding = [each for each in self.running if each.is_decoding]
        self.most_decoding = max(self.most_decoding, len(decoding))
        most_steps = self.most_decoding // (budget.max_tokens - guaranteed) + 1
        for index, each in enumerate(self.running):
            if each.is_decoding and index not in counts:
                promise(step - each.ran_step < most_steps, "an answer waited for its token beyond the bound")


def guaranteed_tokens(budget: StepBudget) -> int:
    return max(1, budget.max_tokens // 4)


def runnable(views: Sequence[SequenceView], budget: StepBudget) -> dict[int, int]:
    """Prompts that can run beside others, and their largest chunk."""
    found = {}
    for index, view in enumerate(views):
        ready = view.num_ready - view.num_computed
        is_end = view.num_ready == view.num_prompt
        is_long = ready >= budget.min_partial_tokens or ready > budget.max_chunk_tokens
        if not view.is_decoding and ready > 0 and (is_end or is_long):
            found[index] = min(ready, budget.max_chunk_tokens)
    return found


def check_step(views: Sequence[SequenceView], slices: Sequence[Slice], budget: StepBudget) -> None:
    """What holds for a step by itself."""
    counts = {piece.index: piece.count for piece in slices}
    promise(len(counts) == len(slices), "one slice a sequence")
    for index, count in counts.items():
        view = views[index]
        most = 1 if view.is_decoding else min(view.num_ready - view.num_computed, budget.max_chunk_tokens)
        promise(1 <= count <= most, "a slice holds what can run, at most a chunk")
    total = sum(counts.values())
    promise(total <= budget.max_tokens, "the budget is kept")
    decoding = [index for index, view in enumerate(views) if view.is_decoding]
    beside = runnable(views, budget)
    others = [index for index in counts if not views[index].is_decoding and index not in beside]
    promise(not others or len(slices) == 1, "a short partial chunk runs alone")
    all_run = all(index in counts for index in decoding) and all(counts.get(index) == beside[index] for index in beside)
    promise(bool(others) or total == budget.max_tokens or all_run, "the budget is used while something can run")
    can_run = any(view.is_decoding or view.num_ready > view.num_computed for view in views)
    promise(bool(slices) or not can_run, "a step is not empty while something can run")
    if len(decoding) <= budget.max_tokens - guaranteed_tokens(budget):
        promise(all(index in counts for index in decoding), "decoding sequences come first")


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Some large prompts, some of them with pictures that come one by one, in a stream of short ones."""
    max_tokens = draw(st.integers(4, 48))
    budget = StepBudget(max_tokens, draw(st.integers(2, max_tokens)), draw(st.integers(1, 6)))
    aging = Aging(draw(st.sampled_from([0.5, 1.0, 4.0])), draw(st.sampled_from([4.0, 16.0, 64.0])))
    prompts = [draw(prompts_of(1, 200, 20)) for _ in range(draw(st.integers(1, 6)))]
    every, length = draw(st.integers(1, 3)), draw(st.integers(1, max_tokens))
    priority, num_answer = draw(st.sampled_from([-3, 0, 0, 2])), draw(st.integers(1, 8))
    stream = [
        Prompt(number * every, ((length, 0),), priority, num_answer) for number in range(draw(st.integers(0, 60)))
    ]
    return Workload(budget, aging, tuple(prompts + stream))


@st.composite
def prompts_of(draw: st.DrawFn, shortest: int, longest: int, latest: int) -> Prompt:
    num_tokens = draw(st.integers(shortest, longest))
    cuts = sorted(draw(st.sets(st.integers(1, num_tokens), max_size=8)) | {num_tokens})
    parts = tuple((cut, draw(st.integers(0, 12))) for cut in cuts)
    return Prompt(
        draw(st.integers(0, latest)),
        parts,
        draw(st.sampled_from([-100, -1, 0, 0, 0, 5, 100])),
        draw(st.integers(1, 30)),
    )
