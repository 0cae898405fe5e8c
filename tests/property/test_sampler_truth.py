"""The sampler against `transformers`' logits processors, one after another in the order in which `generate` applies
them, and against the definitions in numpy for what `transformers` does not have."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.property.promises import tries
from triptych.core.plan import Sampling
from triptych.model.sampler import (
    SampleRow,
    TokenHistory,
    adjusted,
    choose_among_all,
    choose_among_likeliest,
    logprobs,
    sample,
    shortlist,
    uniform,
)

VOCABULARY = 24
IDS = st.integers(0, VOCABULARY - 1)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Case:
    """A row of logits and how it is to be sampled."""

    logits: torch.Tensor
    row: SampleRow
    prompt: list[int]
    answer: list[int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    grid = st.integers(-80, 80).map(lambda value: value / 8)  # equal logits happen, near ones do not
    logits = torch.tensor(draw(st.lists(grid, min_size=VOCABULARY, max_size=VOCABULARY)), dtype=torch.float32)
    prompt = draw(st.lists(IDS, min_size=1, max_size=30))
    answer = draw(st.lists(IDS, max_size=12))
    sampling = Sampling(
        max_tokens=64,
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 1.7])),
        top_p=draw(st.sampled_from([1.0, 0.95, 0.6, 0.2])),
        seed=draw(st.integers(0, 2**64 - 1)),
        stop_token_ids=draw(st.frozensets(IDS, max_size=3)),
        top_k=draw(st.sampled_from([None, 1, 2, 7, VOCABULARY, 1000])),
        min_p=draw(st.sampled_from([0.0, 0.02, 0.3, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 0.5, 1.3, 10.0])),
        logit_bias=tuple(
            sorted(draw(st.dictionaries(IDS, st.sampled_from([-100.0, -1.5, 0.25, 100.0]), max_size=4)).items())
        ),
        min_tokens=draw(st.integers(0, 16)),
        eos_token_ids=draw(st.frozensets(IDS, max_size=2)),
    )
    history = TokenHistory(np.unique(np.array(prompt, np.int64)), np.array(answer, np.int64))
    return Case(logits, SampleRow(sampling, 0, len(prompt) + len(answer), len(answer), history), prompt, answer)


def scores_of(processors: list[Any], case: Case, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    ids = torch.tensor([case.prompt + case.answer])
    return LogitsProcessorList(processors)(ids, case.logits[None].to(dtype))[0]


def before_temperature(case: Case) -> list[Any]:
    how = case.row.sampling
    processors: list[Any] = []
    if how.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in how.logit_bias]))
    if how.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(how.repetition_penalty))
    ends = sorted(how.stop_token_ids | how.eos_token_ids)
    if how.min_tokens and ends:
        processors.append(MinNewTokensLengthLogitsProcessor(len(case.prompt), how.min_tokens, ends))
    return processors


def after_temperature(how: Sampling) -> list[Any]:
    processors: list[Any] = [TemperatureLogitsWarper(how.temperature)]
    if how.top_k is not None:
        processors.append(TopKLogitsWarper(how.top_k))
    if how.top_p < 1:
        processors.append(TopPLogitsWarper(how.top_p))
    if how.min_p > 0:
        processors.append(MinPLogitsWarper(how.min_p))
    return processors


def has_ties_at_the_nucleus(case: Case) -> bool:
    """Where equals stand on both sides of the nucleus' edge the two sort them differently; by ids is our choice."""
    how = case.row.sampling
    if how.top_p == 1:
        return False
    head = [TemperatureLogitsWarper(how.temperature)]
    head += [TopKLogitsWarper(how.top_k)] if how.top_k is not None else []
    probabilities = torch.softmax(scores_of(before_temperature(case) + head, case), dim=-1)
    ordered = np.sort(probabilities.numpy())[::-1]
    reached = np.cumsum(ordered)
    if np.abs(reached - how.top_p).min() < 1e-9:
        return True
    last = int(np.searchsorted(reached, how.top_p))
    return last + 1 < len(ordered) and bool(ordered[last] - ordered[last + 1] < 1e-12)


@tries(120)
@given(cases())
def test_bias_penalty_and_minimum_are_those_of_transformers(case: Case) -> None:
    expected = scores_of(before_temperature(case), case)
    torch.testing.assert_close(adjusted(case.logits, case.row), expected, rtol=1e-12, atol=1e-12)
    in_float32 = scores_of(before_temperature(case), case, torch.float32)
    torch.testing.assert_close(adjusted(case.logits, case.row).float(), in_float32, rtol=1e-5, atol=1e-5)


