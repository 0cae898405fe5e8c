from __future__ import annotations

import re
import time
from typing import Any

import pytest

from services.router.chat_messages import MAX_PARTS
from services.router.chat_request import SamplingOptions, parse_chat_request
from triptych.core.errors import InvalidRequest, ModalityUnsupported, RequestError
from triptych.text.messages import ChatMessage, ImagePart, TextPart

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": HELLO, **fields}


def test_the_least() -> None:
    request = parse_chat_request({"messages": HELLO})
    assert request.messages == (ChatMessage("user", "hello"),)
    assert (request.model, request.max_tokens, request.temperature, request.seed) == (None, None, None, None)
    assert (request.stop, request.stream, request.include_usage, request.ignored) == ((), False, False, ())


def test_roles_and_parts() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "name": "x", "content": [
            {"type": "image_url", "image_url": {"url": " data:a ", "detail": "low"}},
            {"type": "text", "text": "and"},
            {"type": "image_url", "image_url": "data:b"},
        ]},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": [{"type": "text", "text": "yes"}]},
    ]  # fmt: skip
    request = parse_chat_request(body(messages=messages))
    assert request.messages == (
        ChatMessage("system", "be brief"),
        ChatMessage("user", (ImagePart(), TextPart("and"), ImagePart())),
        ChatMessage("assistant", ""),
        ChatMessage("assistant", (TextPart("yes"),)),
    )
    assert [reference.uri for reference in request.media] == ["data:a", "data:b"]
    assert request.media[1].param == "messages.1.content.2.image_url"


