"""The HTTP API: several choices of one request, and log probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from services.router.pipeline import Answer, Done
from tests.unit import router_house
from tests.unit.router_house import TEXT, Api, ScriptedPipeline, error_of, events
from triptych.core.errors import PeerLost
from triptych.core.plan import FinishReason, Token, TokenLogprobs

model, api = router_house.model, router_house.api


def number_of(answer: Answer, pipeline: ScriptedPipeline) -> int:
    """Which choice this is."""
    return pipeline.answers.index(answer)


async def test_several_choices_whole(api: Api) -> None:
    async def drive(answer: Answer) -> None:
        count = len(api.pipeline.tokens) - number_of(answer, api.pipeline)
        for index, token in enumerate(api.pipeline.tokens[:count]):
            answer.emit(0, [Token(index, token)])
            await asyncio.sleep(0)
        answer.end(Done(FinishReason.LENGTH if number_of(answer, api.pipeline) else FinishReason.STOP))

    api.pipeline.drive = drive
    body = (await api.chat(n=3)).json()
    ids = api.pipeline.tokens
    texts = [api.decode(ids[: len(ids) - index]) for index in range(3)]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in body["choices"]] == texts
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length", "length"]
    assert body["usage"]["completion_tokens"] == 3 * len(ids) - 3
    assert body["usage"]["prompt_tokens"] == api.pipeline.plans[0].num_prompt_tokens, "the prompt counts once"
    first, *others = api.pipeline.beside
    assert first is None
    assert [beside.choice for beside in others if beside] == [1, 2]
    assert {id(beside.first) for beside in others if beside} == {id(api.pipeline.answers[0])}
    assert len({id(plan) for plan in api.pipeline.plans}) == 1, "one plan for all"


async def test_several_choices_streamed(api: Api) -> None:
    response = await api.chat(n=3, stream=True, stream_options={"include_usage": True})
    *chunks, usage, done = events(response)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3 * len(api.pipeline.tokens)
    assert all(len(chunk["choices"]) == 1 and chunk["usage"] is None for chunk in chunks)
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert order != sorted(order), "they come as they come"
    for index in range(3):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in mine[1:])
        assert "".join(choice["delta"].get("content", "") for choice in mine) == TEXT
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["stop"]


async def test_the_others_wait_for_the_first_choices_prompt(api: Api) -> None:
    goes_on = asyncio.Event()

    async def drive(answer: Answer) -> None:
        if len(api.pipeline.answers) == 1:
            await asyncio.sleep(0.05)
            assert len(api.pipeline.answers) == 1
            answer.emit(0, [Token(0, api.pipeline.tokens[0])])
            await goes_on.wait()
        else:
            goes_on.set()
            answer.emit(0, [Token(0, api.pipeline.tokens[0])])
        answer.end(Done(FinishReason.LENGTH))

    api.pipeline.drive = drive
    assert len((await api.chat(n=4)).json()["choices"]) == 4


@pytest.mark.parametrize("failing", [0, 2])
async def test_a_choice_that_fails_fails_the_request_and_ends_the_others(api: Api, failing: int) -> None:
    async def drive(answer: Answer) -> None:
        if failing and number_of(answer, api.pipeline) == 0:
            answer.emit(0, [Token(0, api.pipeline.tokens[0])])
        if number_of(answer, api.pipeline) == failing:
            raise PeerLost("the connection to a worker was lost")
        await asyncio.Event().wait()

    api.pipeline.drive = drive
    async with asyncio.timeout(3):
        assert error_of(await api.chat(n=4), 503)["code"] == "peer_lost"
    assert len(api.pipeline.answers) in ((1,) if failing == 0 else (3, 4))
    assert api.pipeline.num_cancelled == len(api.pipeline.answers) - 1
    if failing:
        api.pipeline.answers.clear()
        streamed = events(await api.chat(n=4, stream=True))
        assert streamed[-1]["error"]["code"] == "peer_lost"


async def test_a_stop_string_ends_its_own_choice_only(api: Api) -> None:
    async def drive(answer: Answer) -> None:
        ids = api.pipeline.tokens if number_of(answer, api.pipeline) == 1 else api.pipeline.tokens[:1]
        for index, token in enumerate(ids):
            answer.emit(0, [Token(index, token)])
        if number_of(answer, api.pipeline) == 1:
            await asyncio.Event().wait()
        answer.end(Done(FinishReason.LENGTH))

    api.pipeline.drive = drive
    choices = (await api.chat(n=3, stop="square")).json()["choices"]
    first = api.decode(api.pipeline.tokens[:1])
    assert [choice["message"]["content"] for choice in choices] == [first, "the ", first]
    assert [choice["finish_reason"] for choice in choices] == ["length", "stop", "length"]
    assert api.pipeline.num_cancelled == 1


def with_logprobs(index: int, token: int, others: Sequence[int]) -> Token:
    return Token(index, token, TokenLogprobs(-0.5 - index, tuple((other, -1.0 - n) for n, other in enumerate(others))))


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_in_openais_shape(api: Api, stream: bool) -> None:
    ids = api.encode("a 👩 b")
    end = api.token_id("<|im_end|>")

    async def drive(answer: Answer) -> None:
        for index, token in enumerate([*ids, end]):
            answer.emit(0, [with_logprobs(index, token, (token, end))])
            await asyncio.sleep(0)
        answer.end(Done(FinishReason.STOP))

    api.pipeline.drive = drive
    response = await api.chat(logprobs=True, top_logprobs=2, stream=stream)
    assert api.pipeline.plans[0].sampling.num_logprobs == 2
    if stream:
        choices = [chunk["choices"][0] for chunk in events(response)[:-1]]
        assert choices[0]["logprobs"] is None
        assert choices[-1]["logprobs"] is None
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        content = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    else:
        (choice,) = response.json()["choices"]
        assert set(choice["logprobs"]) == {"content", "refusal"}
        assert choice["logprobs"]["refusal"] is None
        text, content = choice["message"]["content"], choice["logprobs"]["content"]
    assert text == "a 👩 b"
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == text, "no entry for the end token"
    assert [entry["logprob"] for entry in content] == [-0.5 - index for index in range(len(ids))]
    for entry in content:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert entry["token"] == bytes(entry["bytes"]).decode("utf-8", "replace")
        same, other = entry["top_logprobs"]
        assert (same["token"], same["bytes"], same["logprob"]) == (entry["token"], entry["bytes"], -1.0)
        assert (other["token"], bytes(other["bytes"])) == ("<|im_end|>", b"<|im_end|>")


async def test_log_probabilities_that_a_worker_left_out_are_an_error(api: Api) -> None:
    assert error_of(await api.chat(logprobs=True), 500)["code"] == "internal"


async def test_log_probabilities_of_an_empty_answer(api: Api) -> None:
    async def drive(answer: Answer) -> None:
        answer.emit(0, [with_logprobs(0, api.token_id("<|im_end|>"), ())])
        answer.end(Done(FinishReason.STOP))

    api.pipeline.drive = drive
    (choice,) = (await api.chat(logprobs=True)).json()["choices"]
    assert choice["logprobs"] == {"content": [], "refusal": None}
    assert choice["message"]["content"] == ""
