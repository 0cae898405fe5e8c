"""The HTTP API with everything real but the workers: a scripted pipeline answers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI
from PIL import Image

from services.router.app import Model
from services.router.chat_service import ChatLimits, ChatService
from services.router.media import MediaLimits, MediaReader
from services.router.openai_api import build_api
from services.router.pipeline import Answer, Beside, Done, Pipeline
from services.router.tasks import owned_task
from tests.unit.demo_dir import demo_model_dir
from triptych.core.clock import SystemClock
from triptych.core.errors import NoRoom, PeerLost, TriptychError
from triptych.core.plan import EmbeddingSource, FinishReason, Plan, Token, TokenLogprobs
from triptych.core.timeline import Timeline, TimelineEvent
from triptych.core.worker import Role

Drive = Callable[[Answer], Any]
TEXT = "the square is red"


class ScriptedPipeline:
    """Stands in for the pipeline. `drive` feeds the answer; what was asked is kept."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self.drive: Drive = self.say
        self.plans: list[Plan] = []
        self.media: list[Sequence[bytes]] = []
        self.beside: list[Beside | None] = []
        self.answers: list[Answer] = []
        self.num_cancelled = 0
        self.cancelled = asyncio.Event()

    @asynccontextmanager
    async def answer(
        self,
        plan: Plan,
        media: Sequence[bytes],
        request_id: str,
        timeline: Timeline | None,
        beside: Beside | None = None,
    ) -> AsyncIterator[Answer]:
        self.plans.append(plan)
        self.media.append(media)
        self.beside.append(beside)
        answer = Answer(plan, timeline or Timeline("router", "router", SystemClock()))
        self.answers.append(answer)
        async with owned_task(self._run(answer)):
            yield answer

    async def _run(self, answer: Answer) -> None:
        try:
            await self.drive(answer)
        except TriptychError as error:
            answer.end(error)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            self.cancelled.set()
            raise

    async def say(self, answer: Answer) -> None:
        event = TimelineEvent("encoder", "encode", 5, 1_000_005, "encoder-0", 0, 10, 4, EmbeddingSource.REMOTE, 0)
        answer.progress.timeline.append(event)
        answer.progress.workers = {Role.DECODE: ["decode-0"]}
        answer.progress.cached_tokens = 2
        for index, token in enumerate(self.tokens):
            answer.emit(0, [Token(index, token)])
            await asyncio.sleep(0)
        answer.end(Done(FinishReason.STOP))


class Api:
    def __init__(self, app: FastAPI, client: httpx.AsyncClient, pipeline: ScriptedPipeline, model: str) -> None:
        self.app = app
        self.client = client
        self.pipeline = pipeline
        self.model = model
        self.missing: list[Role] = []
        self.tokenizer: Any = None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids))

    def token_id(self, token: str) -> int:
        return int(self.tokenizer.token_to_id(token))

    async def chat(self, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": self.model, "messages": [{"role": "user", "content": "what is it?"}], **fields}
        return await self.client.post("/v1/chat/completions", json=body, headers=headers)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(demo_model_dir())


@pytest.fixture
async def api(model: Model) -> AsyncIterator[Api]:
    async with serve(model) as found:
        yield found


@asynccontextmanager
async def serve(model: Model, strict: bool = False, timeout_s: float = 5.0) -> AsyncIterator[Api]:
    pipeline = ScriptedPipeline(model.tokenizer.tokenizer.encode(TEXT, add_special_tokens=False).ids)
    before = Image.MAX_IMAGE_PIXELS
    with ThreadPoolExecutor(2) as executor:
        chat = ChatService(
            model_name=model.adapter.model_name,
            limits=ChatLimits(max_body_bytes=100_000, request_timeout_s=timeout_s, strict=strict),
            reader=MediaReader(MediaLimits(4, 50_000, 1_000_000), executor),
            planner=model.planner,
            pipeline=cast(Pipeline, pipeline),
            executor=executor,
            clock=SystemClock(),
            new_detokenizer=model.new_detokenizer,
            token_bytes=model.token_bytes,
            context_tokens=lambda: 512,
        )
        missing: list[Role] = []
        app = build_api(chat, lambda: tuple(missing))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            found = Api(app, client, pipeline, model.adapter.model_name)
            found.missing, found.tokenizer = missing, model.tokenizer.tokenizer
            yield found
    Image.MAX_IMAGE_PIXELS = before


def picture(width: int = 60, height: int = 40, kind: str = "PNG") -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(buffer, kind)
    uri = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": uri}}


def events(response: httpx.Response) -> list[Any]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    texts = [line.removeprefix("data: ") for line in lines]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"].startswith("req-")
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    for leak in ("0x", "Traceback", "data:image", "/work", "site-packages", "127.0.0.1"):
        assert leak not in response.text
    return cast(dict[str, Any], body["error"])


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


# --- several choices, log probabilities -----------------------------------------------------------------------------


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


async def test_tokens_that_the_model_does_not_have(api: Api) -> None:
    for fields in ({"logit_bias": {"638": 1}}, {"stop_token_ids": [638]}):
        assert error_of(await api.chat(**fields), 400)["param"] == next(iter(fields))
    assert (await api.chat(logit_bias={"637": 1}, stop_token_ids=[637])).status_code == 200


async def test_the_body_must_be_an_object(api: Api) -> None:
    for content in (b"[]", b"null", b"5", b'"x"'):
        response = await api.client.post("/v1/chat/completions", content=content)
        assert error_of(response, 400)["message"] == "the body must be a JSON object"


async def test_probes_answer_head(api: Api) -> None:
    for path in ("/health", "/ready"):
        response = await api.client.head(path)
        assert (response.status_code, response.headers["content-type"]) == (200, "application/json")


async def test_pictures_become_items_in_order(api: Api) -> None:
    content = [picture(60, 40), {"type": "text", "text": "and <|image_pad|>"}, picture(40, 90, "JPEG")]
    response = await api.chat(messages=[{"role": "user", "content": content}])
    assert response.status_code == 200
    (plan,) = api.pipeline.plans
    assert [(item.width_px, item.height_px) for item in plan.items] == [(60, 40), (40, 90)]
    assert [len(one) for one in api.pipeline.media[0]] == [item.media_bytes for item in plan.items]
    assert 4.0 < plan.timeout_s < 5.0, "what parsing took is gone"


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


async def test_a_bug_is_a_bare_500(api: Api) -> None:
    @api.app.get("/bug")
    async def bug() -> None:
        raise KeyError("/srv/secret")

    assert error_of(await api.client.get("/bug"), 500)["code"] == "internal"


BAD_BODIES: list[tuple[bytes, int, str | None]] = [
    (b"", 400, None),
    (b"{", 400, None),
    (b"[]", 400, None),
    (b"null", 400, None),
    (b'{"messages": NaN}', 400, None),
    (b'{"messages": [{"role": "user", "content": "\xff"}]}', 400, None),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, None),
    (b'{"messages": ' + b"[" * 5000, 400, None),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', 400, None),
    (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 99999999999999999999999}', 400, None),
    (b"x" * 100_001, 413, None),
]


