"""The HTTP API: what is refused, with which status and words, and what these do not show."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator

import pytest

from services.router import http
from services.router.app import Model
from services.router.pipeline import Answer
from tests.unit import router_house
from tests.unit.router_house import Api, error_of, picture, serve

model, api = router_house.model, router_house.api


async def test_tokens_that_the_model_does_not_have(api: Api) -> None:
    for fields in ({"logit_bias": {"638": 1}}, {"stop_token_ids": [638]}):
        assert error_of(await api.chat(**fields), 400)["param"] == next(iter(fields))
    assert (await api.chat(logit_bias={"637": 1}, stop_token_ids=[637])).status_code == 200


async def test_the_body_must_be_an_object(api: Api) -> None:
    for content in (b"[]", b"null", b"5", b'"x"'):
        response = await api.client.post("/v1/chat/completions", content=content)
        assert error_of(response, 400)["message"] == "the body must be a JSON object"


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


async def test_a_body_of_very_many_values_is_refused_before_it_is_decoded(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "MAX_COMMAS", 100)
    assert (await api.chat(messages=[{"role": "user", "content": "a," * 90}])).status_code == 200
    with monkeypatch.context() as patched:
        patched.setattr(http.orjson, "loads", lambda _: pytest.fail("the body was decoded"))
        response = await api.client.post("/v1/chat/completions", content=b"[" + b"0," * 101 + b"0]")
    assert "commas" in error_of(response, 400)["message"]


async def test_what_all_requests_hold_together_is_bounded_and_given_back(model: Model) -> None:
    """The second comes while the first is being answered, which still holds its picture then."""
    messages = [{"role": "user", "content": [picture(), {"type": "text", "text": "x " * 40}]}]
    num_bytes = len(json.dumps(messages))
    async with serve(model, max_held_bytes=2 * num_bytes) as api:
        going, say = asyncio.Event(), api.pipeline.say

        async def wait(answer: Answer) -> None:
            await going.wait()
            await say(answer)

        api.pipeline.drive = wait
        first = asyncio.create_task(api.chat(messages=messages))
        async with asyncio.timeout(5):
            while not api.pipeline.plans:  # noqa: ASYNC110 - the pipeline tells nobody
                await asyncio.sleep(0.01)
        assert num_bytes - 40 < api.budget.num_held < 2 * num_bytes
        for stream in (False, True):
            refused = await api.chat(messages=messages, stream=stream)
            assert error_of(refused, 429)["code"] == "overloaded"
        going.set()
        assert (await first).status_code == 200
        assert api.budget.num_held == 0
        assert (await api.chat(messages=messages)).status_code == 200
        for bad in (b"{", b"x" * 3 * num_bytes):
            await api.client.post("/v1/chat/completions", content=bad)
        assert api.budget.num_held == 0


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


async def test_unknown_parameters_are_ignored_or_refused_when_strict(api: Api, model: Model) -> None:
    assert (await api.chat(wibble=1)).status_code == 200
    async with serve(model, strict=True) as strict:
        error = error_of(await strict.chat(wibble=1, wobble=2), 400)
        assert error["param"] == "wibble" and "wibble, wobble" in error["message"]
        assert (await strict.chat(user="me", store=False)).status_code == 200
