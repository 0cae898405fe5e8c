"""The HTTP API with everything real but the workers: a scripted pipeline answers.

A test module names the fixtures that it uses as its own: `model, api = router_house.model, router_house.api`.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI
from PIL import Image
from starlette.types import Scope

from services.router.admission.door import Door, LocalFailures
from services.router.admission.keyring import Keyring
from services.router.admission.meter import Meter
from services.router.admission.tenants import ANYBODY, Tenant
from services.router.app import Model
from services.router.byte_budget import ByteBudget
from services.router.chat_service import ChatLimits, ChatService
from services.router.drain import Drain
from services.router.media import MediaLimits, MediaReader
from services.router.openai_api import build_api
from services.router.pipeline import Answer, Beside, Done, Pipeline
from services.router.routing.prompt import Prompt
from services.router.tasks import owned_task
from tests.unit.demo_dir import demo_model_dir
from triptych.core.clock import SystemClock
from triptych.core.errors import TriptychError
from triptych.core.plan import EmbeddingSource, FinishReason, Plan, Token
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
        self.prompts: list[Prompt | None] = []
        self.media: list[Sequence[bytes]] = []
        self.beside: list[Beside | None] = []
        self.answers: list[Answer] = []
        self.num_cancelled = 0
        self.cancelled = asyncio.Event()

    def new_prompt(self, plan: Plan, session: str | None = None) -> Prompt:
        return Prompt.of(plan, {16}, session)

    @asynccontextmanager
    async def answer(
        self,
        plan: Plan,
        media: Sequence[bytes],
        request_id: str,
        timeline: Timeline | None,
        beside: Beside | None = None,
        tenant: Tenant = ANYBODY,
        prompt: Prompt | None = None,
    ) -> AsyncIterator[Answer]:
        self.prompts.append(prompt)
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
        self.budget = ByteBudget(0)

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
async def serve(
    model: Model,
    strict: bool = False,
    timeout_s: float = 5.0,
    max_held_bytes: int = 10**9,
    keyring: Keyring | None = None,
    drain: Drain | None = None,
    failed_keys_per_minute: int = 60,
    meter: Meter | None = None,
    door: Door | None = None,
) -> AsyncIterator[Api]:
    pipeline = ScriptedPipeline(model.tokenizer.tokenizer.encode(TEXT, add_special_tokens=False).ids)
    before = Image.MAX_IMAGE_PIXELS
    with ThreadPoolExecutor(2) as executor:
        chat = ChatService(
            model_name=model.adapter.model_name,
            modalities=model.adapter.modalities,
            limits=ChatLimits(max_body_bytes=100_000, request_timeout_s=timeout_s, strict=strict),
            reader=MediaReader(MediaLimits(4, 50_000, 1_000_000, 150_000, 5.0), executor),
            planner=model.planner,
            pipeline=cast(Pipeline, pipeline),
            executor=executor,
            clock=SystemClock(),
            new_detokenizer=model.new_detokenizer,
            token_bytes=model.token_bytes,
            context_tokens=lambda: 512,
        )
        missing: list[Role] = []
        budget = ByteBudget(max_held_bytes)
        if keyring is not None:
            door = Door(keyring, LocalFailures(failed_keys_per_minute, SystemClock()))
        app = build_api(chat, lambda: tuple(missing), budget, door, meter, drain)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            found = Api(app, client, pipeline, model.adapter.model_name)
            found.budget = budget
            found.missing, found.tokenizer = missing, model.tokenizer.tokenizer
            yield found
    Image.MAX_IMAGE_PIXELS = before


async def ask(
    app: Any, path: str, host: str = "x", method: str = "GET", key: str = "", address: str = "127.0.0.1"
) -> int:
    """The status, by the application itself: no client tidies paths or hosts."""
    raw, _, query = path.partition("?")
    headers = [(b"host", host.encode())] + ([(b"authorization", f"Bearer {key}".encode())] if key else [])
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": str(httpx.URL(raw).path) if "%" in raw else raw,
        "raw_path": raw.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": headers,
        "client": (address, 1),
        "server": ("x", 80),
    }
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return int(sent[0]["status"])


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