@pytest.mark.parametrize(("content", "status", "param"), BAD_BODIES)
async def test_bad_bodies(api: Api, content: bytes, status: int, param: str | None) -> None:
    response = await api.client.post("/v1/chat/completions", content=content)
    assert error_of(response, status)["type"] == "invalid_request_error"


async def test_a_body_without_a_length_is_bounded_too(api: Api) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b"x" * 1000

    response = await api.client.post("/v1/chat/completions", content=pieces())
    assert error_of(response, 413)["code"] == "payload_too_large"


async def test_a_body_that_drips_ends_at_the_deadline(model: Model) -> None:
    async def drip() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0.01)

    async with serve(model, timeout_s=0.2) as api:
        response = await api.client.post("/v1/chat/completions", content=drip())
        assert error_of(response, 504)["code"] == "deadline_exceeded"


MEDIA: list[tuple[str, int, str]] = [
    ("data:image/png;base64,", 400, "media_invalid"),
    ("data:image/png;base64,####", 400, "media_invalid"),
    ("data:image/png;base64," + base64.b64encode(b"%PDF-1.4").decode(), 415, "media_unsupported"),
    ("data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(50)).decode(), 400, "media_invalid"),
    ("data:image/png;base64," + "A" * 80_000, 413, "payload_too_large"),
    ("https://example.com/a.png", 400, "media_invalid"),
    ("file:///etc/passwd", 400, "media_invalid"),
]


@pytest.mark.parametrize(("uri", "status", "code"), MEDIA)
async def test_bad_media(api: Api, uri: str, status: int, code: str) -> None:
    content = [{"type": "image_url", "image_url": {"url": uri}}]
    error = error_of(await api.chat(stream=True, messages=[{"role": "user", "content": content}]), status)
    assert error["code"] == code
    assert error["param"] == "messages.0.content.0.image_url"
    assert not api.pipeline.plans


async def test_a_strip_of_a_picture_is_refused_before_any_event(api: Api) -> None:
    response = await api.chat(stream=True, messages=[{"role": "user", "content": [picture(1, 201)]}])
    assert "200 times" in error_of(response, 400)["message"]


async def test_too_many_pictures(api: Api) -> None:
    response = await api.chat(messages=[{"role": "user", "content": [picture(1, 1)] * 5}])
    assert "5 pictures" in error_of(response, 400)["message"]


async def test_a_prompt_that_does_not_fit(api: Api) -> None:
    error = error_of(await api.chat(messages=[{"role": "user", "content": "x y " * 600}]), 400)
    assert error["code"] == "request_too_large"
    assert re.search(r"\d+ tokens.* 512", error["message"])


async def test_unknown_models_and_endpoints(api: Api) -> None:
    assert error_of(await api.chat(model="gpt-9"), 404)["code"] == "model_not_found"
    assert error_of(await api.client.get("/v1/models/gpt-9"), 404)["param"] == "model"
    assert error_of(await api.client.get("/v1/nothing"), 404)["code"] == "not_found"
    response = await api.client.get("/v1/chat/completions")
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


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


async def test_metrics_count_by_endpoint_and_status(api: Api) -> None:
    await api.chat()
    await api.client.get("/some/path/that/a/caller/made/up")
    text = (await api.client.get("/metrics")).text
    assert 'triptych_requests_total{endpoint="/v1/chat/completions",status="200"}' in text
    assert 'endpoint="other",status="404"' in text
    assert "made" not in text
    assert "triptych_router_inflight_requests 0.0" in text


async def test_unknown_parameters_are_ignored_or_refused_when_strict(api: Api, model: Model) -> None:
    assert (await api.chat(wibble=1)).status_code == 200
    async with serve(model, strict=True) as strict:
        error = error_of(await strict.chat(wibble=1, wobble=2), 400)
        assert error["param"] == "wibble" and "wibble, wobble" in error["message"]
        assert (await strict.chat(user="me", store=False)).status_code == 200


async def test_request_ids_are_minted_here(api: Api) -> None:
    ids = {(await api.chat(headers={"x-request-id": "mine"})).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    assert "mine" not in ids


async def test_the_schema_is_published(api: Api) -> None:
    schema = (await api.client.get("/openapi.json")).json()
    assert "requestBody" in schema["paths"]["/v1/chat/completions"]["post"]


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