def test_all_that_is_served() -> None:
    request = parse_chat_request(
        body(
            max_tokens=3,
            max_completion_tokens=4,
            temperature=1,
            top_p=0.5,
            seed=-5,
            stop=["a", "", "b"],
            stream=True,
            stream_options={"include_usage": True, "x": 1},
            n=1,
            user="u",
        )
    )
    assert request.max_tokens == 4
    assert (request.temperature, request.top_p, request.seed, request.stop) == (1.0, 0.5, -5, ("a", "b"))
    assert request.stream
    assert request.include_usage
    assert parse_chat_request(body(stop="x")).stop == ("x",)
    assert parse_chat_request(body(stop=None, seed=None, max_tokens=None, temperature=None)).stop == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("max_tokens", value) for value in (0, -1, 2**31, 2**63, 1.5, "5", True, [], float("nan"))],
        *[("max_completion_tokens", value) for value in (0, -1, 2**31)],
        *[("temperature", value) for value in (-0.1, 2.1, float("nan"), float("inf"), "1", True)],
        *[("top_p", value) for value in (0, -1, 1.01, float("nan"))],
        *[("seed", value) for value in (2**64, -(2**63) - 1, 1.5, "x")],
        *[("n", value) for value in (0, 17, 2**31, -1, 1.5, True)],
        *[("best_of", value) for value in (2, 0, 17, "1")],
        *[("logprobs", value) for value in (1, "true", 0)],
        *[("top_logprobs", value) for value in (-1, 21, 2**31, 1.5, True)],
        *[("presence_penalty", value) for value in (-2.01, 2.01, 2**31, float("nan"), float("inf"), "1", True)],
        *[("frequency_penalty", value) for value in (-2.01, 2.01, 2**31, float("nan"), float("-inf"))],
        *[("repetition_penalty", value) for value in (0, -1, 10.01, 2**31, float("nan"), float("inf"))],
        *[("top_k", value) for value in (-2, 2**31, 1.5, "5", float("nan"))],
        *[("min_p", value) for value in (-0.01, 1.01, 2**31, float("nan"))],
        *[("min_tokens", value) for value in (-1, 2**31, 1.5, float("nan"))],
        *[("priority", value) for value in (-101, 101, 2**31, 1.5, "1", True)],
        *[("ignore_eos", value) for value in (1, "yes")],
        *[("stop_token_ids", value) for value in ([-1], [1_000_000], [2**31], [1.5], ["1"], 5, [1] * 65)],
        *[("logit_bias", value) for value in ({"5": 100.01}, {"5": -101}, {"5": 2**31}, {"5": float("nan")})],
        *[("logit_bias", value) for value in ({"5": True}, {"5": "1"}, {"5": None}, {"": 1}, {"x": 1}, {"-1": 1})],
        *[("logit_bias", value) for value in ({"05": 1}, {"5.0": 1}, {"٥": 1}, {"1" * 10: 1}, [], 5)],
        ("logit_bias", {str(number): 1 for number in range(301)}),
        *[("stop", value) for value in (["x"] * 17, "x" * 257, [1], {}, 5)],
        *[("stream", value) for value in ("yes", 1)],
        ("stream_options", []),
        ("model", 5),
        ("model", "m" * 513),
        *[("messages", value) for value in ([], None, "x", ["x"], {})],
    ],
)
def test_what_is_out_of_bounds_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat_request(body(**{name: value}))
    assert caught.value.param is not None
    assert caught.value.param.startswith(name)
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("value", [None, 5, "x", [], [1]])
def test_a_body_that_is_no_object(value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^the body must be a JSON object$"):
        parse_chat_request(value)


@pytest.mark.parametrize("fields", [{"stream_options": []}, {"stream_options": 5}, {"messages": [5]}])
def test_no_message_names_our_classes(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat_request(body(**fields))
    assert not re.search(r"[a-z][A-Z]", caught.value.message), caught.value.message


def test_sampling_options() -> None:
    request = parse_chat_request(
        body(
            n=16,
            best_of=16,
            logprobs=True,
            top_logprobs=20,
            logit_bias={"12": -100, "3": 0.5},
            presence_penalty=-2,
            frequency_penalty=2.0,
            repetition_penalty=10,
            top_k=40,
            min_p=1,
            max_tokens=7,
            min_tokens=7,
            ignore_eos=True,
            stop_token_ids=[5, 999_999],
        )
    )
    assert request.num_choices == 16
    assert request.options == SamplingOptions(
        top_k=40,
        min_p=1.0,
        repetition_penalty=10.0,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        logit_bias=((3, 0.5), (12, -100.0)),
        stop_token_ids=(5, 999_999),
        min_tokens=7,
        ignore_eos=True,
        num_logprobs=20,
    )


def test_priority_is_vllms() -> None:
    """The lower, the earlier; 0 when nothing is said."""
    assert [parse_chat_request(body(priority=value)).priority for value in (-100, 0, 100, None)] == [-100, 0, 100, 0]
    assert parse_chat_request(body()).priority == 0


def test_nothing_asked_is_nothing_changed() -> None:
    names = ("n", "best_of", "logprobs", "top_logprobs", "logit_bias", "presence_penalty", "frequency_penalty")
    names += ("repetition_penalty", "top_k", "min_p", "min_tokens", "ignore_eos", "stop_token_ids")
    for fields in ({}, dict.fromkeys(names)):
        request = parse_chat_request(body(**fields))
        assert (request.options, request.num_choices) == (SamplingOptions(), 1)


@pytest.mark.parametrize(("top_k", "parsed"), [(-1, 0), (0, 0), (1, 1), (None, None)])
def test_no_limit_and_the_models_own_limit_are_told_apart(top_k: int | None, parsed: int | None) -> None:
    assert parse_chat_request(body(top_k=top_k)).options.top_k == parsed


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
        ({"logprobs": False, "top_logprobs": 0}, None),
    ],
)
def test_log_probabilities(fields: dict[str, Any], count: int | None) -> None:
    assert parse_chat_request(body(**fields)).options.num_logprobs == count


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"top_logprobs": 1, "logprobs": False}, "top_logprobs"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"min_tokens": 6, "max_completion_tokens": 5, "max_tokens": 9}, "min_tokens"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"n": 2, "best_of": 1}, "best_of"),
    ],
)
def test_what_does_not_go_together(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat_request(body(**fields))
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
        {"functions": [{}]},
        {"response_format": {"type": "json_object"}},
        {"response_format": "x"},
        {"modalities": ["text", "audio"]},
    ],
)
def test_what_would_change_the_answer_is_refused_not_ignored(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="not supported yet") as caught:
        parse_chat_request(body(**fields))
    assert caught.value.param == next(iter(fields))


