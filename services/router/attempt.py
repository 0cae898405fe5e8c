"""One try at one answer: the flow of grant, prefill, encoding and decoding over whatever workers were chosen.

admit:   Generate at a decode worker, until one grants room          (waits in the router's queue)
then at the same time:
         Prefill(plan, grant)          -> first token, `need_items`
         Encode(items) at each encoder -> media bytes when asked for
         Generate                      -> the other tokens
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace

from services.router import calls
from services.router.admission.fair_line import Ticket
from services.router.admission.tenants import ANYBODY, Tenant
from services.router.breakers import Breakers
from services.router.calls import (
    Admitted,
    DecodeEvent,
    GenerateCall,
    Granted,
    NeedItems,
    PrefillEvent,
    StageDone,
    Tokens,
)
from services.router.placement import ClusterView, Path, renewed
from services.router.queue import AdmissionQueue
from services.router.routing.forecast import Forecast, Share
from services.router.routing.homes import Found, Home
from services.router.routing.picker import Candidate, Picker
from services.router.routing.prompt import Prompt
from services.router.routing.reasons import passed_over, reasons
from services.router.routing.routing import Routing, Trip
from services.router.tasks import unwrapped_group
from triptych.core.errors import (
    CapacityError,
    NoRoom,
    PeerLost,
    ReceiverLost,
    RequestTooLarge,
    Retracted,
    StaleAttempt,
    TriptychError,
)
from triptych.core.grant import Grant
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.plan import FinishReason, Item, Plan, Token
from triptych.core.timeline import Timeline, TimelineEvent
from triptych.core.worker import Role, WorkerInfo
from triptych.obs import metrics
from triptych.rpc.client import ChannelPool

# When the answer is complete, encoders get this long to deliver their part of the timeline.
ENCODER_GRACE_S = 0.25

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Progress:
    """What is known of an answer so far; the attempt writes it, the caller reads it whenever the answer ends.

    `reported_tokens` is the length of the answer according to the stage that ended it, `served_by` are the workers that
    got it last.
    """

    cached_tokens: int = 0
    reported_tokens: int | None = None
    served_by: Home | None = None
    timeline: list[TimelineEvent] = field(default_factory=list)
    workers: dict[Role, list[str]] = field(default_factory=dict)

    def add_worker(self, role: Role, worker: WorkerInfo) -> None:
        names = self.workers.setdefault(role, [])
        if worker.worker_id not in names:
            names.append(worker.worker_id)


@dataclass(frozen=True, slots=True)
class Job:
    """What an attempt is about. `media` are the encoded bytes, one per item of the plan."""

    ref: AttemptRef
    plan: Plan
    media: Sequence[bytes]
    deadline_s: float  # by the event loop's clock
    tenant: Tenant = ANYBODY

    def remaining_s(self) -> float:
        return max(self.deadline_s - asyncio.get_running_loop().time(), 0.001)

    def plan_now(self) -> Plan:
        """The plan with the time that is left, as every message carries it."""
        return replace(self.plan, timeout_s=self.remaining_s())


@dataclass(frozen=True, slots=True)
class Admission:
    """Room at the decode worker of a path."""

    candidate: Candidate
    considered: Sequence[Candidate]
    call: GenerateCall
    grant: Grant

    @property
    def forecast(self) -> Forecast:
        return self.candidate.forecast

    @property
    def path(self) -> Path:
        return self.forecast.path


class Attempt:
    """Owns the calls of one try; all of them have ended when `run` returns or raises.

    `failed_workers` names the workers whose calls failed, for the next try to avoid, `lost_workers` those of them that
    had begun with it and were gone at once, `used_workers` all that have had it. `known` says who has the prompt, or a
    beginning of it.
    """

    def __init__(
        self,
        job: Job,
        view: Callable[[frozenset[str]], ClusterView],
        channels: ChannelPool,
        queue: AdmissionQueue,
        routing: Routing,
        prompt: Prompt,
        turn: int,
        known: Found | None,
        timeline: Timeline,
        progress: Progress,
        emit: Callable[[int, Iterable[Token]], None],
        breakers: Breakers,
    ) -> None:
        self.failed_workers: set[str] = set()
        self.lost_workers: set[str] = set()
        self.used_workers: set[str] = set()
        self._breakers = breakers
        self._job = job
        self._view = view
        self._channels = channels
        self._queue = queue
        self._routing = routing
        self._prompt = prompt
        self._turn = turn
        self._known = known
        self._trip: Trip | None = None
        self._withheld: set[int] = set()
        self._timeline = timeline
        self._progress = progress
        self._emit = emit
        self._items: Mapping[int, Item] = dict(enumerate(job.plan.items))
        self._encodes: set[asyncio.Task[None]] = set()
        self._finish: FinishReason | None = None
        self._is_prefilled = False

    async def run(self) -> FinishReason:
        """Emits every token of the answer, in any order, and says why it ended. Raises one TriptychError."""
        async with self._admitted() as admission:
            start_ns = self._timeline.clock.monotonic_ns()
            with unwrapped_group():
                async with asyncio.TaskGroup() as group:
                    self._dispatch(group, admission.path, admission.forecast.shares)
                    first = group.create_task(self._follow_prefill(group, admission))
                    rest = group.create_task(self._follow_decode(admission.call))
                    self._timeline.add("dispatch", start_ns)
                    await self._until_finished(first, rest)
        if self._finish is None:
            raise PeerLost("the answer ended without a reason")
        return self._finish

    async def _until_finished(self, first: asyncio.Task[None], rest: asyncio.Task[None]) -> None:
        """A failure of any task cancels this from outside, so what is waited for here has gone well."""
        await asyncio.wait([first])
        if self._finish is not None:
            rest.cancel()  # The first token ended the answer: the grant is not needed.
        await asyncio.wait([rest])
        if self._encodes:
            await asyncio.wait(self._encodes, timeout=ENCODER_GRACE_S)
        for encode in self._encodes:
            encode.cancel()

    # --- admission ---------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _admitted(self) -> AsyncIterator[Admission]:
        """Room at a decode worker for the length of the block."""
        start_ns = self._timeline.clock.monotonic_ns()
        is_first_choice = self._job.ref.choice == 0
        admission = await self._admit()
        self._timeline.add("queue", start_ns)
        if self._job.ref.attempt == 0 and is_first_choice:
            metrics.PROMPT_TOKENS.inc(self._job.plan.num_prompt_tokens)
        self._use(Role.DECODE, admission.call.worker)
        self._progress.served_by = Home(admission.path.decode.ref, admission.path.prefill.ref)
        self._trip = self._routing.sent(self._prompt, admission.forecast)
        _count(self._routing.picker, admission)
        try:
            yield admission
        finally:
            self._trip.ended()
            admission.call.cancel()
            self._queue.room_may_be_free()

    def _admit(self) -> Awaitable[Admission]:
        plan, tenant = self._job.plan, self._job.tenant
        if plan.is_replay:
            return self._queue.admit_again(self._ask_for_room)
        ticket = Ticket(tenant.name, tenant.weight, plan.priority, plan.num_total_tokens)
        admit = self._queue.admit if self._job.ref.choice == 0 else self._queue.admit_further
        return admit(self._ask_for_room, ticket)

    async def _ask_for_room(self) -> Admission | None:
        """None when all are full just now. A worker that is lost, or too small, is passed over while another answers;
        one that is lost is asked again only when there is no other."""
        refusal: TriptychError | None = None
        full = False
        view = self._view(frozenset(self.failed_workers))
        choice = self._routing.choose(view, self._prompt, self._turn, self._known)
        for candidate in choice.ordered:
            path = candidate.forecast.path
            try:
                return await self._ask_worker(candidate, choice.considered)
            except NoRoom:
                full = True
            except RequestTooLarge as error:
                refusal = refusal or error
            except (PeerLost, CapacityError) as error:
                self.failed_workers.add(path.decode.worker_id)
                refusal = error
        if full or refusal is None:
            return None
        raise refusal

    async def _ask_worker(self, candidate: Candidate, considered: Sequence[Candidate]) -> Admission:
        decode = candidate.forecast.path.decode
        self._breakers.asked(decode.worker_id)
        call = GenerateCall(
            self._channels, decode, self._job.ref, self._job.plan_now(), timeout_s=self._job.remaining_s()
        )
        try:
            return Admission(candidate, considered, call, await call.granted())
        except BaseException:
            call.cancel()
            raise

    # --- stages ------------------------------------------------------------------------------------------------------

    async def _follow_prefill(self, group: asyncio.TaskGroup, admission: Admission) -> None:
        path, job = admission.path, self._job
        self._use(Role.PREFILL, path.prefill)
        events = calls.prefill_events(
            self._channels, path.prefill, job.ref, job.plan_now(), admission.grant, timeout_s=job.remaining_s()
        )
        with self._blaming(path.prefill, receiver=path.decode):
            async with aclosing(events):
                async for event in events:
                    self._on_prefill(group, path, event)

    def _on_prefill(self, group: asyncio.TaskGroup, path: Path, event: PrefillEvent) -> None:
        match event:
            case Admitted():
                if not self._job.plan.is_replay:  # what a replay finds says nothing of what the caller asked
                    self._progress.cached_tokens = event.cached_tokens
                self._dispatch_withheld(group, path, event)
            case NeedItems():
                self._dispatch_again(group, path, event.indices)
            case Tokens():
                self._is_prefilled = True
                if self._trip is not None:
                    self._trip.prefilled()
                self._emit(self._job.ref.attempt, event.tokens)
            case StageDone():
                self._collect(event)

    async def _follow_decode(self, call: GenerateCall) -> None:
        with self._blaming(call.worker):
            async with aclosing(call.events()) as events:
                async for event in events:
                    self._on_decode(event)

    def _on_decode(self, event: DecodeEvent) -> None:
        match event:
            case Granted():
                raise TriptychError("a decode worker granted room twice")
            case Tokens():
                self._emit(self._job.ref.attempt, event.tokens)
            case calls.Retracted():
                self._progress.timeline.extend(event.timeline)
                raise Retracted("the answer lost its place at a decode worker under memory pressure")
            case StageDone():
                self._collect(event)

    def _collect(self, done: StageDone) -> None:
        self._progress.timeline.extend(done.timeline)
        if done.finish_reason is FinishReason.ABORT:
            raise PeerLost("a worker gave the answer up")
        if done.finish_reason is not None:
            self._finish = done.finish_reason
            self._progress.reported_tokens = done.usage.completion_tokens if done.usage else None

    def _dispatch_withheld(self, group: asyncio.TaskGroup, path: Path, admitted: Admitted) -> None:
        """Pictures that were believed to be at prefill, and are not."""
        missing = {index for index in self._withheld if admitted.lacks(index, self._items[index])}
        self._withheld.clear()
        if missing:
            self._dispatch_again(group, path, missing)

    def _dispatch_again(self, group: asyncio.TaskGroup, path: Path, indices: Collection[int]) -> None:
        _log.info("pictures that prefill was to have are encoded", extra={"request_id": self._job.ref.request_id})
        view = self._view(frozenset(self.failed_workers))
        now = renewed(path, view)
        shares = self._routing.shares_again(view, self._prompt, now, frozenset(indices))
        if self._trip is not None:
            self._trip.encodes(shares)
        self._dispatch(group, now, shares)

    def _dispatch(self, group: asyncio.TaskGroup, path: Path, shares: Iterable[Share]) -> None:
        """One call an encoder. What prefill has by its own account it is not sent, until it says otherwise."""
        items: dict[WorkerRef, tuple[WorkerInfo, dict[int, Item]]] = {}
        for share in shares:
            index = share.picture.index
            if share.encoder is None:
                self._withheld.add(index)
            else:
                items.setdefault(share.encoder.ref, (share.encoder, {}))[1][index] = self._items[index]
        for worker, wanted in items.values():
            self._encodes.add(group.create_task(self._encode(worker, path.prefill, wanted)))

    async def _encode(self, worker: WorkerInfo, prefill: WorkerInfo, share: Mapping[int, Item]) -> None:
        self._use(Role.ENCODER, worker)
        media = {index: self._job.media[index] for index in share}
        plan = self._job.plan
        job = calls.EncodeJob(self._job.ref, prefill, share, media, plan.model_fingerprint, plan.cache_salt)
        try:
            with self._blaming(worker, receiver=prefill):
                done = await calls.encode(self._channels, worker, job, timeout_s=self._job.remaining_s())
        except TriptychError as error:
            if not self._is_needless(error):
                raise
        else:
            self._progress.timeline.extend(done.timeline)
        finally:
            if self._trip is not None:
                self._trip.encoded(worker)

    def _use(self, role: Role, worker: WorkerInfo) -> None:
        self._progress.add_worker(role, worker)
        self.used_workers.add(worker.worker_id)
        self._breakers.asked(worker.worker_id)

    def _is_needless(self, error: TriptychError) -> bool:
        """Whether prefill has gone on without what an encoder failed to deliver.

        It needs no embedding once it has sampled, and a late encoder is told that the attempt is over (STALE_ATTEMPT)
        when cached KV covered its pictures. If prefill has not ended well, its own call says so.
        """
        return self._is_prefilled or isinstance(error, StaleAttempt)

    @contextmanager
    def _blaming(self, worker: WorkerInfo, receiver: WorkerInfo | None = None) -> Iterator[None]:
        """Notes who failed: the worker itself, or the one that it could not send to."""
        try:
            yield
        except TriptychError as error:
            if error.retriable and not isinstance(error, Retracted):
                failed = receiver if receiver is not None and isinstance(error, ReceiverLost) else worker
                self.failed_workers.add(failed.worker_id)
            if isinstance(error, calls.CutOff):
                self.lost_workers.add(worker.worker_id)
            raise


def _count(picker: Picker, admission: Admission) -> None:
    for stage, reason in reasons(admission.candidate, admission.considered):
        metrics.ROUTING_CHOICES.labels(stage, reason).inc()
    for reason in passed_over(picker, admission.candidate, admission.considered):
        metrics.ROUTING_PASSED_OVER.labels(reason).inc()
