"""A small client of the chat API: what the command line and the demo need, and no more."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from triptych.cli.sample import data_uri
from triptych.core.errors import StartupError, TriptychError

API_KEY_VARIABLE = "TRIPTYCH_API_KEY"
TIMELINE_HEADER = "x-triptych-timeline"
_SIGNATURES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"BM": "image/bmp",
}


class ChatFailed(TriptychError):
    """The server answered with an error; the message is its own."""

    code = "chat_failed"


@dataclass(slots=True)
class Answer:
    """Filled while it streams. `timeline` is empty unless it was asked for."""

    text: str = ""
    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    timeline: Sequence[Mapping[str, Any]] = ()


def picture_part(image: str | bytes) -> dict[str, Any]:
    """The content part of a picture: a URL as it is, bytes or a file inside a data URI. Raises StartupError."""
    if isinstance(image, str) and image.startswith(("http://", "https://", "data:")):
        return {"type": "image_url", "image_url": {"url": image}}
    content = image if isinstance(image, bytes) else _read(Path(image))
    return {"type": "image_url", "image_url": {"url": data_uri(content, media_type(content))}}


def media_type(content: bytes) -> str:
    """By the first bytes; the server looks again."""
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "image/webp"
    return next((name for start, name in _SIGNATURES.items() if content.startswith(start)), "application/octet-stream")


class ChatClient:
    """Talks to one server. Use as a context manager."""

    def __init__(self, url: str, timeout_seconds: float = 120.0, api_key: str | None = None) -> None:
        """`api_key`: for a server that asks for one; $TRIPTYCH_API_KEY if not given."""
        self._url = url.rstrip("/").removesuffix("/v1")  # with or without it, as the OpenAI client wants it
        api_key = api_key or os.environ.get(API_KEY_VARIABLE)
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(timeout_seconds, connect=5.0)
        self._http = httpx.Client(timeout=timeout, trust_env=False, headers=headers)

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def model_name(self) -> str:
        """The first model that the server offers."""
        response = self._http.get(f"{self._url}/v1/models")
        _raise_for(response)
        with _our_api():
            return str(response.json()["data"][0]["id"])

    def stream(self, body: Mapping[str, Any], answer: Answer, *, timeline: bool) -> Iterator[str]:
        """Yields pieces of text as they come, and fills `answer`. Raises ChatFailed, or httpx.HTTPError."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        headers = {TIMELINE_HEADER: "1"} if timeline else {}
        with self._http.stream("POST", f"{self._url}/v1/chat/completions", json=body, headers=headers) as response:
            if response.is_error:
                response.read()
            _raise_for(response)
            with _our_api():
                for event in _events(response.iter_lines()):
                    yield from _take(event, answer)

    def ask(self, body: Mapping[str, Any], *, timeline: bool) -> Answer:
        """The whole answer in one response. Raises as `stream` does."""
        headers = {TIMELINE_HEADER: "1"} if timeline else {}
        response = self._http.post(f"{self._url}/v1/chat/completions", json=dict(body), headers=headers)
        _raise_for(response)
        with _our_api():
            whole = response.json()
            choice = whole["choices"][0]
            return Answer(choice["message"]["content"], choice["finish_reason"], whole["usage"], _timeline_of(whole))


@contextmanager
def _our_api() -> Iterator[None]:
    """Some other server may listen there."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ChatFailed("what answers there does not speak this API; is --url right?") from error


def _take(event: Mapping[str, Any], answer: Answer) -> Iterator[str]:
    """Adds one chunk of a stream to the answer."""
    if "error" in event:
        raise ChatFailed(str(event["error"].get("message", event["error"])))
    answer.usage = event.get("usage") or answer.usage
    answer.timeline = _timeline_of(event) or answer.timeline
    for choice in event.get("choices") or ():
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        if piece := choice.get("delta", {}).get("content"):
            answer.text += piece
            yield piece


def _events(lines: Iterator[str]) -> Iterator[Mapping[str, Any]]:
    """The JSON of each server-sent event up to the closing one."""
    for line in lines:
        payload = line.removeprefix("data:").strip()
        if line.startswith("data:") and payload == "[DONE]":
            return
        if line.startswith("data:"):
            yield json.loads(payload)


def _timeline_of(body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    rows: Sequence[Mapping[str, Any]] = (body.get("triptych") or {}).get("timeline") or ()
    return rows


def _raise_for(response: httpx.Response) -> None:
    if not response.is_error:
        return
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.reason_phrase
    raise ChatFailed(f"{message} (HTTP {response.status_code})")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartupError(f"the picture {path} cannot be read: {error.strerror}") from error
