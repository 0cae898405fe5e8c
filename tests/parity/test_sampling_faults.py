"""Would the sampling tests notice? Each fault is planted in the running cluster, and what `transformers` says is no
longer what we say; once it is gone, it is again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.router.chat_request import SamplingOptions
from tests.parity.conftest import PROMPTS_SEED
from tests.parity.prompts import Prompt, make_prompts
from tests.parity.reference import ReferenceModel
from tests.parity.test_parity_sampling import generated, request_of, same
from triptych.engine.sequence import Sequence
from triptych.model import runner, sampler
from triptych.model.sampler import SampleRow, TokenHistory, adjusted, logprobs
from triptych.testing.cluster import ChatRequest, InProcessCluster

PENALTY = 1.3
LEAST = 6


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


def first_token_forgotten() -> contextlib.AbstractContextManager[None]:
    """Decode penalizes only what it sampled itself."""
    sound = Sequence._history

    def without_first(sequence: Sequence) -> TokenHistory:
        history = sound(sequence)
        return TokenHistory(history.prompt_ids, history.answer_ids[1:])

    return patched(Sequence, "_history", without_first)


def prompt_forgotten() -> contextlib.AbstractContextManager[None]:
    sound = Sequence._history

    def without_prompt(sequence: Sequence) -> TokenHistory:
        return TokenHistory(np.zeros(0, dtype=np.int64), sound(sequence).answer_ids)

    return patched(Sequence, "_history", without_prompt)


def minimum_counted_anew() -> contextlib.AbstractContextManager[None]:
    """Decode counts the answer's tokens from its own first one."""
    sound = Sequence.sample_row

    def one_less(sequence: Sequence) -> SampleRow:
        row = sound(sequence)
        return replace(row, index=max(0, row.index - 1))

    return patched(Sequence, "sample_row", one_less)


def ends_not_masked() -> contextlib.AbstractContextManager[None]:
    return patched(SampleRow, "must_go_on", property(lambda row: False))


def penalty_and_bias_exchanged() -> contextlib.AbstractContextManager[None]:
    """The bias is added after the penalty."""

    def bias_last(logits: torch.Tensor, row: SampleRow) -> torch.Tensor:
        scores = adjusted(logits, replace(row, sampling=replace(row.sampling, logit_bias=())))
        for token_id, bias in row.sampling.logit_bias:
            scores[token_id] += bias
        return scores

    return patched(sampler, "adjusted", bias_last)


FAULTS = {
    "first token forgotten": first_token_forgotten,
    "prompt forgotten": prompt_forgotten,
    "minimum counted anew": minimum_counted_anew,
    "ends not masked": ends_not_masked,
    "penalty and bias exchanged": penalty_and_bias_exchanged,
}


Asked = tuple[ChatRequest, tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def asked(references: dict[str, ReferenceModel]) -> list[Asked]:
    """Requests, and what the reference says to each."""
    reference = references["qwen2.5-vl"]
    made: list[Asked] = []
    for prompt in make_prompts(PROMPTS_SEED, 10):
        plain, _ = generated(reference, prompt)
        end = plain[2]
        bias = dict.fromkeys(plain[3:5], 3.0) | {plain[1]: -3.0}
        if prompt.index % 2:
            bias[end] = 50.0  # ends as soon as it may
        sequence_bias = [[[token], value] for token, value in bias.items()]
        how: dict[str, Any] = {"repetition_penalty": PENALTY, "sequence_bias": sequence_bias}
        options = SamplingOptions(repetition_penalty=PENALTY, logit_bias=tuple(sorted(bias.items())), min_tokens=LEAST)
        truth = generated(reference, prompt, **how, eos_token_id=[end], min_new_tokens=LEAST)
        made.append((request_of(prompt, options, end), truth))
    return made


@pytest.mark.timeout(200)
@pytest.mark.parametrize("fault", FAULTS)
async def test_parity_planted_sampling_fault_shows(asked: list[Asked], model_dirs: dict[str, Path], fault: str) -> None:
    requests = [request for request, _ in asked]
    async with InProcessCluster(model_dirs["qwen2.5-vl"], "e-p-d", kv_pool_bytes=32 << 20) as cluster:

        async def wrong() -> list[int]:
            results = await cluster.generate_many(requests, concurrency=4)
            pairs = zip(asked, results, strict=True)
            return [number for number, ((_, truth), ours) in enumerate(pairs) if not same(truth, ours.token_ids)]

        assert not await wrong(), "wrong before the fault is planted"
        with FAULTS[fault]():
            assert await wrong(), "the fault does not show"
        assert not await wrong(), "still wrong after the fault is gone"


@pytest.mark.timeout(200)
async def test_parity_log_probabilities_after_the_penalties_would_show(
    references: dict[str, ReferenceModel], model_dirs: dict[str, Path]
) -> None:
    def after_penalties(logits: torch.Tensor, rows: list[SampleRow], ids: list[int]) -> Any:
        return logprobs(torch.stack([adjusted(one, row) for one, row in zip(logits, rows, strict=True)]), rows, ids)

    (prompt,) = make_prompts(PROMPTS_SEED, 1)
    request = request_of(prompt, SamplingOptions(repetition_penalty=PENALTY, num_logprobs=0))

    async def difference(cluster: InProcessCluster) -> float:
        result = await cluster.generate(request)
        logits = references["qwen2.5-vl"].teacher_forced_logits(prompt, result.token_ids)
        truth = torch.log_softmax(torch.from_numpy(logits).double(), dim=-1)
        told = [token.logprobs.logprob for token in result.tokens if token.logprobs]
        return max(
            abs(float(row[token]) - value) for row, token, value in zip(truth, result.token_ids, told, strict=True)
        )

    async with InProcessCluster(model_dirs["qwen2.5-vl"], "e-p-d", kv_pool_bytes=32 << 20) as cluster:
        assert await difference(cluster) < 1e-4
        with patched(runner, "logprobs", after_penalties):
            assert await difference(cluster) > 1e-2


@pytest.mark.timeout(200)
async def test_parity_choices_that_share_their_randomness_would_show(model_dirs: dict[str, Path]) -> None:
    """The choices of one request are told apart, and choice k is the request of seed + k."""
    (prompt,) = make_prompts(PROMPTS_SEED, 1)
    request = replace(request_of(prompt, SamplingOptions()), temperature=1.5)
    sound = sampler.uniform

    async def tokens(cluster: InProcessCluster, seed: int) -> list[int]:
        return (await cluster.generate(replace(request, seed=seed))).token_ids

    async with InProcessCluster(model_dirs["qwen2.5-vl"], "e-p-d", kv_pool_bytes=32 << 20) as cluster:
        plain = [await tokens(cluster, 7 + choice) for choice in range(2)]
        assert plain[0] != plain[1]
        with patched(sampler, "uniform", lambda seed, choice, position: sound(seed - 1, choice + 1, position)):
            assert await tokens(cluster, 7) == plain[0], "seed and choice add up"
        with patched(sampler, "uniform", lambda seed, choice, position: sound(seed, choice + 1, position)):
            assert await tokens(cluster, 7) == plain[1]


def test_parity_prompts_of_this_file_have_pictures() -> None:
    prompts: list[Prompt] = make_prompts(PROMPTS_SEED, 10)
    assert any(prompt.media for prompt in prompts)
