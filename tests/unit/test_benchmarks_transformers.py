"""The server of `transformers` that the benchmark compares with: batches over a kept prefix say what each prompt says
alone to the stock `generate`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from benchmarks.engine.prompts import questions
from benchmarks.engine.transformers_generate import GenerateEngine, Job
from benchmarks.engine.transformers_prompt import Prompt, Prompter, load
from tests.unit.demo_dir import demo_model_dir

NEW_TOKENS = 6


class Stock:
    def __init__(self) -> None:
        self.model = load(demo_model_dir(), "float32")
        self.prompter = Prompter(demo_model_dir(), self.model)

    def alone(self, prompt: Prompt) -> list[int]:
        """With nothing of ours but the ids and the pictures: positions are the library's own."""
        ids = torch.tensor([prompt.ids])
        pictures = {
            "pixel_values": torch.cat([patches for _, patches, _ in prompt.pictures]),
            "image_grid_thw": torch.cat([grid for _, _, grid in prompt.pictures]),
            "mm_token_type_ids": (ids == self.model.config.image_token_id).int(),
        }
        self.model.model.rope_deltas = None
        with torch.inference_mode():
            out = self.model.generate(input_ids=ids, do_sample=False, max_new_tokens=NEW_TOKENS, **pictures)
        return list(out[0, len(prompt.ids) :].tolist())


@pytest.fixture(scope="module")
def stock() -> Stock:
    return Stock()


def answers(engine: GenerateEngine, prompts: Sequence[Prompt]) -> list[list[int]]:
    said: list[list[int | None]] = [[] for _ in prompts]
    jobs = [Job(prompt, NEW_TOKENS, len(prompts), mine.append) for prompt, mine in zip(prompts, said, strict=True)]
    with torch.inference_mode():
        engine.answer(jobs)
    assert all(mine[-1] is None for mine in said)
    return [[token for token in mine if token is not None] for mine in said]


def test_batches_with_kept_prefixes_answer_as_each_prompt_alone(stock: Stock):
    engine = GenerateEngine(stock.model)
    prompts = [stock.prompter.prompt(asked.messages) for asked in questions("pictures-shared", 1, 4, num_words=0)]
    truth = [stock.alone(prompt) for prompt in prompts]
    assert answers(engine, prompts[:1]) == truth[:1]  # nothing is kept yet
    assert engine.num_reused_tokens == 0
    assert answers(engine, prompts) == truth
    assert engine.num_reused_tokens > 4 * 3 * 64  # the pictures of all four


def test_other_pictures_in_the_same_places_are_no_shared_prefix(stock: Stock):
    engine = GenerateEngine(stock.model)
    for seed in (1, 2):
        prompt = stock.prompter.prompt(questions("pictures-cold", seed, 1, num_words=0)[0].messages)
        assert answers(engine, [prompt]) == [stock.alone(prompt)]
    assert engine.num_reused_tokens == 0
