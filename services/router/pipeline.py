"""From a plan to the tokens of its answer: one deadline, replays of what lost its place or its worker, with the tokens
that are out, and nothing left running behind.

DESIGN, section 1, is what happens here; `attempt.py` is one pass through it, `tries.py` says how many there are.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from services.router.admission.tenants import ANYBODY, Tenant
from services.router.attempt import Attempt, Job, Progress
from services.router.breakers import Breakers
from services.router.placement import ClusterView
from services.router.queue import AdmissionQueue
from services.router.routing.explain import explain
from services.router.routing.homes import Found
from services.router.routing.prompt import Prompt
from services.router.routing.routing import Routing
from services.router.tasks import owned_task
from services.router.token_order import TokenOrder
from services.router.tries import RetryBudget, Tries, end_of
from triptych.core.clock import Clock
from triptych.core.errors import Aborted, AttemptError, DeadlineExceeded, NoRoom, Retracted, TriptychError, Unavailable
from triptych.core.ids import AttemptRef
from triptych.core.plan import FinishReason, Plan, Token, Usage
from triptych.core.timeline import Timeline, TimelineEvent
from triptych.core.worker import Role, WorkerInfo
from triptych.obs import metrics
from triptych.rpc.client import ChannelPool

WORKER_ID = "router"

_log = logging.getLogger(__name__)


class Workers(Protocol):
    """The part of a registry that the router reads."""

    def workers(self) -> tuple[WorkerInfo, ...]: ...

    def refresh(self) -> tuple[WorkerInfo, ...]:
        """The workers as they are now, where `workers` may be a moment old."""
        ...


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive tokens of the answer, the next in order."""

    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a complete answer."""

    finish_reason: FinishReason


Event = Batch | Done


class Answer:
    """An answer in the making: one choice of a request. `deadline_s` is by the event loop's clock, `turn` decides
    between workers that are alike, `known` is who was given the prompt, or a beginning of it, before."""

    def __init__(self, plan: Plan, timeline: Timeline, deadline_s: float = math.inf) -> None:
        self.plan = plan
        self.timeline = timeline
        self.deadline_s = deadline_s
        self.turn = 0
        self.prompt: Prompt | None = None
        self.known: Found | None = None
        self.progress = Progress()
        self.order = TokenOrder()
        self.ids: list[int] = []  # of the tokens that have been let through
        self.is_wanted = True
        # Holds at most one entry a token, so it needs no bound of its own: a slow reader never holds a worker back.
        self._events: asyncio.Queue[Event | TriptychError] = asyncio.Queue(plan.sampling.max_tokens + 1)
        self._deliver: Callable[[Event | TriptychError], None] = self._events.put_nowait

    def emit(self, attempt: int, tokens: Iterable[Token]) -> None:
        ready = self.order.offer(attempt, tokens)
        if ready and self.order.emitted > self.plan.sampling.max_tokens:
            raise TriptychError("a worker sent more tokens than were asked for")
        if ready:
            self.ids += [token.id for token in ready]
            self._deliver(Batch(tuple(ready)))

    def end(self, event: Done | TriptychError) -> None:
        self._deliver(event)

    def listen(self, listener: Callable[[Event | TriptychError], None]) -> None:
        """Events go to `listener` as they come, and `events` has none. To be called before the loop's next turn."""
        self._deliver = listener

    async def events(self) -> AsyncGenerator[Event, None]:
        """Batches in order, then one Done; or a TriptychError is raised. To be iterated over once."""
        while True:
            event = await self._events.get()
            if isinstance(event, TriptychError):
                raise event
            yield event
            if isinstance(event, Done):
                return

    def usage(self, completion_tokens: int) -> Usage:
        return Usage(self.plan.num_prompt_tokens, self.progress.cached_tokens, completion_tokens)

    def all_events(self) -> list[TimelineEvent]:
        """Every stage's rows so far, by their start."""
        return sorted([*self.timeline.events, *self.progress.timeline], key=lambda event: event.start_ns)


@dataclass(frozen=True, slots=True)
class Beside:
    """Names a further choice of a request whose `first` is under way: it has the same deadline, and asks the same
    workers first, because they hold the prompt in their caches. `choice` is at least 1."""

    choice: int
    first: Answer


