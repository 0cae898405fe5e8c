"""The HTTP answer to one chat request, whole or as server-sent events.

Nothing is sent before the first token exists, so every error up to there has its own HTTP status. A caller that goes
away cancels all that runs for it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from services.router.answer_text import AnswerText
from services.router.pipeline import Answer, Batch, Done, Pipeline
from services.router.responses import Envelope, Json, error_json, timeline_json
from services.router.stopwatch import Stopwatch
from services.router.tasks import first_of
from triptych.core.errors import TriptychError
from triptych.core.plan import FinishReason, Plan
from triptych.core.timeline import Timeline
from triptych.obs import metrics

Piece = str | FinishReason


@dataclass(frozen=True, slots=True)
class ChatJob:
    """All that answering needs."""

    request_id: str
    envelope: Envelope
    plan: Plan
    media: Sequence[bytes]
    text: AnswerText
    timeline: Timeline
    stopwatch: Stopwatch
    with_usage: bool
    with_timeline: bool


class ChatAnswer(Response):
    """Runs the pipeline while it answers. An error before the first byte is raised, for the error handler to answer."""

    def __init__(self, job: ChatJob, pipeline: Pipeline) -> None:
        super().__init__()
        self._job = job
        self._pipeline = pipeline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await first_of(self._serve(send), lambda: _until_disconnected(receive))

    async def _serve(self, send: Send) -> None:
        job = self._job
        async with self._pipeline.answer(job.plan, job.media, job.request_id, job.timeline) as answer:
            await self._write(answer, send)

    async def _write(self, answer: Answer, send: Send) -> None:
        raise NotImplementedError

    async def _pieces(self, answer: Answer) -> AsyncGenerator[Piece, None]:
        """The text in pieces (one for each batch of tokens, maybe empty), then why it ended."""
        job = self._job
        async with aclosing(answer.events()) as events:
            async for event in events:
                match event:
                    case Batch():
                        job.stopwatch.on_tokens(len(event.tokens))
                        yield job.text.push(event.tokens)
                        if job.text.stopped:
                            yield FinishReason.STOP
                            return
                    case Done():
                        yield job.text.finish()
                        yield FinishReason.STOP if job.text.stopped else event.finish_reason

    def _finish(self, answer: Answer) -> Json:
        """The caller's `triptych` field, once the answer is over."""
        job = self._job
        job.stopwatch.on_end()
        metrics.COMPLETION_TOKENS.inc(job.text.num_tokens)
        if not job.with_timeline:
            return {}
        return {"triptych": timeline_json(answer.all_events(), answer.progress.workers)}


class WholeChatAnswer(ChatAnswer):
    async def _write(self, answer: Answer, send: Send) -> None:
        texts: list[str] = []
        reason = FinishReason.STOP
        async with aclosing(self._pieces(answer)) as pieces:
            async for piece in pieces:
                if isinstance(piece, FinishReason):
                    reason = piece
                else:
                    texts.append(piece)
        usage = answer.usage(self._job.text.num_tokens)
        body = self._job.envelope.completion("".join(texts), reason.value, usage)
        content = orjson.dumps({**body, **self._finish(answer)})
        await send(_start("application/json", [(b"content-length", str(len(content)).encode())]))
        await send({"type": "http.response.body", "body": content})


class StreamedChatAnswer(ChatAnswer):
    async def _write(self, answer: Answer, send: Send) -> None:
        async with aclosing(self._pieces(answer)) as pieces:
            first = await anext(pieces)
            await send(_start("text/event-stream; charset=utf-8", [(b"cache-control", b"no-cache")]))
            await self._stream(answer, first, pieces, send)
        await send({"type": "http.response.body", "body": b""})

    async def _stream(self, answer: Answer, first: Piece, others: AsyncIterator[Piece], send: Send) -> None:
        await self._send_event(send, self._chunk({"role": "assistant", "content": ""}))
        try:
            await self._send_piece(answer, first, send)
            async for piece in others:
                await self._send_piece(answer, piece, send)
        except TriptychError as error:
            # The status is out: the error has to be an event, and there is no [DONE].
            metrics.REQUEST_ERRORS.labels(error.code).inc()
            await self._send_event(send, error_json(error))
        else:
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})

    async def _send_piece(self, answer: Answer, piece: Piece, send: Send) -> None:
        if isinstance(piece, str):
            if piece:
                await self._send_event(send, self._chunk({"content": piece}))
            return
        last = self._finish(answer)
        finish = self._chunk({}, piece.value)
        if not self._job.with_usage:
            await self._send_event(send, {**finish, **last})
            return
        await self._send_event(send, finish)
        usage = answer.usage(self._job.text.num_tokens)
        await self._send_event(send, {**self._job.envelope.usage_chunk(usage), **last})

    def _chunk(self, delta: Json, finish_reason: str | None = None) -> Json:
        chunk = self._job.envelope.chunk(delta, finish_reason)
        return {**chunk, "usage": None} if self._job.with_usage else chunk

    async def _send_event(self, send: Send, event: Json) -> None:
        body = b"data: " + orjson.dumps(event) + b"\n\n"
        await send({"type": "http.response.body", "body": body, "more_body": True})


def _start(content_type: str, headers: list[tuple[bytes, bytes]]) -> Message:
    return {
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"content-type", content_type.encode()), *headers],
    }


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
