"""The choices of one request: n answers to one plan, each with its own text, as one stream of pieces.

The first choice runs alone until its prompt has been prefilled. The others find the prompt in the radix cache then, so
that no picture is encoded or shipped once more. All end together: one deadline, and the failure of one fails all.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from services.router.admission.tenants import ANYBODY, Tenant
from services.router.answer_text import AnswerText, TextPiece
from services.router.pipeline import Answer, Batch, Beside, Done, Event, Pipeline
from services.router.routing.prompt import Prompt
from services.router.stopwatch import Stopwatch
from services.router.tasks import owned_task, unwrapped_group
from triptych.core.errors import TriptychError
from triptych.core.plan import FinishReason, Plan, Token, Usage
from triptych.core.timeline import Timeline, TimelineEvent
from triptych.core.worker import Role


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked. `texts` has one entry a choice."""

    request_id: str
    plan: Plan
    media: Sequence[bytes]
    texts: Sequence[AnswerText]
    timeline: Timeline
    stopwatch: Stopwatch
    tenant: Tenant = ANYBODY
    prompt: Prompt | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """What became certain of one choice. `finish_reason` is set in its last piece."""

    choice: int
    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason | None = None


class Choices:
    """Owner of a request's answers while they are made."""

    def __init__(self, pipeline: Pipeline, question: Question) -> None:
        self._pipeline = pipeline
        self._question = question
        self._answers: dict[int, Answer] = {}
        self._num_running = len(question.texts)
        self._prefilled = asyncio.Event()
        # At most one entry a token and one end for each choice, so a slow reader never holds a worker back.
        self._gathered: list[Piece] = []
        self._failure: Exception | None = None
        self._news = asyncio.Event()

    async def batches(self) -> AsyncGenerator[Sequence[Piece], None]:
        """Pieces of all choices, those of each in order. A batch is what has gathered by the time it is asked for, and
        never waits for more. Or an error is raised, after the pieces before it. To be iterated once."""
        while not self.have_ended:
            await self._news.wait()
            self._news.clear()
            batch, self._gathered = self._gathered, []
            self._num_running -= sum(piece.finish_reason is not None for piece in batch)
            if batch:
                yield batch
            if self._failure is not None:
                raise self._failure

    @property
    def have_ended(self) -> bool:
        """All pieces have been handed out."""
        return not self._num_running

    @property
    def num_completion_tokens(self) -> int:
        return sum(text.num_tokens for text in self._question.texts)

    def usage(self) -> Usage:
        """The prompt counts once."""
        return self._answers[0].usage(self.num_completion_tokens)

    def all_events(self) -> list[TimelineEvent]:
        """Every stage's rows for all choices so far, by their start."""
        rows = [event for answer in self._answers.values() for event in answer.all_events()]
        return sorted(rows, key=lambda event: event.start_ns)

    def workers(self) -> Mapping[Role, Sequence[str]]:
        """Which served each stage, whatever choice it was."""
        served: dict[Role, dict[str, None]] = {}
        for answer in self._answers.values():
            for role, names in answer.progress.workers.items():
                served.setdefault(role, {}).update(dict.fromkeys(names))
        return {role: list(names) for role, names in served.items()}

    async def run(self) -> None:
        """Until all choices have ended, or one has failed. Every failure is for `batches` to raise."""
        try:
            with unwrapped_group():
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._follow(0, None))
                    await self._prefilled.wait()
                    for choice in range(1, len(self._question.texts)):
                        group.create_task(self._follow(choice, Beside(choice, self._answers[0])))
        except Exception as error:
            self._failure = error
            self._news.set()

    async def _follow(self, choice: int, beside: Beside | None) -> None:
        asked = self._question
        timeline = None if beside else asked.timeline
        async with self._pipeline.answer(
            asked.plan, asked.media, asked.request_id, timeline, beside, asked.tenant, asked.prompt
        ) as answer:
            self._answers[choice] = answer
            ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            answer.listen(lambda event: self._on_event(choice, event, ended))
            await ended

    def _on_event(self, choice: int, event: Event | TriptychError, ended: asyncio.Future[None]) -> None:
        """In the answer's own task: a token takes no turn of the loop on its way."""
        if ended.done():
            return
        if isinstance(event, TriptychError):
            ended.set_exception(event)
            return
        try:
            if self._take(choice, event) is not None:
                ended.set_result(None)
        except Exception as error:  # a bug of ours is no fault of the worker whose token it was
            ended.set_exception(error)

    def _take(self, choice: int, event: Event) -> FinishReason | None:
        """Why the choice has ended, if it has."""
        text = self._question.texts[choice]
        made: TextPiece
        reason: FinishReason | None
        match event:
            case Batch():
                self._question.stopwatch.on_tokens(choice, len(event.tokens))
                made, reason = text.push(event.tokens), None
            case Done():
                made, reason = text.finish(), event.finish_reason
        if text.stopped:
            reason = FinishReason.STOP
        self._prefilled.set()
        self._gathered.append(Piece(choice, made.text, made.tokens, reason))
        self._news.set()
        return reason


@asynccontextmanager
async def running_choices(pipeline: Pipeline, question: Question) -> AsyncIterator[Choices]:
    """Leaving the block cancels all that still runs; after the last piece it waits until every call has been closed."""
    choices = Choices(pipeline, question)
    async with owned_task(choices.run()) as task:
        yield choices
        if choices.have_ended:
            await asyncio.wait([task])