class Pipeline:
    """Runs plans on the workers of a registry. One per router."""

    def __init__(
        self,
        registry: Workers,
        channels: ChannelPool,
        queue: AdmissionQueue,
        clock: Clock,
        routing: Routing | None = None,
    ) -> None:
        self._registry = registry
        self._channels = channels
        self._queue = queue
        self._clock = clock
        self._turns = itertools.count()
        self.routing = routing or Routing()
        self._budget = RetryBudget()
        self._breakers = Breakers(lambda: clock.monotonic_ns() / 1e9)

    @asynccontextmanager
    async def answer(
        self,
        plan: Plan,
        media: Sequence[bytes],
        request_id: str,
        timeline: Timeline | None = None,
        beside: Beside | None = None,
        tenant: Tenant = ANYBODY,
        prompt: Prompt | None = None,
    ) -> AsyncIterator[Answer]:
        """The answer to `plan` (`media`: encoded bytes, one per item). Leaving the block cancels all that still runs.
        `prompt` is made of the plan, here unless it was made off the event loop (`new_prompt`).

        `plan.timeout_s` counts from here, but for a further choice from where its first one began.
        """
        deadline_s = beside.first.deadline_s if beside else asyncio.get_running_loop().time() + plan.timeout_s
        answer = Answer(plan, timeline or Timeline("router", WORKER_ID, self._clock), deadline_s)
        answer.turn = beside.first.turn if beside else next(self._turns)
        answer.prompt = prompt or self.new_prompt(plan)
        answer.known = _served(beside.first) if beside else self.routing.homes.find(answer.prompt)
        ref = AttemptRef(request_id, beside.choice if beside else 0)
        async with owned_task(self._drive(answer, Job(ref, plan, media, deadline_s, tenant))):
            try:
                yield answer
            finally:
                answer.is_wanted = False

    def explain(self, plan: Plan, prompt: Prompt) -> dict[str, Any]:
        """How the workers for it would be chosen now (`routing/explain.py`). Runs nothing. Raises Unavailable."""
        view = ClusterView.of(self._registry.workers(), plan.model_fingerprint, self._breakers.avoided())
        return explain(self.routing, view, prompt, turn=0)

    def new_prompt(self, plan: Plan, session: str | None = None) -> Prompt:
        """What routing needs of the plan. From any thread; it takes milliseconds for 100,000 tokens."""
        sizes = self.routing.page_sizes(ClusterView.of(self._registry.workers(), plan.model_fingerprint))
        return Prompt.of(plan, sizes, session)

    async def _drive(self, answer: Answer, job: Job) -> None:
        """Ends the answer in exactly one way."""
        try:
            async with asyncio.timeout_at(job.deadline_s):
                reason = await self._try_until_done(answer, job)
            answer.end(Done(reason))
        except TimeoutError:
            answer.end(_out_of_time(answer, self._queue.retry_after_s()))
        except TriptychError as error:
            answer.end(error)
        except asyncio.CancelledError:
            answer.end(Aborted("the answer was given up"))  # for whoever still listens
            raise
        except Exception:
            _log.exception("a request failed with a bug", extra={"request_id": job.ref.request_id})
            answer.end(TriptychError("an internal error; the router's log has it"))
        finally:
            _count_turn(answer)

    async def _try_until_done(self, answer: Answer, job: Job) -> FinishReason:
        avoided: frozenset[str] = frozenset()
        self._budget.answer_begins()
        tries = Tries(self._budget)
        for number in itertools.count():
            _check_wanted(answer, job)
            ref = AttemptRef(job.ref.request_id, job.ref.choice, number)
            plan = _taken_up_again(job.plan, answer, tries.num_retractions)
            attempt = self._new_attempt(answer, replace(job, ref=ref, plan=plan), avoided)
            try:
                reason = _checked(answer, await attempt.run())
            except Retracted:
                tries.retracted()
                _log.info("an answer is replayed", extra={"request_id": ref.request_id, "num_tokens": len(answer.ids)})
            except (AttemptError, Unavailable) as error:
                self._breakers.failed(attempt.failed_workers)
                if (over := end_of(plan, answer.ids)) is not None:
                    return over
                tries.failed(error, attempt.failed_workers, attempt.lost_workers)
                avoided |= attempt.failed_workers
                self._note_failure(answer, attempt, error, ref)
                await asyncio.sleep(tries.pause_s(random.random()))
                self._registry.refresh()
            else:
                self._breakers.served(attempt.used_workers - attempt.failed_workers)
                return reason
        raise AssertionError("unreachable")

    def _note_failure(self, answer: Answer, attempt: Attempt, error: TriptychError, ref: AttemptRef) -> None:
        metrics.ROUTER_REPLAYS.labels("mid_answer" if answer.ids else "before_answer").inc()
        failed = ",".join(sorted(attempt.failed_workers))
        _log.warning(
            "an attempt failed and is repeated",
            extra={
                "request_id": ref.request_id,
                "code": error.code,
                "failed_workers": failed,
                "num_tokens": len(answer.ids),
            },
        )

    def _new_attempt(self, answer: Answer, job: Job, avoided: frozenset[str]) -> Attempt:
        number = job.ref.attempt
        answer.order.begin(number)
        answer.timeline.attempt = number
        answer.progress.reported_tokens = None
        if not job.plan.is_replay:
            answer.progress.workers.clear()
            answer.progress.cached_tokens = 0
        if number > 0 and not job.plan.num_retractions:
            answer.turn = next(self._turns)

        def view(failed: frozenset[str]) -> ClusterView:
            workers = self._registry.workers()
            self._breakers.keep(worker.worker_id for worker in workers)
            left_alone = avoided | failed | self._breakers.avoided()
            return ClusterView.of(workers, job.plan.model_fingerprint, left_alone)

        return Attempt(
            job,
            view,
            self._channels,
            self._queue,
            self.routing,
            _prompt_now(answer, job.plan),
            answer.turn,
            answer.known,
            answer.timeline,
            answer.progress,
            answer.emit,
            self._breakers,
        )


