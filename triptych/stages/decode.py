"""The decode stage: grants KV room, takes prompts that prefill wrote, streams the answer's tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from triptych.core.clock import Clock
from triptych.core.errors import (
    Aborted,
    DeadlineExceeded,
    NoRoom,
    PeerLost,
    RequestTooLarge,
    StaleAttempt,
    TransferRefused,
)
from triptych.core.grant import Grant
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.plan import FinishReason, Plan, Token, Usage
from triptych.core.timeline import Timeline
from triptych.engine.loop import LanguageEngine
from triptych.engine.sequence import Sequence
from triptych.kv.grants import GrantRecord, GrantTable
from triptych.kv.manager import SequencePages
from triptych.model.adapters.base import Adapter
from triptych.obs import metrics
from triptych.rpc import convert
from triptych.rpc.errors import AbortOnError
from triptych.sched.retraction import tokens_to_hold
from triptych.stages.attempts import AttemptFence
from triptych.stages.events import EventStream, Finished, Retracted, Sampled
from triptych.stages.prefill import LocalAnswer
from triptych.stages.sequences import check_plan, new_sequence
from triptych.stages.tasks import Background, on_engine
from triptych.transport.types import Arena
from triptych.wire.v1 import decode_pb2 as pb
from triptych.wire.v1 import decode_pb2_grpc

# With the most alternatives a token takes some 400 bytes, so that a message stays far below gRPC's 4 MiB.
MAX_BATCH_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """One Generate call in flight. `sequence` is the one that decodes here; None where the prefill half of this process
    makes its own."""

    plan: Plan
    grant: Grant
    stream: EventStream
    timeline: Timeline
    opened_ns: int
    sequence: Sequence | None = None


LandPages = Callable[[list[int]], None]
"""Makes committed pages visible to the engine's device: nothing to do when the pool itself is the arena."""


@dataclass(frozen=True, slots=True)
class DecodeParts:
    """What every call needs. `arena` is None when only this process writes the pool."""

    engine: LanguageEngine
    adapter: Adapter
    worker: WorkerRef
    grants: GrantTable
    clock: Clock
    background: Background
    is_local: bool = False
    arena: Arena | None = None
    land_pages: LandPages | None = None


