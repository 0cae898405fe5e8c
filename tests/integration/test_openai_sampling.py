"""Sampling parameters through the official client, against running clusters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from tests.integration.test_openai_client import picture, text, user
from tests.unit.demo_dir import demo_model_dir

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

TOKENIZER = Tokenizer.from_file(str(demo_model_dir() / "tokenizer.json"))
QUESTION = user(picture("circle", "red"), text("What colour is the circle?"))
DESCRIBE = user(picture("circle", "red"), picture("square", "blue"), text("Describe the images, one after the other."))


@pytest.fixture(scope="module")
def client(cluster_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster_url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


@pytest.fixture(scope="module")
def mono(mono_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{mono_url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


def create(client: openai.OpenAI, messages: list[Any] = QUESTION, **fields: Any) -> Any:
    model = client.models.list().data[0].id
    return client.chat.completions.create(model=model, messages=messages, **fields)


def ids_of(content: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(content, add_special_tokens=False).ids
    return ids


def test_log_probabilities(client: openai.OpenAI) -> None:
    answer = create(client, logprobs=True, top_logprobs=5)
    (choice,) = answer.choices
    content = choice.logprobs.content
    assert choice.logprobs.refusal is None
    assert "".join(entry.token for entry in content) == choice.message.content
    assert bytes(byte for entry in content for byte in entry.bytes).decode() == choice.message.content
    assert len(content) == answer.usage.completion_tokens - 1, "the end token has no entry"
    for entry in content:
        assert len(entry.top_logprobs) == 5
        assert entry.top_logprobs[0].token == entry.token, "greedy takes the likeliest"
        assert entry.top_logprobs[0].logprob == entry.logprob <= 0
        likeliest = [top.logprob for top in entry.top_logprobs]
        assert likeliest == sorted(likeliest, reverse=True)
    assert create(client, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert create(client).choices[0].logprobs is None


def test_choices_are_the_runs_of_the_next_seeds(client: openai.OpenAI, mono: openai.OpenAI) -> None:
    how: dict[str, Any] = {
        "messages": DESCRIBE,
        "temperature": 1.4,
        "max_tokens": 24,
        "logprobs": True,
        "top_logprobs": 2,
    }
    for one in (client, mono):
        three = create(one, n=3, seed=11, **how)
        assert [choice.index for choice in three.choices] == [0, 1, 2]
        alone = [create(client, seed=11 + index, **how) for index in range(3)]
        assert [choice.message.content for choice in three.choices] == [a.choices[0].message.content for a in alone]
        assert three.usage.prompt_tokens == alone[0].usage.prompt_tokens
        assert three.usage.completion_tokens == sum(a.usage.completion_tokens for a in alone)
        for choice, single in zip(three.choices, alone, strict=True):
            for mine, theirs in zip(choice.logprobs.content, single.choices[0].logprobs.content, strict=True):
                assert (mine.token, mine.bytes) == (theirs.token, theirs.bytes)
                assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_a_stream_of_several_choices(client: openai.OpenAI) -> None:
    how: dict[str, Any] = {
        "messages": DESCRIBE,
        "temperature": 1.4,
        "max_tokens": 24,
        "n": 3,
        "seed": 5,
        "logprobs": True,
    }
    whole = create(client, **how)
    chunks = list(create(client, **how, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    for choice in whole.choices:
        mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert [c.delta.role for c in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert "".join(c.delta.content or "" for c in mine) == choice.message.content
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]
        entries = [entry for c in mine if c.logprobs for entry in c.logprobs.content]
        assert [entry.token for entry in entries] == [entry.token for entry in choice.logprobs.content]


def test_stop_strings(client: openai.OpenAI) -> None:
    whole = create(client, DESCRIBE, max_tokens=24).choices[0].message.content
    words = whole.split(" ")
    assert len(words) > 3
    cut = create(client, DESCRIBE, max_tokens=24, stop=["nowhere", words[2]]).choices[0]
    assert cut.message.content == whole[: whole.index(words[2])]
    assert cut.finish_reason == "stop"


def test_stop_tokens(client: openai.OpenAI) -> None:
    whole = create(client, DESCRIBE, max_tokens=24, logprobs=True).choices[0]
    tokens = [entry.token for entry in whole.logprobs.content]
    (end,) = ids_of(tokens[2])
    first = next(index for index, token in enumerate(tokens) if ids_of(token) == [end])
    cut = create(client, DESCRIBE, max_tokens=24, extra_body={"stop_token_ids": [end]})
    assert cut.choices[0].message.content == "".join(tokens[:first])
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens == first + 1


def test_a_bias_bans_a_token(client: openai.OpenAI) -> None:
    plain = create(client, logprobs=True).choices[0]
    first = plain.logprobs.content[0].token
    (banned,) = ids_of(first)
    other = create(client, logit_bias={str(banned): -100}, logprobs=True).choices[0]
    assert first not in [entry.token for entry in other.logprobs.content]
    assert other.logprobs.content[0].token != first


def test_a_bias_forces_a_token(client: openai.OpenAI) -> None:
    (forced,) = ids_of(" blue")[-1:]
    answer = create(client, logit_bias={str(forced): 100}, max_tokens=4).choices[0]
    assert answer.message.content == TOKENIZER.decode([forced] * 4)
    assert answer.finish_reason == "length"


def test_minimum_length_and_ignored_ends(client: openai.OpenAI) -> None:
    plain = create(client)
    least = plain.usage.completion_tokens + 3
    longer = create(client, extra_body={"min_tokens": least})
    assert longer.usage.completion_tokens >= least
    assert longer.choices[0].message.content.startswith(plain.choices[0].message.content)
    endless = create(client, max_tokens=30, extra_body={"ignore_eos": True})
    assert (endless.usage.completion_tokens, endless.choices[0].finish_reason) == (30, "length")


def test_a_priority_changes_no_answer(client: openai.OpenAI) -> None:
    plain = create(client, DESCRIBE, max_tokens=12).choices[0].message.content
    for priority in (-100, 100):
        answer = create(client, DESCRIBE, max_tokens=12, extra_body={"priority": priority})
        assert answer.choices[0].message.content == plain
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, extra_body={"priority": 101})
    assert caught.value.param == "priority"


def test_truncations_that_leave_one_token_are_greedy(client: openai.OpenAI) -> None:
    greedy = create(client, DESCRIBE, temperature=0, max_tokens=16).choices[0].message.content
    for only in ({"top_k": 1}, {"min_p": 1}):
        hot = create(client, DESCRIBE, temperature=2, max_tokens=16, extra_body=only)
        assert hot.choices[0].message.content == greedy
    assert create(client, DESCRIBE, temperature=2, seed=1, max_tokens=16).choices[0].message.content != greedy


def test_penalties_change_the_answer_the_same_way_everywhere(client: openai.OpenAI, mono: openai.OpenAI) -> None:
    plain = create(client, DESCRIBE, max_tokens=40, extra_body={"ignore_eos": True}).choices[0].message.content
    for fields in (
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"extra_body": {"repetition_penalty": 1.8}},
    ):
        fields = {"max_tokens": 40, **fields, "extra_body": {**fields.get("extra_body", {}), "ignore_eos": True}}
        ours = create(client, DESCRIBE, **fields).choices[0].message.content
        assert ours != plain, fields
        assert ours == create(mono, DESCRIBE, **fields).choices[0].message.content


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 17}, "n"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty"),
        ({"extra_body": {"min_tokens": 5}, "max_tokens": 4}, "min_tokens"),
        ({"extra_body": {"stop_token_ids": [-1]}}, "stop_token_ids"),
        ({"n": 2, "extra_body": {"best_of": 3}}, "best_of"),
    ],
)
def test_what_is_out_of_bounds_is_named(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, **fields)
    assert (caught.value.param or "").split(".")[0] == param
