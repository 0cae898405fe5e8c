"""Choices, options and log probabilities over the real stages in one process."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from services.router.answer_text import AnswerText
from services.router.chat_request import SamplingOptions
from services.router.choices import Choices, Question, running_choices
from services.router.stopwatch import Stopwatch
from tests.integration.pieces import each
from tests.parity.checkpoints import DEFAULT_SEED, DEMO_DIR, make_tiny_qwen2_5_vl
from tests.parity.prompts import draw_picture
from triptych.core.clock import SystemClock
from triptych.core.ids import new_request_id
from triptych.core.plan import EmbeddingSource, FinishReason, Plan, Token
from triptych.core.timeline import Timeline
from triptych.stages.settings import LanguageSettings
from triptych.testing.cluster import ChatRequest, ChatResult, InProcessCluster
from triptych.text.detokenizer import IncrementalDetokenizer
from triptych.text.tokenizer import ChatTokenizer

TOPOLOGIES: tuple[Literal["mono", "e-p-d"], ...] = ("mono", "e-p-d")
topologies = pytest.mark.parametrize("topology", TOPOLOGIES)
SMALL_POOL = 8 << 20
PAGE_TOKENS = LanguageSettings().page_tokens


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    base = Path(os.environ.get("DEMO_MODEL_DIR") or DEMO_DIR)
    return make_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny-qwen2-5-vl"), DEFAULT_SEED, base)


def asked(text: str, *media: bytes, max_tokens: int = 12, **how: object) -> ChatRequest:
    parts = [*({"type": "image"} for _ in media), {"type": "text", "text": text}]
    return replace(ChatRequest([{"role": "user", "content": parts}], media, max_tokens), **how)  # type: ignore[arg-type]


@dataclass
class Heard:
    """What came of one choice."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    reason: FinishReason | None = None

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


def question(cluster: InProcessCluster, plan: Plan, request: ChatRequest, n: int, stops: tuple[str, ...]) -> Question:
    tokenizer = ChatTokenizer(cluster.adapter.model_dir).tokenizer
    timeline = Timeline("router", "router", SystemClock())
    texts = [AnswerText(IncrementalDetokenizer(tokenizer), stops, plan.sampling) for _ in range(n)]
    return Question(new_request_id(), plan, request.media, texts, timeline, Stopwatch(timeline))


async def choose(cluster: InProcessCluster, request: ChatRequest, n: int, *stops: str) -> tuple[list[Heard], Choices]:
    heard = [Heard() for _ in range(n)]
    asking = question(cluster, cluster.plan(request), request, n, stops)
    async with running_choices(cluster.pipeline, asking) as choices, aclosing(choices.batches()) as batches:
        async for piece in each(batches):
            one = heard[piece.choice]
            assert one.reason is None, "nothing comes after the end"
            one.text += piece.text
            one.tokens += piece.tokens
            one.reason = piece.finish_reason
    return heard, choices


def assert_same_logprobs(one: list[Token], other: list[Token]) -> None:
    """Within what the batch does to float32."""
    for first, second in zip(one, other, strict=True):
        assert first.logprobs is not None and second.logprobs is not None
        assert first.logprobs.logprob == pytest.approx(second.logprobs.logprob, abs=1e-4)
        tops = zip(first.logprobs.top, second.logprobs.top, strict=True)
        assert all(mine[1] == pytest.approx(theirs[1], abs=1e-4) for mine, theirs in tops)