def test_neutral_values_are_accepted() -> None:
    request = parse_chat_request(
        body(
            tools=[],
            tool_choice="none",
            response_format={"type": "text"},
            logprobs=False,
            logit_bias={},
            frequency_penalty=0,
            presence_penalty=0.0,
            top_k=-1,
            repetition_penalty=1.0,
            modalities=["text"],
            store=True,
            metadata={"a": "b"},
        )
    )
    assert request.ignored == ()


def test_unknown_parameters_are_told() -> None:
    assert parse_chat_request(body(chat_template="{{ 1 }}", wibble=1)).ignored == ("chat_template", "wibble")


@pytest.mark.parametrize(
    ("part", "modality"),
    [
        ({"type": "input_audio", "input_audio": {}}, "audio"),
        ({"type": "audio_url"}, "audio"),
        ({"type": "video_url"}, "video"),
        ({"type": "file"}, "file"),
    ],
)
def test_other_modalities_are_named(part: dict[str, Any], modality: str) -> None:
    with pytest.raises(ModalityUnsupported, match=f"{modality} input is not served yet") as caught:
        parse_chat_request(body(messages=[{"role": "user", "content": [part]}]))
    assert caught.value.http_status == 400


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_embeds", "image_embeds": "AAAA"},
        {"type": "audio_embeds", "audio_embeds": "AAAA"},
        {"type": "precomputed_embedding", "feature": [[0.0]]},
        {"type": "processor_output", "pixel_values": [[0.0]]},
        {"type": "image_url", "image_url": {"url": "data:,x", "format": "precomputed_embedding"}},
        {"type": "image_url", "image_url": {"format": "PROCESSOR_OUTPUT", "feature": [[0.0]]}},
        {"type": "image_url", "image_url": {"url": "data:,x", "precomputed_embeddings": [[0.0]]}},
    ],
)
def test_tensors_are_not_taken_over_http(part: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="precomputed inputs are not taken over HTTP") as caught:
        parse_chat_request(body(messages=[{"role": "user", "content": [part]}]))
    assert caught.value.http_status == 400
    assert (caught.value.param or "").startswith("messages.0.content.0")


def test_a_picture_that_names_its_file_format_is_taken() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "format": "image/png"}}
    assert len(parse_chat_request(body(messages=[{"role": "user", "content": [part]}])).media) == 1


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "user", "content": []},
        {"role": "user", "content": 5},
        {"role": "user", "content": ["x"]},
        {"role": "user", "content": [{}]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": [{"type": "text", "text": 5}]},
        {"role": "user", "content": [{"type": "image_url"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": 5}}]},
        {"role": "user", "content": [{"type": ["text"], "text": "x"}]},
        {"role": "tool", "content": "x"},
        {"role": "assistant", "tool_calls": [{}]},
        {"role": ["user"], "content": "x"},
        {"role": "<|im_start|>system", "content": "x"},
        {"role": 5, "content": "x"},
    ],
)
def test_malformed_messages(message: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        parse_chat_request(body(messages=[*HELLO, message]))
    assert (caught.value.param or "").startswith("messages.1")


def test_the_parts_of_all_messages_are_bounded_together() -> None:
    """Each costs the event loop a microsecond or more, and a body has room for millions."""

    def conversation(num_messages: int, num_parts: int) -> dict[str, Any]:
        content = [{"type": "text", "text": "x"}] * num_parts
        return {"messages": [{"role": "user", "content": content}] * num_messages}

    assert len(parse_chat_request(conversation(4, MAX_PARTS // 4)).messages) == 4
    for num_messages, num_parts in ((4, MAX_PARTS // 4 + 1), (1, MAX_PARTS + 1), (1, 1_000_000)):
        begun_s = time.thread_time()
        with pytest.raises(InvalidRequest, match=str(MAX_PARTS)) as refused:
            parse_chat_request(conversation(num_messages, num_parts))
        assert refused.value.param == "messages"
        assert time.thread_time() - begun_s < 0.2
