"""The HTTP API: answers, whole and streamed, and the endpoints beside them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.types import Message

from services.router import chat_answer
from services.router.answer_text import AnswerText, TextPiece
from services.router.app import Model
from services.router.pipeline import Answer
from tests.unit import router_house
from tests.unit.router_house import TEXT, Api, error_of, events, picture, serve
from triptych.core.errors import NoRoom, PeerLost
from triptych.core.plan import Token
from triptych.core.worker import Role

model, api = router_house.model, router_house.api


async def test_a_whole_answer(api: Api) -> None:
    response = await api.chat()
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["model"] == api.model
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert choice["finish_reason"] == "stop"
    usage = body["usage"]
    assert usage["completion_tokens"] == len(api.pipeline.tokens)
    assert usage["prompt_tokens"] == api.pipeline.plans[0].num_prompt_tokens
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    assert "triptych" not in body


async def test_a_stream(api: Api) -> None:
    response = await api.chat(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(response)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == TEXT
    assert chunks[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" and "usage" not in chunk for chunk in chunks)


async def test_a_stream_with_usage(api: Api) -> None:
    *chunks, last, done = events(await api.chat(stream=True, stream_options={"include_usage": True}))
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(api.pipeline.tokens)
    assert all(chunk["usage"] is None for chunk in chunks)


@pytest.mark.parametrize("options", [{}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}])
async def test_the_timeline_comes_when_asked_for(api: Api, options: dict[str, Any]) -> None:
    response = await api.chat(headers={"x-triptych-timeline": "1"}, **options)
    bodies = events(response)[:-1] if options else [response.json()]
    assert all("triptych" not in body for body in bodies[:-1])
    told = bodies[-1]["triptych"]
    assert told["workers"] == {"decode": ["decode-0"]}
    by_name = {(row["stage"], row["event"]): row for row in told["timeline"]}
    assert {("router", name) for name in ("parse", "plan", "first_token", "finish")} < set(by_name)
    assert by_name["encoder", "encode"] == {
        "stage": "encoder", "event": "encode", "start_ns": 5, "end_ns": 1_000_005, "duration_ms": 1.0, "bytes": 10,
        "tokens": 4, "worker": "encoder-0", "attempt": 0, "source": "remote", "item": 0,
    }  # fmt: skip


async def test_stop_strings_cut_and_cancel(api: Api) -> None:
    async def endless(answer: Answer) -> None:
        for index, token in enumerate(api.pipeline.tokens):
            answer.emit(0, [Token(index, token)])
        await asyncio.Event().wait()

    api.pipeline.drive = endless
    for stream in (False, True):
        api.pipeline.cancelled.clear()
        response = await api.chat(stop=["is r", "nowhere"], stream=stream)
        assert api.pipeline.cancelled.is_set()
        if not stream:
            assert response.json()["choices"][0]["message"]["content"] == "the square "
            assert response.json()["choices"][0]["finish_reason"] == "stop"
            continue
        deltas = [chunk["choices"][0]["delta"] for chunk in events(response)[:-1]]
        assert "".join(delta.get("content", "") for delta in deltas) == "the square "


async def test_pictures_become_items_in_order(api: Api) -> None:
    content = [picture(60, 40), {"type": "text", "text": "and <|image_pad|>"}, picture(40, 90, "JPEG")]
    response = await api.chat(messages=[{"role": "user", "content": content}])
    assert response.status_code == 200
    (plan,) = api.pipeline.plans
    assert [(item.width_px, item.height_px) for item in plan.items] == [(60, 40), (40, 90)]
    assert [len(one) for one in api.pipeline.media[0]] == [item.media_bytes for item in plan.items]
    assert 4.0 < plan.timeout_s < 5.0, "what parsing took is gone"


async def test_request_ids_are_minted_here(api: Api) -> None:
    ids = {(await api.chat(headers={"x-request-id": "mine"})).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    assert "mine" not in ids


async def test_errors_before_the_first_token_have_their_status(api: Api) -> None:
    async def fail(answer: Answer) -> None:
        raise NoRoom("no room came free")

    api.pipeline.drive = fail
    for stream in (False, True):
        response = await api.chat(stream=stream)
        assert error_of(response, 503)["code"] == "no_room"
        assert response.headers["retry-after"] == "1"


async def test_an_error_after_the_first_token_is_an_event(api: Api) -> None:
    async def break_off(answer: Answer) -> None:
        answer.emit(0, [Token(0, api.pipeline.tokens[0])])
        raise PeerLost("the connection to a worker was lost")

    api.pipeline.drive = break_off
    response = await api.chat(stream=True)
    assert response.status_code == 200
    *_, last = events(response)
    assert last == {
        "error": {
            "message": "the connection to a worker was lost",
            "type": "service_unavailable_error",
            "param": None,
            "code": "peer_lost",
        }
    }
    assert error_of(await api.chat(), 503)["code"] == "peer_lost"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 1])
async def test_a_caller_that_goes_away_cancels_the_answer(api: Api, stream: bool, tokens: int) -> None:
    started = asyncio.Event()

    async def endless(answer: Answer) -> None:
        answer.emit(0, [Token(index, api.pipeline.tokens[index]) for index in range(tokens)])
        started.set()
        await asyncio.Event().wait()

    api.pipeline.drive = endless
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": stream}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await started.wait()
        await asyncio.sleep(0.02)
        return {"type": "http.disconnect"}

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b""}
    async with asyncio.timeout(2):
        with contextlib.suppress(OSError):
            await api.app(scope, receive, send)
    assert api.pipeline.cancelled.is_set()
    assert bool(sent) == (stream and tokens > 0)


# --- the other endpoints ----------------------------------------------------------------------------------------------


async def test_no_answer_points_to_the_host_that_the_caller_named(api: Api) -> None:
    for path in ("/v1/models/", "/metrics/", "/v1/chat/completions/", "//elsewhere.example/health/"):
        response = await api.client.get(path, headers={"host": "elsewhere.example"})
        assert response.status_code == 404
        assert "location" not in response.headers


async def test_models(api: Api) -> None:
    (model,) = (await api.client.get("/v1/models")).json()["data"]
    assert (model["id"], model["object"]) == (api.model, "model")
    assert (await api.client.get(f"/v1/models/{api.model}")).json() == model


async def test_probes(api: Api) -> None:
    assert (await api.client.get("/health")).status_code == 200
    assert (await api.client.get("/ready")).json() == {"status": "ready", "missing": []}
    api.missing.append(Role.DECODE)
    response = await api.client.get("/ready")
    assert (response.status_code, response.json()["missing"]) == (503, ["decode"])
    assert (await api.client.get("/health")).status_code == 200


async def test_probes_answer_head(api: Api) -> None:
    for path in ("/health", "/ready"):
        response = await api.client.head(path)
        assert (response.status_code, response.headers["content-type"]) == (200, "application/json")


async def test_metrics_count_by_endpoint_and_status(api: Api) -> None:
    await api.chat()
    await api.client.get("/some/path/that/a/caller/made/up")
    text = (await api.client.get("/metrics")).text
    assert 'triptych_requests_total{endpoint="/v1/chat/completions",status="200"}' in text
    assert 'endpoint="other",status="404"' in text
    assert "made" not in text
    assert "triptych_router_inflight_requests 0.0" in text


async def test_the_schema_is_published(api: Api) -> None:
    schema = (await api.client.get("/openapi.json")).json()
    assert "requestBody" in schema["paths"]["/v1/chat/completions"]["post"]


async def test_a_bug_after_the_first_token_is_an_event_too(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The status is out already: without an event a client cannot tell a broken answer from a short one."""
    push, seen = AnswerText.push, []

    def break_down(text: AnswerText, tokens: Sequence[Token]) -> TextPiece:
        seen.append(tokens)
        if len(seen) == 2:
            raise KeyError("secret")
        return push(text, tokens)

    monkeypatch.setattr(AnswerText, "push", break_down)
    response = await api.chat(stream=True)
    assert response.status_code == 200
    last = events(response)[-1]
    assert last["error"]["type"] == "server_error" and last["error"]["code"] == "internal"
    assert "secret" not in response.text and "[DONE]" not in response.text


@pytest.mark.parametrize("choices", [1, 3])
async def test_a_caller_that_does_not_read_is_cut_off_soon_after_the_requests_time(
    model: Model, choices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_answer, "READ_GRACE_S", 0.2)
    sent: list[Message] = []
    async with serve(model, timeout_s=0.3) as api:
        body = {"messages": [{"role": "user", "content": "what is it?"}], "stream": True, "n": choices}
        arriving = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])

        async def receive() -> Message:
            for message in arriving:
                return message
            return await asyncio.Event().wait()  # type: ignore[return-value]

        async def send(message: Message) -> None:
            sent.append(message)
            if len(sent) > 3:
                await asyncio.Event().wait()

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b""}
        async with asyncio.timeout(5):
            await api.app(scope, receive, send)
    assert len(sent) == 4
    assert sent[0]["status"] == 200