@topologies
async def test_the_choices_are_those_of_single_runs_with_the_next_seeds(
    model_dir: Path, topology: Literal["mono", "e-p-d"], seed: int
) -> None:
    media = (draw_picture(1, (84, 56)), draw_picture(2, (56, 112)))
    options = SamplingOptions(num_logprobs=4, presence_penalty=0.4, top_k=200)
    first_seed = 2**64 - 2 if seed % 2 else seed
    request = asked("what is it, and what is beside it, and why?", *media, temperature=1.3, options=options)
    async with InProcessCluster(model_dir, topology, chunk_tokens=48, kv_pool_bytes=SMALL_POOL) as cluster:
        together, choices = await choose(cluster, replace(request, seed=first_seed), 3)
        cluster.clear_caches()
        for number, of_three in enumerate(together):
            (alone,), _ = await choose(cluster, replace(request, seed=(first_seed + number) % 2**64), 1)
            assert (of_three.text, of_three.ids, of_three.reason) == (alone.text, alone.ids, alone.reason)
            assert len(of_three.tokens) == 12
            assert_same_logprobs(of_three.tokens, alone.tokens)
        assert len({tuple(one.ids) for one in together}) == 3, "each choice is its own"
        usage = choices.usage()
        assert (usage.prompt_tokens, usage.completion_tokens) == (cluster.plan(request).num_prompt_tokens, 36)
        cluster.check_integrity()


@topologies
async def test_choices_encode_and_ship_their_pictures_once(model_dir: Path, topology: Literal["mono", "e-p-d"]) -> None:
    """The question after the pictures is longer than a page, so that the radix cache holds all their rows."""
    media = (draw_picture(1, (84, 56)), draw_picture(2, (56, 112)))
    request = asked("what is it, and what is beside it, and what is above it and below it?", *media, temperature=1.0)
    async with InProcessCluster(model_dir, topology, chunk_tokens=48, kv_pool_bytes=SMALL_POOL) as cluster:
        plan = cluster.plan(request)
        _, choices = await choose(cluster, request, 4)
    rows = choices.all_events()
    counts = Counter((row.stage, row.event) for row in rows)
    for event in ("fetch", "preprocess", "encode", "write"):
        assert counts["encoder", event] == 2, event
    assert counts["encoder", "radix_hit"] <= 3 * 2, "asked or not, for the other choices"
    assert {row.source for row in rows if row.event == "radix_hit"} <= {EmbeddingSource.RADIX}
    assert counts["prefill", "first_token"] == 4
    chunks = sorted((row for row in rows if (row.stage, row.event) == ("prefill", "chunk")), key=lambda row: row.end_ns)
    computed = list(itertools.accumulate(row.num_tokens for row in chunks))
    prefilled = computed.index(plan.num_prompt_tokens)
    assert computed[-1] - computed[prefilled] <= 3 * PAGE_TOKENS, "the others compute what no page holds"
    others = sorted(row.start_ns for row in rows if (row.stage, row.event) == ("router", "queue"))[1:]
    assert len(others) == 3 and min(others) > chunks[prefilled].end_ns, "they begin when the prompt is there"


def random_options(rng: random.Random, vocabulary: int) -> SamplingOptions:
    bias = {rng.randrange(vocabulary): rng.uniform(-5, 5) for _ in range(rng.choice([0, 0, 6]))}
    return SamplingOptions(
        top_k=rng.choice([None, 0, 1, 5, 50]),
        min_p=rng.choice([None, 0.0, 0.05, 0.3]),
        repetition_penalty=rng.choice([None, 1.0, 1.2, 0.8]),
        presence_penalty=rng.choice([0.0, 0.0, 1.0, -0.5]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.7, -0.3]),
        logit_bias=tuple(sorted(bias.items())),
        stop_token_ids=tuple(rng.randrange(vocabulary) for _ in range(rng.choice([0, 40]))),
        min_tokens=rng.choice([0, 0, 3]),
        num_logprobs=rng.choice([None, 0, 3, 20]),
    )


def mixed(seed: int, count: int, vocabulary: int) -> list[ChatRequest]:
    rng = random.Random(seed)
    pictures = [draw_picture(number, (28 * rng.randint(2, 5), 28 * rng.randint(2, 5))) for number in range(6)]
    return [
        asked(
            f"question {rng.randrange(12)}",
            *rng.choices(pictures, k=rng.choice([0, 0, 1, 1, 2])),
            max_tokens=rng.randint(3, 10),
            temperature=rng.choice([0.0, 0.7, 1.4]),
            top_p=rng.choice([1.0, 0.9, 0.5]),
            seed=rng.getrandbits(64),
            options=random_options(rng, vocabulary),
        )
        for _ in range(count)
    ]