@tries(160)
@given(cases())
def test_the_odds_are_those_of_transformers(case: Case) -> None:
    how = case.row.sampling
    assume(how.temperature > 0 and not has_ties_at_the_nucleus(case))
    expected = torch.softmax(scores_of(before_temperature(case) + after_temperature(how), case), dim=-1)
    assume(how.min_p == 0 or not _near(expected, how))
    probabilities, ids = shortlist(adjusted(case.logits, case.row), how)
    ours = torch.zeros(VOCABULARY, dtype=torch.float64)
    ours[ids] = probabilities / probabilities.sum()
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


def _near(expected: torch.Tensor, how: Sampling) -> bool:
    """Whether a token stands on min-p's edge but for rounding."""
    ratios = expected[expected > 0] / expected.max()
    return bool(((ratios - how.min_p).abs() < 1e-9).any()) and how.min_p < 1


@tries(120)
@given(cases())
def test_the_token_is_where_the_random_number_falls(case: Case) -> None:
    """Drawn in numpy from `transformers`' scores: likeliest first, equals by id."""
    how = case.row.sampling
    if how.temperature == 0:
        assert sample(case.logits[None], [case.row]) == [int(scores_of(before_temperature(case), case).argmax())]
        return
    assume(not has_ties_at_the_nucleus(case))
    processed = scores_of(before_temperature(case) + after_temperature(how), case)
    expected = torch.softmax(processed, dim=-1).numpy()
    assume(how.min_p == 0 or not _near(torch.from_numpy(expected), how))
    order = np.argsort(-expected, kind="stable")
    reached = np.cumsum(expected[order])
    drawn = uniform(how.seed, 0, case.row.position) * reached[-1]
    assume(np.abs(reached - drawn).min() > 1e-9)
    assert sample(case.logits[None], [case.row]) == [int(order[np.searchsorted(reached, drawn, side="right")])]


@tries(80)
@given(cases(), st.floats(-2, 2), st.floats(-2, 2))
def test_presence_and_frequency_are_as_openai_defines_them(case: Case, presence: float, frequency: float) -> None:
    row = replace(case.row, sampling=Sampling(64, presence_penalty=presence, frequency_penalty=frequency))
    expected = case.logits.double().tolist()
    for token in range(VOCABULARY):
        count = case.answer.count(token)
        expected[token] -= count * frequency + (1 if count > 0 else 0) * presence
    np.testing.assert_allclose(adjusted(case.logits, row).numpy(), expected, rtol=1e-12, atol=1e-12)


@tries(80)
@given(cases(), st.integers(0, 20))
def test_log_probabilities_are_the_models_own(case: Case, count: int) -> None:
    """Whatever bias, penalties and temperature do to the choice."""
    row = replace(case.row, sampling=replace(case.row.sampling, num_logprobs=count))
    chosen = sample(case.logits[None], [row])
    (told,) = logprobs(case.logits[None], [row], chosen)
    assert told is not None
    expected = log_softmax(case.logits.double().numpy())
    assert math.isclose(told.logprob, expected[chosen[0]], rel_tol=1e-12, abs_tol=1e-12)
    order = sorted(range(VOCABULARY), key=lambda token: (-float(case.logits[token]), token))
    assert [token for token, _ in told.top] == order[:count]
    np.testing.assert_allclose([value for _, value in told.top], expected[order[:count]], rtol=1e-12, atol=1e-12)


def log_softmax(values: Floats) -> Floats:
    wide = values.astype(np.longdouble)
    wide -= wide.max()
    return np.asarray(wide - np.log(np.exp(wide).sum()), dtype=np.float64)


@tries(40)
@given(st.lists(cases(), min_size=2, max_size=8), st.randoms(use_true_random=False))
def test_a_row_is_sampled_the_same_whatever_stands_beside_it(mixed: list[Case], rng: Any) -> None:
    """Ids and log probabilities, bit by bit."""
    rows = [
        replace(case.row, sampling=replace(case.row.sampling, num_logprobs=rng.choice([None, 0, 5]))) for case in mixed
    ]
    alone = []
    for case, row in zip(mixed, rows, strict=True):
        (token,) = sample(case.logits[None], [row])
        alone.append((token, logprobs(case.logits[None], [row], [token])[0]))
    order = list(range(len(mixed)))
    rng.shuffle(order)
    logits = torch.stack([mixed[index].logits for index in order])
    tokens = sample(logits, [rows[index] for index in order])
    told = logprobs(logits, [rows[index] for index in order], tokens)
    assert list(zip(tokens, told, strict=True)) == [alone[index] for index in order]


