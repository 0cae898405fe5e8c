"""Greedy answers under bias, repetition penalty and a minimum length are those of `transformers`' own `generate`."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from services.router.chat_request import SamplingOptions
from tests.parity.conftest import PROMPTS_SEED
from tests.parity.prompts import Prompt, make_prompts
from tests.parity.reference import ReferenceModel
from triptych.testing.cluster import ChatRequest, InProcessCluster, Topology

NEW_TOKENS = 16
PROMPTS = 10
CLOSE = 1e-3
"""Where the reference's two best scores lie within this, rounding may decide."""


def generated(reference: ReferenceModel, prompt: Prompt, **how: Any) -> tuple[list[int], list[float]]:
    """The stock model's tokens, and by how much each beat the next best score."""
    reference.model.model.rope_deltas = None
    inputs = reference.inputs(prompt)
    with torch.inference_mode():
        out = reference.model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            return_dict_in_generate=True,
            output_scores=True,
            **how,
        )
    tokens = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    best = [torch.topk(scores[0], 2).values.tolist() for scores in out.scores]
    return tokens, [first - second for first, second in best]


def same(expected: tuple[list[int], list[float]], ours: list[int]) -> bool:
    """Equal, up to where the reference itself is undecided."""
    tokens, margins = expected
    undecided = next((index for index, margin in enumerate(margins) if margin < CLOSE), len(tokens))
    return tokens[:undecided] == ours[:undecided] and (undecided < len(tokens) or len(ours) == len(tokens))


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    """Some with pictures and some without."""
    every = make_prompts(PROMPTS_SEED, 200)
    return [p for p in every if not p.media][: PROMPTS // 2] + [p for p in every if p.media][: PROMPTS // 2]


def request_of(prompt: Prompt, options: SamplingOptions, *stops: int) -> ChatRequest:
    return ChatRequest(prompt.messages, prompt.media, NEW_TOKENS, stop_token_ids=frozenset(stops), options=options)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("topology", ["mono", "e-p-d"])
async def test_greedy_options_give_what_generate_gives(
    references: dict[str, ReferenceModel], model_dirs: dict[str, Path], prompts: list[Prompt], topology: Topology
) -> None:
    """`transformers` also counts a picture's placeholder as a token of the prompt. We do not, which shows where a model
    is about to *say* one: so with pictures no penalty is below 1, which would make it likely."""
    reference, rng = references["qwen2.5-vl"], random.Random(PROMPTS_SEED)
    vocabulary = reference.model.config.text_config.vocab_size
    async with InProcessCluster(model_dirs["qwen2.5-vl"], topology, chunk_tokens=48, kv_pool_bytes=32 << 20) as cluster:
        changed = 0
        for prompt in prompts:
            plain = generated(reference, prompt)
            ours = await cluster.generate(request_of(prompt, SamplingOptions()))
            assert same(plain, ours.token_ids)

            for penalty in (1.3, 1.1 if prompt.media else 0.7):
                expected = generated(reference, prompt, repetition_penalty=penalty)
                ours = await cluster.generate(request_of(prompt, SamplingOptions(repetition_penalty=penalty)))
                assert same(expected, ours.token_ids), (prompt.index, penalty)
                changed += expected[0] != plain[0]

            bias = dict.fromkeys(plain[0][:4], -100.0) | {rng.randrange(vocabulary): 2.5 for _ in range(8)}
            expected = generated(reference, prompt, sequence_bias=[[[token], value] for token, value in bias.items()])
            options = SamplingOptions(logit_bias=tuple(sorted(bias.items())))
            assert same(expected, (await cluster.generate(request_of(prompt, options))).token_ids), prompt.index
            changed += expected[0] != plain[0]

            end = plain[0][2]
            expected = generated(reference, prompt, eos_token_id=[end], min_new_tokens=6)
            ours = await cluster.generate(request_of(prompt, SamplingOptions(min_tokens=6), end))
            assert same(expected, ours.token_ids), prompt.index
            changed += expected[0] != plain[0]

            together = replace(options, repetition_penalty=1.2, min_tokens=8)
            expected = generated(
                reference,
                prompt,
                sequence_bias=[[[token], value] for token, value in bias.items()],
                repetition_penalty=1.2,
                eos_token_id=[end],
                min_new_tokens=8,
            )
            assert same(expected, (await cluster.generate(request_of(prompt, together, end))).token_ids), prompt.index
        assert changed >= 3 * len(prompts) > 0, "the options matter"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("topology", ["mono", "e-p-d"])
async def test_log_probabilities_are_the_references(
    references: dict[str, ReferenceModel], model_dirs: dict[str, Path], prompts: list[Prompt], topology: Topology
) -> None:
    """Teacher-forced by the stock model after our tokens, while penalties and temperature bend our choice."""
    reference = references["qwen2.5-vl"]
    options = SamplingOptions(repetition_penalty=1.3, num_logprobs=5)
    requests = [replace(request_of(prompt, options), temperature=1.2, seed=prompt.index) for prompt in prompts]
    async with InProcessCluster(model_dirs["qwen2.5-vl"], topology, chunk_tokens=48, kv_pool_bytes=32 << 20) as cluster:
        results = await cluster.generate_many(requests, concurrency=4)
    for prompt, result in zip(prompts, results, strict=True):
        logits = torch.from_numpy(reference.teacher_forced_logits(prompt, result.token_ids)).double()
        expected = torch.log_softmax(logits, dim=-1)
        assert [token.index for token in result.tokens] == list(range(NEW_TOKENS))
        for row, token in zip(expected, result.tokens, strict=True):
            assert token.logprobs is not None
            assert abs(token.logprobs.logprob - float(row[token.id])) < 1e-4
            assert len(token.logprobs.top) == 5
            best = torch.topk(row, 5).values.tolist()
            for (token_id, logprob), value in zip(token.logprobs.top, best, strict=True):
                assert abs(logprob - value) < 1e-4
                assert abs(logprob - float(row[token_id])) < 1e-4
