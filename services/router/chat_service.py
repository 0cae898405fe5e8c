"""From the HTTP request of a chat completion to an answer that is ready to run."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from services.router.admission.ledger import Cost
from services.router.admission.tenants import Tenant
from services.router.answer_text import AnswerText
from services.router.chat_answer import ChatAnswer, ChatJob, StreamedChatAnswer, WholeChatAnswer
from services.router.chat_request import MAX_TIMEOUT_S, ChatRequest, parse_chat_request
from services.router.choices import Question
from services.router.guard import visit_of
from services.router.http import read_json_body
from services.router.media import Media, MediaReader
from services.router.mm_hashes import caller_hashes
from services.router.pipeline import WORKER_ID, Pipeline
from services.router.planner import Planner
from services.router.responses import Envelope
from services.router.routing.prompt import Prompt
from services.router.stopwatch import Stopwatch
from triptych.core.clock import Clock
from triptych.core.errors import DeadlineExceeded, InvalidRequest, ModalityUnsupported, ModelNotFound
from triptych.core.plan import Modality, Plan
from triptych.core.timeline import Timeline
from triptych.mm.identity import tenant_salt
from triptych.obs import metrics
from triptych.obs.log import for_request
from triptych.text.detokenizer import IncrementalDetokenizer

TIMELINE_HEADER = "x-triptych-timeline"
TIMEOUT_HEADER = "x-triptych-timeout-s"
SESSION_HEADER = "x-triptych-session-id"
MAX_SESSION_CHARS = 256
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_MAX_LOGGED_NAMES = 8
# What is tokenized and hashed on the event loop; more goes to a thread, which takes longer to wake than this takes.
INLINE_CHARS = 4096
INLINE_MEDIA_BYTES = 256 * 2**10

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChatLimits:
    max_body_bytes: int
    request_timeout_s: float
    strict: bool


@dataclass(frozen=True, slots=True)
class ChatService:
    """Parses, reads media, plans. The answer that it returns runs the pipeline when it is sent.

    `token_bytes(id)` gives the bytes of a token; `context_tokens()` is the longest sequence that the cluster takes now.
    """

    model_name: str
    limits: ChatLimits
    reader: MediaReader
    planner: Planner
    pipeline: Pipeline
    executor: Executor
    clock: Clock
    new_detokenizer: Callable[[], IncrementalDetokenizer]
    token_bytes: Callable[[int], bytes]
    context_tokens: Callable[[], int]
    modalities: tuple[Modality, ...] = (Modality.IMAGE,)

    async def answer(self, request: Request) -> ChatAnswer:
        """Raises a RequestError for what is wrong with the request, DeadlineExceeded if it arrives too slowly."""
        began_s = asyncio.get_running_loop().time()
        limit_s = min(self.limits.request_timeout_s, wished_timeout_s(request))
        try:
            async with asyncio.timeout_at(began_s + limit_s) as limit:
                return await self._prepare(request, began_s, limit)
        except TimeoutError:
            passed_s = asyncio.get_running_loop().time() - began_s
            raise DeadlineExceeded(f"the request was not complete within its time, {passed_s:.3g} s") from None

    async def _prepare(self, request: Request, began_s: float, limit: asyncio.Timeout) -> ChatAnswer:
        """`limit` is moved forward when the body asks for less time."""
        request_id: str = request.state.request_id
        visit, session = visit_of(request), session_of(request)
        timeline = Timeline("router", WORKER_ID, self.clock)
        stopwatch = Stopwatch(timeline)
        with timeline.span("parse"):
            chat = parse_chat_request(await read_json_body(request, self.limits.max_body_bytes))
            chat = replace(chat, priority=visit.tenant.priority_of(chat.priority))
            if chat.timeout_s is not None:
                limit.reschedule(min(limit.when() or math.inf, began_s + chat.timeout_s))
            self._check(chat, request_id)
            hashes = self._hashes(chat, visit.tenant, request_id)
            read = await self.reader.read_all(chat.media, request.state.held_bytes.take)
            media = [replace(one, caller_hash=name) for one, name in zip(read, hashes, strict=True)]
        with timeline.span("plan"):
            salt = tenant_salt(visit.tenant.name, chat.cache_salt)
            plan, prompt = await self._plan(chat, media, limit.when() or math.inf, salt, session)
        await visit.charge(_cost(plan, chat.num_choices))
        metrics.MEDIA_ITEMS.labels(Modality.IMAGE.value).inc(len(media))
        question = Question(
            request_id=request_id,
            plan=plan,
            media=[one.data for one in media],
            texts=[AnswerText(self.new_detokenizer(), chat.stop, plan.sampling) for _ in range(chat.num_choices)],
            timeline=timeline,
            stopwatch=stopwatch,
            tenant=visit.tenant,
            prompt=prompt,
        )
        job = ChatJob(
            question=question,
            envelope=Envelope(f"chatcmpl-{secrets.token_hex(12)}", int(time.time()), self.model_name),
            with_usage=chat.include_usage,
            with_timeline=request.headers.get(TIMELINE_HEADER, "0") == "1",
            token_bytes=self.token_bytes,
            used=visit.used,
        )
        kind = StreamedChatAnswer if chat.stream else WholeChatAnswer
        return kind(job, self.pipeline)

    def _check(self, chat: ChatRequest, request_id: str) -> None:
        if chat.model is not None and chat.model != self.model_name:
            raise ModelNotFound(f"this server serves {self.model_name!r} and no other model", param="model")
        if chat.media and Modality.IMAGE not in self.modalities:
            raise ModalityUnsupported(
                f"{self.model_name} takes text only; ask without pictures", param=chat.media[0].param
            )
        if not chat.ignored:
            return
        names = ", ".join(name[:64] for name in chat.ignored[:_MAX_LOGGED_NAMES])
        if self.limits.strict:
            raise InvalidRequest(f"this server does not know the parameter(s) {names}", param=chat.ignored[0][:64])
        metrics.FALLBACKS.labels("ignored_parameter").inc()
        for_request(_log, request_id).info("parameters were ignored", extra={"parameters": names})

    def _hashes(self, chat: ChatRequest, tenant: Tenant, request_id: str) -> tuple[bytes, ...]:
        """One for each picture. Raises InvalidRequest for what is wrong with them only where that is asked for."""
        found = caller_hashes(chat.mm_hashes, len(chat.media), is_trusted=tenant.is_trusted)
        if found.complaint is None:
            return found.hashes
        if self.limits.strict:
            raise InvalidRequest(found.complaint, param="mm_hashes")
        metrics.FALLBACKS.labels("ignored_mm_hash").inc()
        for_request(_log, request_id).warning("hashes of pictures were ignored", extra={"reason": found.complaint})
        return found.hashes

    async def explain(self, request: Request) -> dict[str, Any]:
        """For the body of a chat completion: which workers would be chosen for it now, and why. Nothing runs.

        Raises what `answer` raises, and Unavailable where no workers could serve it."""
        tenant, session = visit_of(request).tenant, session_of(request)
        began_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self.limits.request_timeout_s):
                chat = parse_chat_request(await read_json_body(request, self.limits.max_body_bytes))
                self._check(chat, request.state.request_id)
                hashes = self._hashes(chat, tenant, request.state.request_id)
                read = await self.reader.read_all(chat.media, request.state.held_bytes.take)
                media = [replace(one, caller_hash=name) for one, name in zip(read, hashes, strict=True)]
                deadline_s, salt = began_s + self.limits.request_timeout_s, tenant_salt(tenant.name, chat.cache_salt)
                plan, prompt = await self._plan(chat, media, deadline_s, salt, session)
        except TimeoutError:
            raise DeadlineExceeded("the request was not complete within its time") from None
        return self.pipeline.explain(plan, prompt)

    async def _plan(
        self, chat: ChatRequest, media: Sequence[Media], deadline_s: float, salt: bytes, session: str | None
    ) -> tuple[Plan, Prompt]:
        loop = asyncio.get_running_loop()
        timeout_s = deadline_s - loop.time()
        if timeout_s <= 0:
            raise TimeoutError
        context_tokens = self.context_tokens()

        def make() -> tuple[Plan, Prompt]:
            plan = self.planner.plan(chat, media, context_tokens, timeout_s, salt)
            return plan, self.pipeline.new_prompt(plan, session)

        return make() if _is_small(chat, media) else await loop.run_in_executor(self.executor, make)


def _is_small(chat: ChatRequest, media: Sequence[Media]) -> bool:
    """Whether planning takes less than a thread costs: well below a millisecond."""
    num_chars = sum(len(text) for message in chat.messages for text in message.texts)
    return num_chars <= INLINE_CHARS and sum(len(one.data) for one in media) <= INLINE_MEDIA_BYTES


def wished_timeout_s(request: Request) -> float:
    """What the header says, infinity when there is none. Raises InvalidRequest."""
    text = request.headers.get(TIMEOUT_HEADER)
    if text is None:
        return math.inf
    if not _SECONDS.fullmatch(text) or not 0 < float(text) <= MAX_TIMEOUT_S:
        raise InvalidRequest(f"{TIMEOUT_HEADER} must be a number of seconds above 0", param=TIMEOUT_HEADER)
    return float(text)


def session_of(request: Request) -> str | None:
    """What the header says: which conversation this belongs to. Raises InvalidRequest."""
    text = request.headers.get(SESSION_HEADER)
    if text is not None and not 0 < len(text) <= MAX_SESSION_CHARS:
        raise InvalidRequest(f"{SESSION_HEADER} must have 1 to {MAX_SESSION_CHARS} characters", param=SESSION_HEADER)
    return text


def _cost(plan: Plan, num_choices: int) -> Cost:
    """The most that it can come to."""
    pixels = sum(item.width_px * item.height_px for item in plan.items)
    return Cost(plan.num_prompt_tokens + num_choices * plan.sampling.max_tokens, pixels)
