"""The client of all arms: one streamed chat completion over a bare socket, so that the client costs little.

Two cores carry server and client alike; an HTTP library's share of them would be charged to the server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson

from benchmarks.engine.samples import Sample

MAX_LINE_BYTES = 1 << 24
CHAT_PATH = "/v1/chat/completions"


class AskFailed(RuntimeError):
    """A request that was not answered as it should be; the message says how."""


@dataclass(frozen=True, slots=True)
class Question:
    """One request: OpenAI messages, and exactly how many tokens to answer."""

    messages: Sequence[Mapping[str, Any]]
    max_tokens: int

    def body(self, model: str, concurrency: int) -> bytes:
        """Greedy, never ending early. `batch_hint` tells the server of `transformers` how many requests come at once,
        so that `generate` gets them as one batch; to the others it means nothing."""
        body = {
            "model": model,
            "messages": self.messages,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "user": f"batch_hint={concurrency}",
        }
        return orjson.dumps(body)


async def ask(
    url: str, model: str, question: Question, concurrency: int = 1, *, timeout_s: float, timeline: str = "0"
) -> Sample:
    """Raises AskFailed, also when it takes longer than `timeout_s`. With `timeline="1"` ours tells its own."""
    body = question.body(model, concurrency)
    try:
        async with asyncio.timeout(timeout_s):
            sample = await _ask(url, body, timeline)
    except TimeoutError:
        raise AskFailed("no whole answer in the time that one cell may take") from None
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        raise AskFailed(f"{type(error).__name__}: {error}"[:300]) from None
    if sample.completion_tokens != question.max_tokens:
        raise AskFailed(f"{sample.completion_tokens} tokens came instead of {question.max_tokens}")
    return sample


async def _ask(url: str, body: bytes, timeline: str) -> Sample:
    reply = _Reply(time.perf_counter())
    async with _connection(url) as (reader, writer):
        writer.write(_head(url, len(body), timeline) + body)
        await writer.drain()
        reply.start_s = time.perf_counter()
        async for event in _events(reader):
            reply.take(event, time.perf_counter())
    return reply.sample()


def _head(url: str, length: int, timeline: str) -> bytes:
    lines = (
        f"POST {CHAT_PATH} HTTP/1.1",
        f"host: {urlsplit(url).netloc}",
        "content-type: application/json",
        f"content-length: {length}",
        f"x-triptych-timeline: {timeline}",
        "connection: close",
    )
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


@asynccontextmanager
async def _connection(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=MAX_LINE_BYTES)
    try:
        yield reader, writer
    finally:
        writer.close()


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each server-sent event. Raises AskFailed for any status but 200."""
    status = await reader.readline()
    while (await reader.readline()).strip():
        pass
    if b" 200 " not in status:
        raise AskFailed(f"{status.decode().strip()}: {(await reader.read(500)).decode(errors='replace')}")
    rest = b""
    while size := int(await reader.readline(), 16):
        rest += (await reader.readexactly(size + 2))[:-2]
        *whole, rest = rest.split(b"\n\n")
        for event in whole:
            if event.startswith(b"data: ") and event != b"data: [DONE]":
                yield orjson.loads(event[6:])


class _Reply:
    """Adds up the events of one answer."""

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self._first_s = self._last_s = 0.0
        self._text: list[str] = []
        self._usage: dict[str, Any] = {}
        self._timeline: list[dict[str, Any]] = []

    def take(self, event: dict[str, Any], at_s: float) -> None:
        if "error" in event:
            raise AskFailed(str(event["error"])[:300])
        for choice in event["choices"]:
            self._first_s = self._first_s or at_s
            self._last_s = at_s
            self._text.append(choice["delta"].get("content") or "")
        self._usage = event.get("usage") or self._usage
        self._timeline = event.get("triptych", {}).get("timeline", self._timeline)

    def sample(self) -> Sample:
        if not self._first_s or not self._usage:
            raise AskFailed("the stream ended before the answer did")
        return Sample(
            self._first_s - self.start_s,
            self._last_s - self.start_s,
            self._usage["prompt_tokens"],
            self._usage["completion_tokens"],
            "".join(self._text),
            self._timeline,
        )
