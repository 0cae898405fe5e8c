"""The official client against a running cluster: what people's programs do."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from PIL import Image, ImageDraw

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

COLOURS = {"red": (222, 40, 38), "blue": (49, 90, 200)}


@pytest.fixture(scope="module")
def client(cluster_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster_url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    (only,) = client.models.list().data
    assert client.models.retrieve(only.id).id == only.id
    return only.id


def picture(shape: str, colour: str) -> dict[str, Any]:
    image = Image.new("RGB", (168, 168), (130, 130, 130))
    draw = ImageDraw.Draw(image).ellipse if shape == "circle" else ImageDraw.Draw(image).rectangle
    draw((48, 48, 120, 120), fill=COLOURS[colour])
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"},
    }


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def user(*parts: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize("colour", COLOURS)
def test_chat_about_a_picture(client: openai.OpenAI, model: str, colour: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=user(picture("circle", colour), text("What colour is the circle?"))
    )
    assert answer.choices[0].message.role == "assistant"
    assert colour in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 36, "the picture's tokens count"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_with_usage_says_the_same(client: openai.OpenAI, model: str) -> None:
    messages = user(picture("circle", "red"), text("What colour is the circle?"))
    whole = client.chat.completions.create(model=model, messages=messages)
    chunks = list(
        client.chat.completions.create(
            model=model, messages=messages, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert content == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "stop"
    usage, expected = chunks[-1].usage, whole.usage
    assert usage is not None
    assert expected is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (expected.prompt_tokens, expected.completion_tokens)


def test_several_pictures_keep_their_places(client: openai.OpenAI, model: str) -> None:
    red, blue = picture("circle", "red"), picture("circle", "blue")

    def colour_in(second: str, *pictures: dict[str, Any]) -> str:
        question = text(f"What colour is the circle in image {second}?")
        answer = client.chat.completions.create(model=model, messages=user(*pictures, question))
        return answer.choices[0].message.content or ""

    assert "blue" in colour_in("2", red, blue)
    assert "red" in colour_in("2", blue, red)
    assert "red" in colour_in("1", red, blue)


def test_a_conversation_of_several_turns(client: openai.OpenAI, model: str) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "You answer questions about pictures."},
        *user(picture("circle", "red"), text("What colour is the circle?")),
        {"role": "assistant", "content": "red"},
        *user(text("Which shape is red?")),
    ]
    answer = client.chat.completions.create(model=model, messages=messages)
    assert "circle" in (answer.choices[0].message.content or "")


def test_limits_and_sampling(client: openai.OpenAI, model: str) -> None:
    messages = user(picture("circle", "red"), text("Describe the image."))
    one = client.chat.completions.create(model=model, messages=messages, max_completion_tokens=1)
    assert one.choices[0].finish_reason == "length"
    assert one.usage is not None
    assert one.usage.completion_tokens == 1
    seeded = [
        client.chat.completions.create(model=model, messages=messages, temperature=1.5, seed=7)
        .choices[0]
        .message.content
        for _ in range(2)
    ]
    assert seeded[0] == seeded[1]


def test_a_stop_string_cuts_the_answer(client: openai.OpenAI, model: str) -> None:
    messages = user(picture("circle", "red"), text("What colour is the circle?"))
    whole = client.chat.completions.create(model=model, messages=messages).choices[0].message.content or ""
    assert len(whole) > 1
    cut = client.chat.completions.create(model=model, messages=messages, stop=whole[1:]).choices[0]
    assert (cut.message.content, cut.finish_reason) == (whole[0], "stop")


def test_errors_are_the_clients_own(client: openai.OpenAI, model: str) -> None:
    messages = user(text("hello"))
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="another", messages=messages)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=messages, max_tokens=-1)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(
            model=model,
            messages=user({"type": "image_url", "image_url": {"url": "data:image/png;base64,####"}}),
            stream=True,
        )
    with pytest.raises(openai.BadRequestError, match="audio"):
        client.chat.completions.create(
            model=model, messages=user({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}})
        )


def test_the_timeline_comes_on_request(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=user(picture("square", "blue"), text("What colour is the square?")),
        extra_headers={"x-triptych-timeline": "1"},
    )
    told = answer.model_dump()["triptych"]
    assert {row["stage"] for row in told["timeline"]} == {"router", "encoder", "prefill", "decode"}
    assert set(told["workers"]) == {"encoder", "prefill", "decode"}
