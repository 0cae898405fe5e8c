"""The prefill stage: takes a plan and a grant, lands embeddings, runs the prompt, hands the KV to decode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import grpc

from triptych.core.clock import Clock
from triptych.core.errors import Aborted, DeadlineExceeded, TransferRefused
from triptych.core.grant import Grant
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.kv_format import PageFormat, conversion
from triptych.core.plan import FinishReason, Plan, Token, Usage
from triptych.core.timeline import Timeline
from triptych.engine.loop import LanguageEngine
from triptych.engine.sequence import Sequence
from triptych.model.adapters.base import Adapter
from triptych.obs import metrics
from triptych.rpc import convert
from triptych.rpc.errors import AbortOnError
from triptych.stages.attempts import AttemptFence
from triptych.stages.events import Admitted, Decoding, EventStream, Finished, HandedOff, Sampled, SplitStream
from triptych.stages.landing import EmbeddingLanding
from triptych.stages.links import blaming_receiver, needs_receiver
from triptych.stages.sequences import check_plan, new_sequence
from triptych.stages.tasks import Background, on_engine
from triptych.transport.carrier import WriterEvents
from triptych.transport.link import KvLink
from triptych.transport.retiling import TokenSource, open_handoff
from triptych.wire.v1 import prefill_pb2 as pb
from triptych.wire.v1 import prefill_pb2_grpc


@dataclass(frozen=True, slots=True)
class LocalAnswer:
    """Where the answer goes when this process also decodes."""

    stream: EventStream
    timeline: Timeline


class LocalDecode(Protocol):
    def attach(self, ref: AttemptRef, grant: Grant) -> LocalAnswer:
        """Raises StaleAttempt or TransferRefused when no such grant waits for KV."""
        ...


class KvLinks(Protocol):
    async def kv(self, worker: WorkerRef) -> KvLink:
        """A link to that decode process. Raises PeerLost when it is not (any more) in the registry."""
        ...


@dataclass(frozen=True, slots=True)
class PrefillParts:
    """What every call needs."""

    engine: LanguageEngine
    adapter: Adapter
    worker: WorkerRef
    pages: TokenSource
    landing: EmbeddingLanding
    links: KvLinks
    clock: Clock
    background: Background
    local_decode: LocalDecode | None = None


class PrefillStage(prefill_pb2_grpc.PrefillServicer):
    """Serves Prefill calls. Owns no state but the fence: the engine owns sequences, pages and slots."""

    def __init__(self, parts: PrefillParts) -> None:
        self._parts = parts
        self._fence = AttemptFence()

    async def Prefill(  # noqa: N802 - the name in the proto
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.PrefillResponse]:
        async with AbortOnError(context, "prefill"):
            ref, plan = convert.ref_from_proto(request.ref), convert.plan_from_proto(request.plan)
            grant = convert.grant_from_proto(request.grant)
            check_plan(plan, self._parts.adapter)
            self._fence.enter_once(ref)
            run = _PrefillRun(self._parts, ref, plan, grant)
            try:
                async with asyncio.timeout(plan.timeout_s):
                    async for response in run.responses():
                        yield response
            except TimeoutError:
                raise DeadlineExceeded("prefill did not finish within the request's time") from None
            finally:
                run.clean_up()


class _PrefillRun:
    """One Prefill call."""

    def __init__(self, parts: PrefillParts, ref: AttemptRef, plan: Plan, grant: Grant) -> None:
        self._parts = parts
        self._ref = ref
        self._plan = plan
        self._grant = grant
        self._events = EventStream(asyncio.get_running_loop())
        self._timeline = Timeline("prefill", parts.worker.worker_id, parts.clock, ref.attempt)
        self._link: KvLink | None = None
        self._sequence: Sequence | None = None
        self._is_handed_over = False
        self._committing: asyncio.Task[None] | None = None
        self._cached_tokens = 0
        self._first_token: Token | None = None
        self._position_delta = 0

    @property
    def _is_local(self) -> bool:
        return WorkerRef(self._grant.worker_id, self._grant.epoch) == self._parts.worker

    async def responses(self) -> AsyncIterator[pb.PrefillResponse]:
        self._submit()
        while True:
            event = await self._events.next()
            match event:
                case Admitted(cached_tokens):
                    self._cached_tokens = cached_tokens
                    self._parts.landing.admitted(self._ref)
                    yield pb.PrefillResponse(admitted=self._admitted(cached_tokens))
                    if not self._is_local:
                        await self._bind()
                case Sampled(tokens):
                    self._first_token = tokens[0]
                    yield pb.PrefillResponse(first_token=convert.token_to_proto(tokens[0]))
                case HandedOff(token, num_bytes):
                    committing = await self._start_commit(token, num_bytes)
                    yield pb.PrefillResponse(first_token=convert.token_to_proto(token))
                    await committing
                case Decoding():
                    yield self._done(None)
                    return
                case Finished(reason):
                    yield self._done(reason)
                    return

    def _admitted(self, cached_tokens: int) -> pb.PrefillAdmitted:
        """With the pictures that somebody has to bring: the router may have sent for fewer."""
        pending = self._sequence.items if self._sequence is not None else []
        missing = [index for index, item in enumerate(pending) if item.source is None]
        return pb.PrefillAdmitted(cached_tokens=cached_tokens, missing=pb.NeedItems(item_indices=missing))

    def clean_up(self) -> None:
        """However the call ended: nothing of it stays here, and decode learns of a grant that will not be used."""
        self._parts.landing.forget(self._ref)
        self._parts.background.start(self._release())

    def _submit(self) -> None:
        parts = self._parts
        decode_timeline = self._timeline
        sink: EventStream | SplitStream = self._events
        if self._is_local:
            if parts.local_decode is None:
                raise Aborted("this worker does not decode")
            answer = parts.local_decode.attach(self._ref, self._grant)
            sink, decode_timeline = SplitStream(self._events, answer.stream), answer.timeline
        sequence = new_sequence(self._ref, self._plan, parts.adapter, sink, self._timeline, decode_timeline)
        sequence.needs_handoff = not self._is_local
        self._sequence = sequence
        self._position_delta = sequence.position_delta
        parts.landing.expect(self._ref)
        parts.engine.post(partial(parts.engine.submit, sequence))

    async def _bind(self) -> None:
        """Turns the credit into pages and gives the engine a way to write them."""
        parts = self._parts
        with self._timeline.span("bind"), needs_receiver():
            self._link = await parts.links.kv(WorkerRef(self._grant.worker_id, self._grant.epoch))
            self._grant = await self._link.bind_kv(self._ref, self._grant)
        self._check_covered(self._link.page_format)
        events = WriterEvents(
            failed=lambda error: _posted(parts.engine, partial(parts.engine.abort, self._ref, blaming_receiver(error))),
            relieved=lambda: _posted(parts.engine, _wake_up),
        )
        handoff = open_handoff(self._link, self._grant, parts.pages, self._plan.num_known_tokens, events)
        # A page here in whose middle the held tokens end is sent from there on.
        num_held_pages = self._grant.num_held_tokens // parts.engine.manager.page_tokens
        parts.engine.post(partial(parts.engine.bound, self._ref, handoff, num_held_pages))

    def _check_covered(self, theirs: PageFormat) -> None:
        """Raises TransferRefused when the bound grant, in pages of the decode worker's, does not cover what is behind
        the prompt's begin that it holds."""
        num_held, rest = divmod(self._grant.num_held_tokens, theirs.page_tokens)
        num_needed = -(-self._plan.num_known_tokens // theirs.page_tokens) - num_held
        if rest or num_needed < 1:
            raise TransferRefused("the decode worker holds what is not this prompt's")
        if sum(len(group.pages) for group in self._grant.groups) < num_needed:
            raise TransferRefused("the decode worker named too few pages")

    async def _start_commit(self, token: Token, num_bytes: int) -> asyncio.Task[None]:
        """The commit leaves before the token does: the decode worker is idle until it comes, and gRPC takes longer with
        a response than the commit, which is not waited for here."""
        self._first_token = token
        committing = asyncio.create_task(self._commit(token, num_bytes), name="kv-commit")
        self._committing = committing  # before anything is awaited: a call that ends there takes it back
        await asyncio.sleep(0)  # it runs until it waits for the answer
        return committing

    async def _commit(self, token: Token, num_bytes: int) -> None:
        assert self._link is not None
        start_ns = self._parts.clock.monotonic_ns()
        with needs_receiver():
            await self._link.commit_kv(
                self._ref, self._grant, self._plan.num_known_tokens, num_bytes, token, self._position_delta
            )
        self._timeline.add("kv_commit", start_ns, num_bytes=num_bytes)
        self._count_pages(self._link.page_format)
        self._is_handed_over = True
        self._parts.engine.post(partial(self._parts.engine.handed_over, self._ref))

    def _count_pages(self, theirs: PageFormat) -> None:
        """Pages of the decode worker's: those that it held, and of the others those that were not sent as they were."""
        ours = self._parts.pages.layout.format
        num_held = self._grant.num_held_tokens // theirs.page_tokens
        num_sent = -(-self._plan.num_known_tokens // theirs.page_tokens) - num_held
        metrics.KV_HELD_PAGES.inc(num_held)
        if ours.page_tokens != theirs.page_tokens:
            metrics.KV_CONVERTED_PAGES.labels("retiled").inc(num_sent)
        if ours.dtype is not theirs.dtype:
            metrics.KV_CONVERTED_PAGES.labels(conversion(ours.dtype, theirs.dtype).value).inc(num_sent)

    def _done(self, reason: FinishReason | None) -> pb.PrefillResponse:
        num_prompt, num_answered = self._plan.num_prompt_tokens, len(self._plan.answer_ids)
        usage = Usage(num_prompt, min(self._cached_tokens, num_prompt), num_answered + 1)
        return pb.PrefillResponse(
            prefill_done=pb.PrefillDone(
                finish_reason=convert.finish_reason_to_proto(reason),
                usage=convert.usage_to_proto(usage),
                timeline=[convert.event_to_proto(event) for event in self._timeline.events],
            )
        )

    async def _release(self) -> None:
        engine = self._parts.engine
        if self._committing is not None:
            self._committing.cancel()
            await asyncio.gather(self._committing, return_exceptions=True)
        if not self._is_local:
            await on_engine(engine.call(partial(engine.abort, self._ref, Aborted("the call ended"))))
            if self._link is not None and not self._is_handed_over:
                await self._link.abort(self._ref, self._grant.grant_id, "prefill will not write this grant")
        elif self._first_token is None:
            await on_engine(engine.call(partial(engine.abort, self._ref, Aborted("the call ended"))))


def _posted(engine: LanguageEngine, action: Callable[[], None]) -> None:
    """An engine that has stopped needs to hear nothing."""
    engine.post(action)


def _wake_up() -> None:
    """A turn of the engine looks again at what can be computed."""