class DecodeStage(decode_pb2_grpc.DecodeServicer):
    """Serves Generate calls and implements `KvReceiver`. Owns the table of calls in flight; grants and sequences belong
    to the engine's thread."""

    def __init__(self, parts: DecodeParts) -> None:
        self._parts = parts
        self._fence = AttemptFence()
        self._answers: dict[AttemptRef, Answer] = {}
        self._opening: set[AttemptRef] = set()
        self._without_kv: set[AttemptRef] = set()

    @property
    def arena(self) -> Arena:
        assert self._parts.arena is not None, "this pool is not open to other workers"
        return self._parts.arena

    async def Generate(  # noqa: N802 - the name in the proto
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        async with AbortOnError(context, "decode"):
            ref, plan = convert.ref_from_proto(request.ref), convert.plan_from_proto(request.plan)
            check_plan(plan, self._parts.adapter)
            self._fence.enter(ref)
            if ref in self._answers or ref in self._opening:
                raise StaleAttempt("this attempt is already being answered")
            self._opening.add(ref)
            try:
                answer = await self._open(ref, plan)
            finally:
                self._opening.discard(ref)
            try:
                async with asyncio.timeout(plan.timeout_s):
                    yield pb.GenerateResponse(granted=convert.grant_to_proto(answer.grant))
                    async for response in _responses(answer):
                        yield response
            except TimeoutError:
                raise DeadlineExceeded("the answer did not end within the request's time") from None
            finally:
                del self._answers[ref]
                self._parts.background.start(self._close(ref, answer))

    def attach(self, ref: AttemptRef, grant: Grant) -> LocalAnswer:
        """The stream of a call whose prompt is prefilled in this process (`LocalDecode`)."""
        answer = self._answers.get(ref)
        if answer is None:
            raise StaleAttempt("this grant has ended")
        if answer.grant != grant:
            raise TransferRefused("this grant belongs to another attempt")
        self._stop_waiting_for_kv(ref)
        return LocalAnswer(answer.stream, answer.timeline)

    # -- KvReceiver --------------------------------------------------------------------------------------------------

    async def bind(self, peer: WorkerRef, ref: AttemptRef, grant_id: str, capability: bytes) -> Grant:
        grants = self._parts.grants

        def bind() -> Grant:
            return grants.grant_of(grants.bind(ref, grant_id, capability, peer))

        return await on_engine(self._parts.engine.call(bind))

    async def commit_kv(
        self,
        peer: WorkerRef,
        ref: AttemptRef,
        grant_id: str,
        generation: int,
        capability: bytes,
        num_tokens: int,
        num_bytes: int,
        first_token: Token,
        position_delta: int,
    ) -> None:
        answer = self._answers.get(ref)
        if answer is None:
            await self.abort(peer, ref, grant_id, "the call has ended")
            raise StaleAttempt("this grant has ended")
        if num_tokens != answer.plan.num_known_tokens or first_token.index != len(answer.plan.answer_ids):
            raise TransferRefused("the commit does not cover the prompt")
        if first_token.id >= self._parts.adapter.vocab_size:
            raise TransferRefused("the first token is not in the vocabulary")
        answer.timeline.add("kv_wait", answer.opened_ns, num_bytes=num_bytes, num_tokens=num_tokens)
        commit = partial(self._parts.grants.commit, ref, grant_id, generation, capability, peer)
        adopt = partial(self._adopt, answer, peer, grant_id, commit, num_bytes, first_token, position_delta)
        await on_engine(self._parts.engine.call(adopt))
        self._stop_waiting_for_kv(ref)

    async def abort(self, peer: WorkerRef, ref: AttemptRef, grant_id: str | None, reason: str) -> None:
        """The router ends the call; here only the pages stop being written."""
        finish = partial(self._parts.grants.writer_finished, ref, grant_id, peer)
        await on_engine(self._parts.engine.call(finish))

    async def peer_lost(self, peer: WorkerRef) -> None:
        orphans = await on_engine(self._parts.engine.call(partial(self._parts.grants.writer_lost, peer)))
        for ref in orphans:
            if ref in self._answers:
                self._answers[ref].stream.failed(PeerLost("the prefill worker of this request was lost"))

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _open(self, ref: AttemptRef, plan: Plan) -> Answer:
        parts = self._parts
        opened_ns = parts.clock.monotonic_ns()
        stream = EventStream(asyncio.get_running_loop())
        timeline = Timeline("decode", parts.worker.worker_id, parts.clock, ref.attempt)
        try:
            self._check_fits(plan)
            sequence = self._new_sequence(ref, plan, stream, timeline)
            record = await self._issue(partial(self._grant, ref, plan, sequence))
        except (NoRoom, RequestTooLarge) as error:
            metrics.GRANTS.labels(error.code.replace("request_", "")).inc()
            raise
        metrics.GRANTS.labels("granted").inc()
        timeline.add("grant", opened_ns)
        answer = Answer(plan, parts.grants.grant_of(record), stream, timeline, parts.clock.monotonic_ns(), sequence)
        self._answers[ref] = answer
        self._wait_for_kv(ref)
        return answer

    def _new_sequence(self, ref: AttemptRef, plan: Plan, stream: EventStream, timeline: Timeline) -> Sequence | None:
        """Made before the grant, which looks for its ids in the cache."""
        if self._parts.is_local:
            return None
        return new_sequence(ref, plan, self._parts.adapter, stream, timeline, timeline)

    def _grant(self, ref: AttemptRef, plan: Plan, sequence: Sequence | None) -> GrantRecord:
        """On the engine's thread: room for the prompt, but for what is cached of it, and some of the answer, with a
        page left for each that decodes. Where the prompt is prefilled too, room is found there, all at once."""
        engine, grants = self._parts.engine, self._parts.grants
        if sequence is None:
            return grants.issue(ref, 0)
        engine.check_open()
        num_known, num_most = plan.num_known_tokens, plan.num_total_tokens - 1
        num_tokens = tokens_to_hold(num_known, num_most, plan.num_retractions, engine.manager.page_tokens)
        return grants.issue(ref, num_tokens, engine.num_decoding, plan.cache_salt, sequence.ids)

    async def _issue(self, issue: Callable[[], GrantRecord]) -> GrantRecord:
        """A credit. Given back when the call is cancelled before it hears of it."""
        engine, grants = self._parts.engine, self._parts.grants
        issued = engine.call(issue)

        async def give_back() -> None:
            with suppress(NoRoom, RequestTooLarge, Aborted):  # then there is nothing to give back
                record = await on_engine(issued)
                await on_engine(engine.call(partial(grants.release, record.grant_id)))

        try:
            return await on_engine(issued)
        except asyncio.CancelledError:
            self._parts.background.start(give_back())
            raise

    def _wait_for_kv(self, ref: AttemptRef) -> None:
        self._without_kv.add(ref)
        metrics.DECODE_WAITING_KV.set(len(self._without_kv))

    def _stop_waiting_for_kv(self, ref: AttemptRef) -> None:
        self._without_kv.discard(ref)
        metrics.DECODE_WAITING_KV.set(len(self._without_kv))

    def _check_fits(self, plan: Plan) -> None:
        """What no empty pool could hold is refused, while the router can still ask another worker; and where the
        prefill half finds the room, what waits for it is bounded."""
        manager = self._parts.engine.manager
        if manager.pages_for(plan.num_total_tokens - 1) > manager.num_usable:
            raise RequestTooLarge(
                f"prompt and answer need {plan.num_total_tokens - 1} tokens of KV; a decode worker holds "
                f"{manager.num_usable * manager.page_tokens}. Shorten the prompt or lower max_tokens"
            )
        if self._parts.is_local and len(self._answers) >= self._parts.engine.limits.max_waiting:
            raise NoRoom("this worker's queue is full right now")

    def _adopt(
        self,
        answer: Answer,
        peer: WorkerRef,
        grant_id: str,
        commit: Callable[[], SequencePages],
        num_bytes: int,
        first_token: Token,
        position_delta: int,
    ) -> None:
        """On the engine's thread: the commit is checked and the sequence starts, or neither."""
        parts, sequence = self._parts, answer.sequence
        if sequence is None or sequence.position_delta != position_delta:
            raise TransferRefused("prefill and decode do not agree on the prompt's positions")
        self._check_size(grant_id, answer.plan.num_known_tokens, num_bytes)
        pages = sequence.pages = commit()
        try:
            if parts.land_pages is not None and not self.arena.is_written_on_device_by(peer):
                parts.land_pages(pages.pages[len(pages.path) :])  # what was held is in the pool, and was not sent
            parts.engine.adopt(sequence, first_token)
        except BaseException:
            parts.engine.manager.release(pages)
            raise

    def _check_size(self, grant_id: str, num_tokens: int, num_bytes: int) -> None:
        """Raises TransferRefused when the commit is not all of the prompt but what the grant held. One that has ended
        is told by the commit itself."""
        layout, num_held = self.arena.pages, self._parts.grants.num_held_pages(grant_id)
        if layout is None or num_held is None:
            return
        if num_bytes != (self._parts.engine.manager.pages_for(num_tokens) - num_held) * layout.page_bytes:
            raise TransferRefused("the commit has another size than the prompt's pages")

    async def _close(self, ref: AttemptRef, answer: Answer) -> None:
        engine, grants = self._parts.engine, self._parts.grants
        self._stop_waiting_for_kv(ref)

        def close() -> None:
            engine.abort(ref, Aborted("the call ended"))
            engine.after_step(partial(grants.release, answer.grant.grant_id))

        await on_engine(engine.call(close))


async def _responses(answer: Answer) -> AsyncIterator[pb.GenerateResponse]:
    """Token batches (what waits goes into one message, up to a bound), then the end."""
    num_tokens = len(answer.plan.answer_ids) + 1
    while True:
        events = [await answer.stream.next(), *answer.stream.ready()]
        tokens = [token for event in events if isinstance(event, Sampled) for token in event.tokens]
        for first in range(0, len(tokens), MAX_BATCH_TOKENS):
            batch = tokens[first : first + MAX_BATCH_TOKENS]
            num_tokens = batch[-1].index + 1
            yield pb.GenerateResponse(tokens=pb.TokenBatch(tokens=[convert.token_to_proto(token) for token in batch]))
        for event in events:
            if isinstance(event, Retracted):
                timeline = [convert.event_to_proto(event) for event in answer.timeline.events]
                yield pb.GenerateResponse(retracted=pb.Retracted(num_tokens=num_tokens, timeline=timeline))
                return
            if isinstance(event, Finished):
                answer.timeline.add("finish", answer.opened_ns, num_tokens=num_tokens)
                yield pb.GenerateResponse(generate_done=_done(answer, event.reason, num_tokens))
                return


def _done(answer: Answer, reason: FinishReason, num_tokens: int) -> pb.GenerateDone:
    return pb.GenerateDone(
        finish_reason=convert.finish_reason_to_proto(reason),
        usage=convert.usage_to_proto(Usage(answer.plan.num_prompt_tokens, 0, num_tokens)),
        timeline=[convert.event_to_proto(event) for event in answer.timeline.events],
    )
