"""What a storm asks for: 16 mixed requests, drawn from a few roots so that they resemble each other."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from tests.storm.prompts import NUM_ROOTS, Prompt, Variant
from tests.storm.truth import MANNERS, Truth, TruthBook
from tests.storm.world import World
from triptych.core.plan import FinishReason, Plan, Sampling

NUM_WISHES = 16
ROOTS_A_STORM = 4
LAST_ARRIVAL = 40
"""Turns within which all requests arrive."""


@dataclass(frozen=True, slots=True)
class Wish:
    """One choice of one request, and what must come of it.

    Attributes:
        request_id, choice: choices of one request share the first.
        arrives, is_left_after: in turns (of an engine), the latter from the former on; None: the caller stays.
        expected: the tokens of the whole answer.
    """

    request_id: str
    choice: int
    prompt: Prompt
    plan: Plan
    truth: Truth
    arrives: int
    is_left_after: int | None
    expected: tuple[int, ...]
    reason: FinishReason

    def __str__(self) -> str:
        return f"{self.request_id}/{self.choice} (root {self.prompt.name})"


def draw_wishes(dice: random.Random, world: World, truths: TruthBook) -> list[Wish]:
    """Mostly greedy answers; some sampled (in two choices at times), some with stop tokens, some left by their caller,
    some of another tenant."""
    roots = dice.sample(range(NUM_ROOTS), ROOTS_A_STORM)
    wishes: list[Wish] = []
    while len(wishes) < NUM_WISHES:
        made = _wish(dice, world, truths, f"req-{len(wishes)}", dice.choice(roots))
        if made is None:
            continue
        wishes.append(made)
        if made.plan.sampling.temperature > 0 and dice.random() < 0.5 and len(wishes) < NUM_WISHES:
            wishes += _second_choice(dice, truths, made)
    return wishes


def _wish(dice: random.Random, world: World, truths: TruthBook, name: str, root: int) -> Wish | None:
    prompt = truths.prompt(root, dice.choice(list(Variant)))
    manner = dice.randrange(1, len(MANNERS)) if dice.random() < 0.3 else 0
    truth = truths.of(prompt, manner, 0)
    if not truth.tokens:
        return None
    sampling = replace(MANNERS[manner], max_tokens=dice.randint(1, len(truth.tokens)))
    if dice.random() < 0.2:
        sampling = replace(sampling, stop_token_ids=frozenset({dice.choice(truth.tokens)}))
    plan = world.plan(prompt, sampling, b"another tenant" if dice.random() < 0.1 else b"")
    is_left_after = dice.randint(0, 30) if dice.random() < 0.2 else None
    arrives = dice.randint(0, LAST_ARRIVAL)
    return Wish(name, 0, prompt, plan, truth, arrives, is_left_after, *expected_answer(truth, sampling))


def _second_choice(dice: random.Random, truths: TruthBook, first: Wish) -> list[Wish]:
    manner = next(i for i, how in enumerate(MANNERS) if how.seed == first.plan.sampling.seed)
    truth = truths.of(first.prompt, manner, 1)
    if len(truth.tokens) < first.plan.sampling.max_tokens:
        return []
    expected = expected_answer(truth, first.plan.sampling)
    return [Wish(first.request_id, 1, first.prompt, first.plan, truth, first.arrives, None, *expected)]


def expected_answer(truth: Truth, sampling: Sampling) -> tuple[tuple[int, ...], FinishReason]:
    """The truth up to its first stop token, or as much as was asked for."""
    tokens = truth.tokens[: sampling.max_tokens]
    for index, token in enumerate(tokens):
        if token in sampling.stop_token_ids:
            return tokens[: index + 1], FinishReason.STOP
    return tokens, FinishReason.LENGTH