@pytest.mark.timeout(240)
async def test_a_mix_of_options_gives_each_request_what_it_gets_alone(model_dir: Path, seed: int) -> None:
    """64 at once, and one by one; in one process and in three."""
    answers: list[list[ChatResult]] = []
    for topology in TOPOLOGIES:
        async with InProcessCluster(model_dir, topology, chunk_tokens=48, kv_pool_bytes=SMALL_POOL) as cluster:
            requests = mixed(seed, 64, cluster.adapter.vocab_size)
            answers.append(await cluster.generate_many(requests, concurrency=64))
            cluster.clear_caches()
            answers.append(await cluster.generate_many(requests))
            cluster.check_integrity()
    reference, *others = answers
    for other in others:
        for number, (one, two) in enumerate(zip(reference, other, strict=True)):
            assert (one.token_ids, one.finish_reason) == (two.token_ids, two.finish_reason), requests[number]
            if requests[number].options.num_logprobs is not None:
                assert_same_logprobs(list(one.tokens), list(two.tokens))
            else:
                assert all(token.logprobs is None for token in one.tokens)
    assert {one.finish_reason for one in reference} == {FinishReason.STOP, FinishReason.LENGTH}


@topologies
async def test_one_choice_may_end_before_the_others(model_dir: Path, topology: Literal["mono", "e-p-d"]) -> None:
    """At a stop string, at a stop token and by length; what it held is given back, and the others go on."""
    request = asked("what is it?", temperature=1.5, seed=5, max_tokens=20)
    async with InProcessCluster(model_dir, topology, chunk_tokens=48, kv_pool_bytes=SMALL_POOL) as cluster:
        plain, _ = await choose(cluster, request, 3)
        stop = next(char for char in plain[1].text[2:] if char.strip())
        stopped, choices = await choose(cluster, request, 3, stop)
        for before, after in zip(plain, stopped, strict=True):
            cut = before.text.find(stop)
            assert after.text == (before.text if cut < 0 else before.text[:cut])
            assert after.reason is (FinishReason.LENGTH if cut < 0 else FinishReason.STOP)
        assert choices.num_completion_tokens < 60
        end = plain[2].ids[3]
        ended, _ = await choose(cluster, replace(request, stop_token_ids=frozenset({end})), 3)
        for before, after in zip(plain, ended, strict=True):
            at = before.ids.index(end) if end in before.ids else 20
            assert after.ids == before.ids[:at]
            assert after.reason is (FinishReason.STOP if at < 20 else FinishReason.LENGTH)
        await given_back(cluster)


@topologies
async def test_leaving_ends_all_choices(model_dir: Path, topology: Literal["mono", "e-p-d"]) -> None:
    request = asked("what is it?", draw_picture(1, (84, 56)), max_tokens=400, temperature=1.0)
    async with InProcessCluster(model_dir, topology, chunk_tokens=48, kv_pool_bytes=SMALL_POOL) as cluster:
        asking = question(cluster, cluster.plan(request), request, 4, ())
        seen: set[int] = set()
        async with running_choices(cluster.pipeline, asking) as choices, aclosing(choices.batches()) as batches:
            async for piece in each(batches):
                seen.add(piece.choice)
                if len(seen) == 4:
                    break
        await given_back(cluster)


async def given_back(cluster: InProcessCluster) -> None:
    """No sequence lives and no page is owned or leased, within a few seconds."""

    def left() -> list[str]:
        found = []
        for worker in cluster.workers:
            engine = worker.language_engine
            if engine is not None:
                counts = engine.call(engine.manager.counts).result(5)
                living = engine.call(lambda e=engine: len(e._living)).result(5)
                if living or counts["owned"] or counts["leased"]:
                    found.append(f"{worker.ref.worker_id}: {counts} {living=}")
        return found

    deadline = time.monotonic() + 8
    while found := await asyncio.to_thread(left):
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.05)
