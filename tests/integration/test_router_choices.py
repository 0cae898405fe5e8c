"""Several choices of one request against workers that do exactly what each test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.router.answer_text import AnswerText
from services.router.choices import Choices, Question, running_choices
from services.router.pipeline import Pipeline
from services.router.stopwatch import Stopwatch
from tests.integration import fake_workers as fake
from tests.integration.fake_workers import Call, FakeCluster, Script, running
from tests.integration.pieces import each
from tests.unit.demo_dir import demo_model_dir
from triptych.core.clock import SystemClock
from triptych.core.errors import MediaInvalid, NoRoom, PeerLost, TriptychError
from triptych.core.plan import Plan, Sampling
from triptych.core.timeline import Timeline
from triptych.core.worker import Role
from triptych.obs import metrics
from triptych.text.detokenizer import IncrementalDetokenizer

pytestmark = pytest.mark.usefixtures("by_grpc_and_line")

E, P, D = [Role.ENCODER], [Role.PREFILL], [Role.DECODE]
TOKENIZER = Tokenizer.from_file(str(demo_model_dir() / "tokenizer.json"))
MAX_TOKENS = 5
PROMPT = (1, 2, 3)


def question(n: int, timeout_s: float = 10.0) -> Question:
    plan = Plan(PROMPT, (), Sampling(MAX_TOKENS, seed=1), timeout_s)
    timeline = Timeline("router", "router", SystemClock())
    texts = [AnswerText(IncrementalDetokenizer(TOKENIZER), (), plan.sampling) for _ in range(n)]
    return Question("req-1", plan, [], texts, timeline, Stopwatch(timeline))


async def collect(choices: Choices, n: int) -> list[list[int]]:
    ids: list[list[int]] = [[] for _ in range(n)]
    async with aclosing(choices.batches()) as batches:
        async for piece in each(batches):
            ids[piece.choice] += [token.id for token in piece.tokens]
    return ids


async def ask(pipeline: Pipeline, n: int, timeout_s: float = 10.0) -> list[list[int]]:
    async with running_choices(pipeline, question(n, timeout_s)) as choices:
        return await collect(choices, n)


EXPECTED = [100 + index for index in range(MAX_TOKENS)]


def served(cluster: FakeCluster, role: Role) -> list[tuple[int, str]]:
    return [(call.ref.choice, call.worker.worker_id) for call in cluster.hub.calls_to(role)]


async def test_all_choices_go_to_the_workers_that_hold_the_prompt() -> None:
    async with running(("p-0", P), ("p-1", P), ("d-0", D), ("d-1", D)) as (cluster, pipeline):
        for turn in range(3):
            cluster.hub.calls.clear()
            cluster.hub.kv.clear()
            async with running_choices(pipeline, question(4)) as choices:
                assert await collect(choices, 4) == [EXPECTED] * 4
                workers = choices.workers()
                assert workers[Role.DECODE] == [f"d-{turn % 2}"]
                assert workers[Role.PREFILL] in (["p-0"], ["p-1"])
                assert choices.usage().prompt_tokens == len(PROMPT)
                assert choices.usage().completion_tokens == 4 * MAX_TOKENS
            for role in (Role.PREFILL, Role.DECODE):
                assert served(cluster, role)[0][0] == 0
                assert sorted(choice for choice, _ in served(cluster, role)) == [0, 1, 2, 3]
                assert len({worker for _, worker in served(cluster, role)}) == 1
            await cluster.hub.until_all_ended()


async def test_the_others_are_asked_when_the_first_has_a_token() -> None:
    prefilled = asyncio.Event()

    async def prefill(call: Call) -> AsyncIterator[Any]:
        if call.ref.choice == 0:
            await asyncio.sleep(0.1)
            assert len(call.hub.calls_to(Role.DECODE)) == 1
            prefilled.set()
        assert prefilled.is_set()
        async for message in fake.prefill_well(call):
            yield message

    async with running(script=Script(prefill=prefill)) as (_, pipeline):
        assert await ask(pipeline, 3) == [EXPECTED] * 3


async def test_a_full_line_does_not_fail_what_already_runs() -> None:
    """There is room for one, and nobody may wait: the choices still come one after another."""
    busy = 0

    async def decode(call: Call) -> AsyncIterator[Any]:
        nonlocal busy
        if busy:
            raise NoRoom("full")
        busy += 1
        try:
            async for message in fake.decode_well(call):
                yield message
        finally:
            busy -= 1

    async with running(script=Script(decode), max_queue=0) as (_, pipeline):
        assert await ask(pipeline, 3) == [EXPECTED] * 3


async def test_there_is_one_deadline() -> None:
    """The others never get room: the request ends when its own time is over, counted from its beginning."""

    async def decode(call: Call) -> AsyncIterator[Any]:
        if call.ref.choice:
            raise NoRoom("full")
        async for message in fake.decode_well(call):
            yield message

    async def prefill(call: Call) -> AsyncIterator[Any]:
        await asyncio.sleep(0.3)
        async for message in fake.prefill_well(call):
            yield message

    async with running(script=Script(decode, prefill)) as (cluster, pipeline):
        with pytest.raises(NoRoom):
            await ask(pipeline, 3, timeout_s=0.8)
        await cluster.hub.until_all_ended()
        left_ms = [call.request.plan.timeout_ms for call in cluster.hub.calls_to(Role.DECODE) if call.ref.choice]
        assert left_ms and max(left_ms) <= 500 + 1, "what the first has used is gone for the others"


@pytest.mark.parametrize("error", [MediaInvalid("a verdict"), PeerLost("gone")])
async def test_a_failing_choice_ends_all_calls(error: TriptychError) -> None:
    async def decode(call: Call) -> AsyncIterator[Any]:
        yield fake.grant(call.worker)
        await call.hub.kv[call.key].wait()
        yield fake.tokens(1)
        if call.ref.choice == 2:
            raise error
        await fake.for_ever()

    async with running(script=Script(decode)) as (cluster, pipeline):
        with pytest.raises(type(error)):
            await ask(pipeline, 4)
        await cluster.hub.until_all_ended()
        outcomes = {call.ref.choice: call.outcome for call in cluster.hub.calls_to(Role.DECODE)}
        assert outcomes[2] == error.code
        assert {outcome for choice, outcome in outcomes.items() if choice != 2} == {"cancelled"}


async def test_leaving_cancels_every_call_of_every_choice() -> None:
    async def decode(call: Call) -> AsyncIterator[Any]:
        yield fake.grant(call.worker)
        await call.hub.kv[call.key].wait()
        yield fake.tokens(1)
        await fake.for_ever()

    async with running(script=Script(decode)) as (cluster, pipeline):
        async with running_choices(pipeline, question(3)):
            await cluster.hub.until_called(6)
        await cluster.hub.until_all_ended()
        assert [call.outcome for call in cluster.hub.calls_to(Role.DECODE)] == ["cancelled"] * 3


async def test_a_prompt_counts_once() -> None:
    before = metrics.PROMPT_TOKENS._value.get()
    async with running() as (_, pipeline):
        await ask(pipeline, 3)
    assert metrics.PROMPT_TOKENS._value.get() - before == len(PROMPT)


async def test_what_gathers_is_one_batch_and_what_is_alone_does_not_wait() -> None:
    """The reader is slow, then quick: nothing is lost, turned around or held back."""
    held = asyncio.Event()
    asked: list[Choices] = []

    async def until_heard(count: int) -> None:
        while not asked or asked[0].num_completion_tokens < count:  # noqa: ASYNC110 - nobody reads yet
            await asyncio.sleep(0.01)

    async def decode(call: Call) -> AsyncIterator[Any]:
        yield fake.grant(call.worker)
        await until_heard(1)  # prefill's comes by another stream
        for index in range(1, MAX_TOKENS - 1):
            yield fake.tokens(index)
        await held.wait()
        yield fake.tokens(MAX_TOKENS - 1)
        yield fake.generate_done(call, MAX_TOKENS)

    async with (
        running(script=Script(decode=decode)) as (_, pipeline),
        asyncio.timeout(10),
        running_choices(pipeline, question(1)) as choices,
        aclosing(choices.batches()) as batches,
    ):
        asked.append(choices)
        await until_heard(MAX_TOKENS - 1)
        sizes: list[int] = []
        ids: list[int] = []
        async for batch in batches:
            sizes.append(len(batch))
            ids += [token.id for piece in batch for token in piece.tokens]
            held.set()
    assert ids == EXPECTED
    assert sizes[0] == MAX_TOKENS - 1, "one piece for each token, all in the first batch"
    assert len(sizes) > 1
