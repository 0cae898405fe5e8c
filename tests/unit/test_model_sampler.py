"""Sampling: greedy is argmax, seeded is a function of seed, choice and position, and the odds are right."""

from __future__ import annotations

import random

import pytest
import torch

from triptych.core.plan import Sampling
from triptych.model.sampler import SampleRow, sample, uniform


def row(temperature: float = 1.0, top_p: float = 1.0, seed: int = 0, position: int = 0, choice: int = 0) -> SampleRow:
    return SampleRow(Sampling(8, temperature, top_p, seed), choice, position)


def draws(logits: torch.Tensor, count: int, **how: float) -> list[int]:
    """Tokens drawn for one row of logits at `count` positions."""
    rows = [row(position=position, **how) for position in range(count)]  # type: ignore[arg-type]
    return sample(logits.expand(count, -1), rows)


def test_greedy_is_the_argmax_and_the_first_of_equals() -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(1))
    assert sample(logits, [row(0.0)] * 50) == logits.argmax(dim=-1).tolist()
    assert sample(torch.tensor([[1.0, 5.0, 5.0, 5.0]]), [row(0.0)]) == [1]


def test_greedy_rows_stay_greedy_beside_sampled_ones() -> None:
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(2))
    rows = [row(0.0) if index % 2 else row(5.0, seed=index) for index in range(20)]
    assert sample(logits, rows)[1::2] == logits[1::2].argmax(dim=-1).tolist()


def test_a_seeded_token_does_not_depend_on_the_rows_beside_it(seed: int) -> None:
    rng = random.Random(seed)
    logits = torch.randn(24, 64, generator=torch.Generator().manual_seed(3))
    rows = [
        row(rng.choice([0.0, 0.7, 1.5]), rng.choice([0.5, 1.0]), seed=rng.getrandbits(64), position=rng.randrange(2000))
        for _ in range(24)
    ]
    alone = [sample(logits[index : index + 1], [rows[index]])[0] for index in range(24)]
    for _ in range(10):
        order = rng.sample(range(24), rng.randint(1, 24))
        assert sample(logits[order], [rows[index] for index in order]) == [alone[index] for index in order]


def test_seed_choice_and_position_each_give_other_randomness() -> None:
    base = uniform(1, 2, 3)
    assert base == uniform(1, 2, 3)
    assert len({base, uniform(2, 2, 3), uniform(1, 1, 3), uniform(1, 2, 4), uniform(5, 2, 3)}) == 5


def test_a_choice_of_a_seed_is_a_seed_of_its_own() -> None:
    assert uniform(5, 3, 9) == uniform(8, 0, 9) == uniform(7, 1, 9)
    assert uniform(2**64 - 1, 3, 9) == uniform(2, 0, 9), "seeds go round"


def test_the_random_numbers_are_published() -> None:
    """A replay on another version must go on with the same text: these values may never change."""
    assert uniform(0, 0, 0) == pytest.approx(PUBLISHED[0], abs=0)
    assert uniform(2**64 - 1, 0, 4095) == pytest.approx(PUBLISHED[1], abs=0)


PUBLISHED = (0.8197544963868614, 0.020421130662248155)


def test_the_random_numbers_are_uniform() -> None:
    counts = [0] * 20
    for position in range(8_000):
        number = uniform(11, 0, position)
        assert 0 <= number < 1
        counts[int(number * 20)] += 1
    assert chi_square(counts, [0.05] * 20) < 43.8  # 19 degrees of freedom, one in a thousand


def chi_square(counts: list[int], probabilities: list[float]) -> float:
    total = sum(counts)
    return sum((n - total * p) ** 2 / (total * p) for n, p in zip(counts, probabilities, strict=True))


@pytest.mark.parametrize(("temperature", "seed"), [(1.0, 1), (0.5, 2), (2.0, 3)])
def test_tokens_come_as_often_as_the_softmax_says(temperature: float, seed: int) -> None:
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0, 1.5, 0.5])
    expected = torch.softmax(logits.double() / temperature, dim=-1).tolist()
    drawn = draws(logits, 3_000, temperature=temperature, seed=seed)
    assert chi_square([drawn.count(token) for token in range(6)], expected) < 20.5  # 5 degrees, one in a thousand


def test_a_nucleus_keeps_the_odds_within_it() -> None:
    logits = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15]).log()
    drawn = draws(logits, 3_000, top_p=0.75, seed=4)
    kept = {1: 0.4, 3: 0.3, 4: 0.15}
    assert set(drawn) == set(kept)
    odds = [share / 0.85 for share in kept.values()]
    assert chi_square([drawn.count(token) for token in kept], odds) < 13.8  # 2 degrees, one in a thousand


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0.0, {1}),
        (0.39, {1}),
        (0.41, {1, 3}),
        (0.69, {1, 3}),
        (0.71, {1, 3, 4}),
        (0.86, {0, 1, 3, 4}),
        (1.0, {0, 1, 2, 3, 4}),
    ],
)
def test_the_nucleus_is_the_fewest_tokens_that_reach_top_p(top_p: float, kept: set[int]) -> None:
    logits = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15]).log()
    assert set(draws(logits, 700, top_p=top_p, seed=5)) == kept


def test_equal_tokens_enter_the_nucleus_in_the_order_of_their_ids() -> None:
    assert set(draws(torch.zeros(8), 400, top_p=0.3, seed=6)) == {0, 1, 2}


@pytest.mark.parametrize("temperature", [1e-3, 1e-12, 1e-300, 5e-324])
def test_a_vanishing_temperature_is_greedy_and_never_nan(temperature: float) -> None:
    logits = torch.randn(30, 100, generator=torch.Generator().manual_seed(7)) * 40
    rows = [row(temperature, seed=index, position=index) for index in range(30)]
    assert sample(logits, rows) == logits.argmax(dim=-1).tolist()


def test_tokens_that_are_ruled_out_are_never_drawn() -> None:
    logits = torch.tensor([float("-inf"), 0.0, float("-inf"), 0.0])
    assert set(draws(logits, 300, seed=8)) == {1, 3}
