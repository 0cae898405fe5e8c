"""What an answer says of the cache, as people's programs read it: `usage.prompt_tokens_details.cached_tokens`."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.integration.test_openai_client import picture, text, user
from triptych.stages.settings import LanguageSettings

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

PAGE = LanguageSettings.page_tokens
QUESTION = "What colour is the circle?"


@pytest.fixture(params=["cluster_url", "mono_url"])
def client(request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    url = request.getfixturevalue(request.param)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


@pytest.fixture
def conversation() -> list[Any]:
    """Nobody has had it before, from its first page on, and what stands before the picture fills some pages."""
    system = " ".join(uuid.uuid4().hex for _ in range(3))
    return [{"role": "system", "content": system}, *user(picture("circle", "red"), text(QUESTION))]


def asked(client: openai.OpenAI, messages: list[Any]) -> tuple[str, int, int, int]:
    """The answer, and (prompt, cached, completion) tokens."""
    answer = client.chat.completions.create(model=client.models.list().data[0].id, messages=messages, max_tokens=24)
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    cached = usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    return answer.choices[0].message.content or "", usage.prompt_tokens, cached, usage.completion_tokens


def full_pages(num_tokens: int) -> int:
    """The tokens in them."""
    return num_tokens // PAGE * PAGE


def test_the_same_request_again_is_cached_but_for_its_last_page(client: openai.OpenAI, conversation: list[Any]) -> None:
    first, num_prompt, cached, _ = asked(client, conversation)
    assert cached == 0
    again, num_again, cached, _ = asked(client, conversation)
    assert (again, num_again) == (first, num_prompt)
    assert cached == full_pages(num_prompt - 1), "the logits of the last token are needed: it is computed each time"


def test_a_stream_says_it_too(client: openai.OpenAI, conversation: list[Any]) -> None:
    _, num_prompt, _, _ = asked(client, conversation)
    chunks = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=conversation,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    usage = list(chunks)[-1].usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == full_pages(num_prompt - 1)


def test_a_follow_up_turn_finds_the_turns_before_it(client: openai.OpenAI, conversation: list[Any]) -> None:
    answer, num_prompt, _, num_answer = asked(client, conversation)
    turns = [{"role": "assistant", "content": answer}, {"role": "user", "content": "And what shape is it?"}]
    _, num_longer, cached, _ = asked(client, conversation + turns)
    assert num_longer > num_prompt + num_answer
    most = full_pages(num_prompt + num_answer - 1)  # where the answer was decoded, its pages are there too
    assert full_pages(num_prompt) <= cached <= most


def test_another_picture_in_the_same_words_is_not_cached(client: openai.OpenAI, conversation: list[Any]) -> None:
    answer, _, _, _ = asked(client, conversation)
    other = [conversation[0], *user(picture("circle", "blue"), text(QUESTION))]
    others, num_prompt, cached, _ = asked(client, other)
    assert 0 < cached <= full_pages(num_prompt - 36), "nothing from the picture on, and it has 36 tokens"
    assert "blue" in others and "red" in answer
