"""The HTTP answer to one chat request, whole or as server-sent events.

Nothing is sent before the first token exists, so every error up to there has its own HTTP status. A caller that goes
away cancels all that runs for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from services.router.choices import Choices, Piece, Question, running_choices
from services.router.event_stream import EventStream, error_event
from services.router.pipeline import Pipeline
from services.router.responses import (
    INTERNAL_MESSAGE,
    Envelope,
    Json,
    choice_json,
    logprobs_json,
    timeline_json,
)
from services.router.tasks import first_of
from triptych.core.errors import TriptychError
from triptych.core.plan import Token
from triptych.obs import metrics
from triptych.obs.log import for_request

# How long after the request's time its answer may still be read.
READ_GRACE_S = 30.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChatJob:
    """All that answering needs. `token_bytes` gives the bytes of a token id, for log probabilities; `used` is told the
    tokens of prompt and answers, unless it failed before there was one."""

    question: Question
    envelope: Envelope
    with_usage: bool
    with_timeline: bool
    token_bytes: Callable[[int], bytes]
    used: Callable[[int, int], None]


class ChatAnswer(Response):
    """Runs the pipeline while it answers. An error before the first byte is raised, for the error handler to answer."""

    def __init__(self, job: ChatJob, pipeline: Pipeline) -> None:
        super().__init__()
        self._job = job
        self._pipeline = pipeline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A caller that does not read what it is sent is cut off soon after the request's time: else it would hold the
        pictures and the connection for as long as it likes."""
        has_ended = False
        try:
            await self._run(receive, send)
            has_ended = True
        finally:
            num_completion_tokens = sum(text.num_tokens for text in self._job.question.texts)
            if has_ended or num_completion_tokens:
                self._job.used(self._job.question.plan.num_prompt_tokens, num_completion_tokens)

    async def _run(self, receive: Receive, send: Send) -> None:
        asked = self._job.question
        try:
            async with asyncio.timeout(asked.plan.timeout_s + READ_GRACE_S) as limit:
                await first_of(self._serve(send), lambda: _until_disconnected(receive))
        except TimeoutError:
            if not limit.expired():
                raise
            for_request(_log, asked.request_id).warning("a caller did not read its answer and is cut off")

    async def _serve(self, send: Send) -> None:
        async with running_choices(self._pipeline, self._job.question) as choices:
            await self._write(choices, send)

    async def _write(self, choices: Choices, send: Send) -> None:
        raise NotImplementedError

    def _logprobs(self, tokens: Sequence[Token]) -> Json | None:
        """None unless they were asked for."""
        if self._job.question.plan.sampling.num_logprobs is None:
            return None
        return logprobs_json(tokens, self._job.token_bytes)

    def _finish(self, choices: Choices) -> Json:
        """The caller's `triptych` field, once all choices are over."""
        self._job.question.stopwatch.on_end()
        metrics.COMPLETION_TOKENS.inc(choices.num_completion_tokens)
        if not self._job.with_timeline:
            return {}
        return {"triptych": timeline_json(choices.all_events(), choices.workers())}


class WholeChatAnswer(ChatAnswer):
    async def _write(self, choices: Choices, send: Send) -> None:
        pieces: list[list[Piece]] = [[] for _ in self._job.question.texts]
        async with aclosing(choices.batches()) as batches:
            async for batch in batches:
                for piece in batch:
                    pieces[piece.choice].append(piece)
        answers = [self._choice(index, whole) for index, whole in enumerate(pieces)]
        body = self._job.envelope.completion(answers, choices.usage())
        content = orjson.dumps({**body, **self._finish(choices)})
        await send(_start("application/json", [(b"content-length", str(len(content)).encode())]))
        await send({"type": "http.response.body", "body": content})

    def _choice(self, index: int, pieces: Sequence[Piece]) -> Json:
        reason = pieces[-1].finish_reason
        assert reason is not None
        text = "".join(piece.text for piece in pieces)
        tokens = [token for piece in pieces for token in piece.tokens]
        return choice_json(index, text, reason.value, self._logprobs(tokens))


class StreamedChatAnswer(ChatAnswer):
    """Each batch of pieces is one write: one that is alone goes at once, those that have gathered go together."""

    async def _write(self, choices: Choices, send: Send) -> None:
        async with aclosing(choices.batches()) as batches:
            first = await anext(batches)
            await send(_start("text/event-stream; charset=utf-8", [(b"cache-control", b"no-cache")]))
            await self._stream(choices, first, batches, send)
        await send({"type": "http.response.body", "body": b""})

    async def _stream(
        self, choices: Choices, first: Sequence[Piece], others: AsyncIterator[Sequence[Piece]], send: Send
    ) -> None:
        job = self._job
        events = EventStream(job.envelope, with_usage=job.with_usage, logprobs=self._logprobs)
        try:
            await _send(send, events.pieces(first) + self._closing(choices, events))
            async for pieces in others:
                await _send(send, events.pieces(pieces) + self._closing(choices, events))
        except Exception as error:
            # The status is out: the error has to be an event, and there is no END.
            told = _told(error)
            metrics.REQUEST_ERRORS.labels(told.code).inc()
            await _send(send, error_event(told))

    def _closing(self, choices: Choices, events: EventStream) -> bytes:
        """Nothing before the last piece."""
        return events.closing(choices.usage(), self._finish(choices)) if choices.have_ended else b""


async def _send(send: Send, events: bytes) -> None:
    if events:
        await send({"type": "http.response.body", "body": events, "more_body": True})


def _told(error: Exception) -> TriptychError:
    """What the caller hears of it; a bug is for the log."""
    if isinstance(error, TriptychError):
        return error
    _log.error("an answer broke off with a bug", exc_info=error)
    return TriptychError(INTERNAL_MESSAGE)


def _start(content_type: str, headers: list[tuple[bytes, bytes]]) -> Message:
    return {
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"content-type", content_type.encode()), *headers],
    }


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