def test_a_row_of_a_real_vocabulary_too(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 50_003, generator=generator) * 3
    how = Sampling(9, 0.8, 0.9, seed=seed, top_k=300, min_p=0.01, num_logprobs=20)
    rows = [SampleRow(replace(how, seed=seed + index), 0, 7) for index in range(6)]
    tokens = sample(logits, rows)
    told = logprobs(logits, rows, tokens)
    for index in range(6):
        alone = logits[index : index + 1].clone()
        assert sample(alone, [rows[index]]) == [tokens[index]]
        assert logprobs(alone, [rows[index]], [tokens[index]]) == [told[index]]


def test_what_was_impossible_has_the_least_log_probability() -> None:
    logits = torch.tensor([[0.0, float("-inf"), -20_000.0]])
    row = SampleRow(Sampling(1, num_logprobs=3), 0, 0)
    (told,) = logprobs(logits, [row], [1])
    assert told is not None
    assert told.logprob == -9999.0
    assert told.top == ((0, 0.0), (2, -9999.0), (1, -9999.0))


def test_a_row_of_nan_harms_no_row_beside_it() -> None:
    """It is a broken model's; its log probabilities are refused at the router, and its neighbours go on."""
    logits = torch.tensor([[float("nan")] * 5, [0.0, 9.0, 0.0, 0.0, 0.0]])
    how = Sampling(1, temperature=0.1, top_k=2, top_p=0.9, min_p=0.1, num_logprobs=2)
    rows = [SampleRow(how, 0, 0), SampleRow(how, 0, 0)]
    tokens = sample(logits, rows)
    assert tokens[1] == 1
    assert 0 <= tokens[0] < 5
    broken, sound = logprobs(logits, rows, tokens)
    assert broken is not None and math.isnan(broken.logprob)
    assert sound is not None and sound.top[0][0] == 1


def test_a_rare_end_token_beyond_the_vocabulary_does_no_harm() -> None:
    row = SampleRow(Sampling(9, min_tokens=5, eos_token_ids=frozenset({1, 999_999})), 0, 0, index=0)
    assert sample(torch.tensor([[1.0, 5.0, 3.0]]), [row]) == [2]
    assert sample(torch.tensor([[1.0, 5.0, 3.0]]), [replace(row, index=5)]) == [1]


@tries(40)
@given(case=cases(), penalty=st.sampled_from([5e-324, 1e-320, 1e-308, 1e-300]), temperature=st.sampled_from([0.0, 1.0]))
def test_a_repetition_penalty_near_zero_takes_what_it_makes_likeliest(
    case: Case, penalty: float, temperature: float
) -> None:
    """By the definition in exact numbers: a positive logit that was seen is beyond all others; what overflows a float
    must not become a difference of infinities."""
    seen = sorted(set(case.prompt) | set(case.answer))
    sampling = Sampling(max_tokens=64, temperature=temperature, repetition_penalty=penalty)
    history = TokenHistory(np.array(case.prompt, dtype=np.int64), np.array(case.answer, dtype=np.int64))
    row = SampleRow(sampling, 0, 5, index=1, history=history)
    chosen = sample(case.logits[None], [row])[0]
    positive = [token for token in seen if case.logits[token] > 0]
    if positive:
        assert chosen in positive
    assert not torch.isnan(adjusted(case.logits, row)).any()


@tries(60)
@given(
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.0, 0.5, 2.0, 8.0]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-9]),
    min_p=st.sampled_from([0.0, 0.001, 0.3, 1.0]),
    temperature=st.sampled_from([1e-4, 0.7, 2.0]),
    drawn=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 0.5, 1 - 2**-53])),
)
def test_the_likeliest_alone_decide_as_all_do(
    seed: int, spread: float, top_p: float, min_p: float, temperature: float, drawn: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5000, generator=generator) * spread
    logits[::7] = logits[3]  # many equals
    logits[11] = float("-inf")
    sampling = Sampling(max_tokens=1, temperature=temperature, top_p=top_p, min_p=min_p)
    near = choose_among_likeliest(logits.double(), sampling, drawn)
    assert near is None or near == choose_among_all(logits.double(), sampling, drawn).item()


def test_the_likeliest_are_mostly_enough(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sampling = Sampling(max_tokens=1, temperature=0.7, top_p=0.95)
    rows = torch.randn(60, 20_000, generator=generator).double() * 5
    rows[:, :5] += 15
    drawn = torch.rand(60, generator=generator).tolist()
    decided = [choose_among_likeliest(row, sampling, one) is not None for row, one in zip(rows, drawn, strict=True)]
    assert sum(decided) > 50
    assert choose_among_likeliest(torch.full((20_000,), float("nan")).double(), sampling, 0.5) is None
    assert choose_among_likeliest(torch.zeros(20_000).double(), sampling, 0.5) is None, "all are as likely"