def _served(first: Answer) -> Found | None:
    """Who has the prompt by now, for another choice of the same request."""
    home = first.progress.served_by
    return first.known if home is None else Found(home, first.plan.num_prompt_tokens - 1, "sibling")


def _prompt_now(answer: Answer, plan: Plan) -> Prompt:
    """Of a replay: with the answer so far behind it."""
    assert answer.prompt is not None, "it was set with the plan"
    return replace(answer.prompt, num_tokens=plan.num_known_tokens) if plan.is_replay else answer.prompt


def _count_turn(answer: Answer) -> None:
    """Whether a prompt that went on from another was served by those who have that one."""
    served_by = answer.progress.served_by
    known = answer.known
    if served_by is not None and answer.order.emitted and known is not None and known.account == "home":
        metrics.FOLLOW_UP_TURNS.labels("home" if served_by == known.home else "elsewhere").inc()


def _check_wanted(answer: Answer, job: Job) -> None:
    """Before each attempt: a task group whose tasks fail while it is cancelled tells of the failure alone, so the
    cancellation may have been lost. Raises Aborted when the caller has left, TimeoutError after the deadline."""
    if not answer.is_wanted:
        raise Aborted("the answer was given up")
    if asyncio.get_running_loop().time() >= job.deadline_s:
        raise TimeoutError


def _taken_up_again(plan: Plan, answer: Answer, num_retractions: int) -> Plan:
    """The plan of the next try. The tokens that it samples are those that would have come: randomness is a function of
    the seed, the choice and the position, and the answer so far is part of what it reads."""
    return replace(plan, answer_ids=tuple(answer.ids), num_retractions=num_retractions)


def _checked(answer: Answer, reason: FinishReason) -> FinishReason:
    """An answer with a hole in it is none."""
    reported = answer.progress.reported_tokens or answer.order.emitted
    if answer.order.has_gap or not answer.order.emitted or answer.order.emitted != reported:
        raise TriptychError("tokens of the answer are missing")
    return reason


def _out_of_time(answer: Answer, retry_after_s: float) -> TriptychError:
    limit = f"{answer.plan.timeout_s:.3g} s"
    if Role.DECODE not in answer.progress.workers:
        return NoRoom(f"no room came free within the request's {limit}; try again later", retry_after_s=retry_after_s)
    return DeadlineExceeded(f"the answer was not complete within the request's {limit}")
