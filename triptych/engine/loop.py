"""The step loop of a language-model worker: drain the inbox, admit, schedule, run, apply.

One thread owns everything here: sequences, the cache manager, landing slots, grants. Others speak to it by `post` and
`call`. The same loop serves a prefill worker (prompts, then KV handed off), a decode worker (sequences whose KV was
written by others) and both in one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, Protocol, TypeVar

import torch

from triptych.core.cache_feed import WorkerLoad
from triptych.core.clock import Clock
from triptych.core.errors import Aborted, NoRoom, StaleAttempt, TriptychError
from triptych.core.ids import AttemptRef
from triptych.core.lifecycle import TERMINAL, Phase, advance
from triptych.core.plan import EmbeddingSource, FinishReason, Token
from triptych.core.rate import RateMeter
from triptych.engine.gauges import load_of, publish, withdraw
from triptych.engine.handoff import push_pages
from triptych.engine.inbox import Inbox
from triptych.engine.landing import LandingTable
from triptych.engine.listeners import was_told
from triptych.engine.parking import Parking
from triptych.engine.residency import Residency
from triptych.engine.retraction import Retraction, Seats
from triptych.engine.sequence import Handoff, PendingItem, Sequence
from triptych.engine.step import Piece, Step, build_pieces
from triptych.faults import points
from triptych.kv.manager import CacheManager
from triptych.model.runner import LanguageRunner, RunOutput
from triptych.obs import metrics
from triptych.sched.admission import AdmissionQueue, Ticket
from triptych.sched.language import SequenceView, StepBudget, plan_step

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

IDLE_WAIT_S = 0.2
STUCK_AFTER_S = 30.0
MAX_FAILED_TURNS = 3
# Of prompts, in one step. Fewer tell of what a step costs, not of what a token does.
LEAST_MEASURED_TOKENS = 16
INTERNAL_ERROR = "the worker met an internal error"


class StepFailed(Exception):
    """A step met a bug. The sequences in it have failed; the others go on."""


class LogitsObserver(Protocol):
    def __call__(self, ref: AttemptRef, index: int, logits: torch.Tensor) -> None:
        """Sees the float32 logits (vocabulary,) from which token `index` was chosen."""
        ...


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """`row_bytes` is one embedding row, all its levels; `max_sequences` bounds those that hold a reservation,
    `host_pool_bytes` the KV of those that had to give theirs up."""

    budget: StepBudget
    max_sequences: int
    max_waiting: int
    row_bytes: int
    host_pool_bytes: int = 0


class LanguageEngine:
    """Owner of all request state of its worker."""

    def __init__(
        self,
        runner: LanguageRunner,
        manager: CacheManager,
        landing: LandingTable,
        limits: EngineLimits,
        clock: Clock,
        stage: str,
        observer: LogitsObserver | None = None,
    ) -> None:
        self.manager = manager
        self.landing = landing
        self.limits = limits
        self._runner = runner
        self._clock = clock
        self._stage = stage
        self._observer = observer
        self._inbox = Inbox()
        self._waiting: AdmissionQueue[Sequence] = AdmissionQueue()
        self._living: dict[AttemptRef, Sequence] = {}
        self._running: list[Sequence] = []
        self._residency = Residency(manager, landing, limits.row_bytes)
        parking = Parking(runner, manager, self._residency, limits.host_pool_bytes)
        self._seats = Seats(self._running, self._living, self._settle, self._drop)
        self._retraction = Retraction(self._seats, self._residency, parking, manager.page_tokens, clock)
        self._num_arrived = 0
        self._rate = RateMeter()
        self.load = WorkerLoad()  # a new value each turn, for whoever asks from whatever thread
        self._under_way: Step | None = None
        self._stopping = False
        self._num_failed_turns = 0
        self._has_met_bug = False
        self._beat_ns = clock.monotonic_ns()
        self._thread = threading.Thread(target=self._loop, name=f"{stage}-engine", daemon=True)

    # -- from other threads ------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Fails what is left and ends the thread."""
        self.post(self._stop)
        self._thread.join(timeout_s)

    def post(self, action: Callable[[], None]) -> bool:
        """Runs `action` on the engine's thread, between steps; False when the engine has stopped."""
        return self._inbox.post(action)

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Like `post`, with its result or error; Aborted when the engine has stopped."""
        return self._inbox.call(action)

    @property
    def num_parameters(self) -> int:
        """Parameters of the language part that was loaded."""
        return self._runner.part.num_parameters

    def is_progressing(self) -> bool:
        """False when the thread is dead, has not come round for a long time, or fails turn after turn."""
        is_turning = self._clock.monotonic_ns() - self._beat_ns < STUCK_AFTER_S * 1e9
        return self._thread.is_alive() and is_turning and self._num_failed_turns < MAX_FAILED_TURNS

    # -- on the engine's thread --------------------------------------------------------------------------------------

    def submit(self, sequence: Sequence) -> None:
        """A prompt that waits for its reservation. One that no empty worker could hold fails at once."""
        sequence.queued_ns = self._clock.monotonic_ns()
        try:
            # One that was aborted may still have what a step under way reads, by its name.
            if sequence.ref in self._living or self.landing.is_leased(sequence.ref):
                raise StaleAttempt("this attempt is already under way")
            self._residency.check_fits(sequence)
            if len(self._waiting) >= self.limits.max_waiting and not sequence.plan.num_retractions:
                raise NoRoom("the prefill worker's queue is full right now")
        except Exception as error:
            sequence.phase = advance(sequence.phase, Phase.ABORTED)
            was_told(sequence.sink.failed, _as_told(error))
            return
        self._arrived(sequence)
        plan, num_known = sequence.plan, sequence.num_known
        self._waiting.push(sequence, Ticket(num_known, sequence.queued_ns, plan.priority, plan.num_retractions))

    def adopt(self, sequence: Sequence, token: Token) -> None:
        """A sequence whose prompt KV was written by another worker: goes on after its first token.

        Raises StaleAttempt (it is here already) or RequestTooLarge (no empty pool could hold its answer: it would wait
        for a page for ever, and keep others out), and then changes nothing."""
        if sequence.ref in self._living:
            raise StaleAttempt("this attempt is already under way")
        self._residency.check_pages_fit(sequence)
        sequence.phase = advance(advance(Phase.GRANTED, Phase.BOUND), Phase.DECODING)
        sequence.ran_ns = self._clock.monotonic_ns()
        sequence.num_computed = sequence.num_launched = sequence.num_known
        sequence.num_sampled = token.index + 1
        sequence.ids.append(token.id)
        self._residency.adopted(sequence)
        self._arrived(sequence)
        self._running.append(sequence)

    def bound(self, ref: AttemptRef, handoff: Handoff, num_held_pages: int = 0) -> None:
        """The decode worker named the pages, behind those at the prompt's beginning that it holds."""
        sequence = self._living.get(ref)
        if sequence is not None:
            sequence.handoff = handoff
            sequence.num_held_pages = sequence.num_pushed_pages = num_held_pages

    def land(self, ref: AttemptRef, item_index: int, rows: torch.Tensor, source: EmbeddingSource) -> None:
        """An embedding is complete in its slot; `rows` is (num_tokens, row_elements) over it. It came also for those
        who waited for the same one."""
        for key in self.landing.landed(ref, item_index, rows):
            self._take_rows(*key, rows, source if key == (ref, item_index) else EmbeddingSource.CACHE)

    def _take_rows(self, ref: AttemptRef, item_index: int, rows: torch.Tensor, source: EmbeddingSource) -> None:
        sequence = self._living[ref]
        pending = sequence.items[item_index]
        pending.rows, pending.source = rows, source
        metrics.EMBEDDING_SOURCE.labels(source.value).inc()
        sequence.timeline.add(
            "embedding_wait",
            sequence.queued_ns,
            num_tokens=pending.item.num_tokens,
            source=source,
            item_index=item_index,
        )

    def handed_over(self, ref: AttemptRef) -> None:
        """The decode worker has acknowledged the KV."""
        sequence = self._living.get(ref)
        if sequence is not None and sequence.phase is Phase.HANDING_OFF:
            self._drop(sequence, Phase.DONE)
            was_told(sequence.sink.decoding)

    def abort(self, ref: AttemptRef, error: TriptychError) -> None:
        """Ends an attempt in whatever phase; frees or quarantines all it holds. Unknown refs are ignored."""
        sequence = self._living.get(ref)
        if sequence is None:
            return
        try:
            self._drop(sequence, Phase.ABORTED)
        finally:
            was_told(sequence.sink.failed, error)

    def retract(self, ref: AttemptRef) -> bool:
        """Takes the pages of a sequence that decodes before the next step is launched: its KV waits on the host (if
        that is full, the router must replay it) until there is room again. False when no such sequence decodes here."""
        return self._retraction.ask(ref)

    def retract_for_replay(self, ref: AttemptRef) -> bool:
        """As `retract`, but nothing of it stays here: the router must replay it."""
        return self._retraction.ask_for_replay(ref)

    def check_open(self) -> None:
        """Raises NoRoom while somebody waits for the pages that were taken from it: no new grant then."""
        if self._retraction.num_waiting:
            raise NoRoom("answers that made room for others come back first")

    def after_step(self, action: Callable[[], None]) -> None:
        """Runs `action` once no step is under way that was launched before: what a sequence had may still be written
        until then."""
        if self._under_way is None:
            action()
        else:
            self._under_way.afterwards.append(action)

    def find(self, ref: AttemptRef) -> Sequence | None:
        return self._living.get(ref)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_decoding(self) -> int:
        return len(self._seats.decoding)

    @property
    def host_pool_bytes(self) -> int:
        """Bytes of KV that wait on the host."""
        return self._retraction.host_pool_bytes

    def _loop(self) -> None:
        while not self._stopping:
            self._beat_ns = self._clock.monotonic_ns()
            try:
                self._has_met_bug = False
                self._turn()
                self._num_failed_turns = self._num_failed_turns + 1 if self._has_met_bug else 0
            except StepFailed:
                self._num_failed_turns += 1
            except Exception:
                self._num_failed_turns += 1
                log.exception("an engine turn failed")
                self._abort_all(TriptychError(INTERNAL_ERROR))
        self._end()

    def _end(self) -> None:
        """Lets the step under way end (nobody wants what comes of it), and then what was posted run."""
        step, self._under_way = self._under_way, None
        if step is not None:
            with suppress(Exception):
                step.flight.wait()
            step.end()
        self._inbox.close()
        self._stop()
        withdraw(self._stage, self.manager, self.landing)

    def _turn(self) -> None:
        is_short = self._retraction.make_room()
        self._retraction.bring_back(self.limits.max_sequences)
        has_retracted = self._retraction.do_asked()
        if len(self._waiting) and not is_short and not self._retraction.num_waiting:
            self._admit()
        before = self._under_way
        launched = self._launch(self._plan(), before)
        if self._runner.lookahead == 0:
            before, launched = launched, None
        self._under_way = launched
        if before is not None:
            self._land(before)
        publish(self._stage, self.manager, self.landing, self._running, len(self._waiting), self._retraction)
        self.load = load_of(self._living.values(), self.manager, self._rate)
        is_idle = before is None and launched is None and not has_retracted
        self._inbox.run_waiting(timeout_s=IDLE_WAIT_S if is_idle else 0)

    def _admit(self) -> None:
        room, spare_pages = self.limits.max_sequences - len(self._running), self.num_decoding
        failed: list[tuple[Sequence, Exception]] = []

        def reserve(sequence: Sequence) -> bool:
            try:
                return self._residency.reserve(sequence, spare_pages)
            except Exception as error:
                failed.append((sequence, error))
                return False

        for sequence in self._waiting.admit(reserve, room, self._clock.monotonic_ns()):
            sequence.phase = advance(advance(sequence.phase, Phase.ADMITTED), Phase.RUNNING)
            sequence.timeline.add("queue", sequence.queued_ns)
            self._running.append(sequence)
            assert sequence.pages is not None
            self._tell(sequence, sequence.sink.admitted, sequence.pages.cached_tokens)
        for sequence, error in failed:
            self._give_up(sequence, error)

    def _give_up(self, sequence: Sequence, error: Exception) -> None:
        """Ends one sequence with what went wrong with it. A bug counts against this turn."""
        self._has_met_bug = self._has_met_bug or not isinstance(error, TriptychError)
        self.abort(sequence.ref, _as_told(error))

    def _settle(self) -> bool:
        """Waits for the step under way and applies it: nothing is named by any step then. False when there was none."""
        step, self._under_way = self._under_way, None
        if step is not None:
            self._land(step)
        return step is not None

    def _plan(self) -> list[tuple[Sequence, int]]:
        """Which sequences run next, and how many tokens of each. Who waits for a page is not among them."""
        now_ns, tokens = self._clock.monotonic_ns(), self.manager.page_tokens
        ready = [
            each
            for each in self._running
            if (not each.is_awaiting_sample or each.can_run_ahead) and each.has_room(tokens)
        ]
        planned = plan_step([_view(sequence, now_ns) for sequence in ready], self.limits.budget)
        return [(ready[piece.index], piece.count) for piece in planned]

    def _launch(self, planned: list[tuple[Sequence, int]], before: Step | None) -> Step | None:
        start_ns = self._clock.monotonic_ns()
        pieces = build_pieces(planned, before, self._give_up)
        if not pieces:
            return None
        try:
            points.passing(f"{self._stage}.before_step")
            flight = self._runner.launch([piece.run for piece in pieces])
        except Exception as error:
            self._fail(pieces, error)
            return None
        for piece in pieces:
            piece.sequence.num_launched += piece.count
        return Step(pieces, flight, start_ns)

    def _land(self, step: Step) -> None:
        """Waits for a step and applies it. What ended while the step was under way gets nothing of it."""
        try:
            output = step.flight.wait()
        except Exception as error:
            step.end()
            self._fail(step.pieces, error)
            return
        step.end()
        bugs = [error for error in self._apply_all(step, output) if not isinstance(error, TriptychError)]
        took_s = (self._clock.monotonic_ns() - step.start_ns) / 1e9
        metrics.STEP_SECONDS.labels(self._stage).observe(took_s)
        num_prompt = sum(piece.count for piece in step.pieces if piece.count > 1)
        if num_prompt >= LEAST_MEASURED_TOKENS:
            self._rate.add(num_prompt, took_s)
        metrics.STEP_TOKENS.labels(self._stage).observe(sum(piece.count for piece in step.pieces))
        if bugs:
            raise StepFailed from bugs[0]

    def _apply_all(self, step: Step, output: RunOutput) -> list[Exception]:
        """What kept a sequence from its result has ended that one, and is returned."""
        errors: list[Exception] = []
        for piece, token_id, row in step.samples(output):
            if piece.sequence.phase in TERMINAL:
                continue
            try:
                token = None if row is None else self._token(piece.sequence, output, row, token_id)
                self._apply(piece.sequence, piece.count, token, step.start_ns)
            except Exception as error:
                errors.append(error)
                self.abort(piece.sequence.ref, _as_told(error))
        return errors

    def _token(self, sequence: Sequence, output: RunOutput, row: int, token_id: int) -> Token:
        assert output.logits is not None
        if self._observer is not None:
            self._observer(sequence.ref, sequence.num_sampled, output.logits[row])
        return Token(sequence.num_sampled, token_id, output.logprobs[row])

    def _fail(self, pieces: list[Piece], error: Exception) -> None:
        """Ends the sequences of a step that failed; raises StepFailed when it met a bug."""
        if isinstance(error, TriptychError):
            for piece in pieces:
                self.abort(piece.sequence.ref, error)
            return
        log.error("an engine step failed", exc_info=error)
        for piece in pieces:
            self.abort(piece.sequence.ref, TriptychError(INTERNAL_ERROR))
        raise StepFailed from error

    def _apply(self, sequence: Sequence, count: int, token: Token | None, start_ns: int) -> None:
        was_decoding = sequence.phase is Phase.DECODING
        sequence.num_computed, sequence.ran_ns = sequence.num_computed + count, start_ns
        if was_decoding:
            metrics.DECODE_TOKENS.inc()
            if sequence.num_sampled == len(sequence.plan.answer_ids) + 1:
                sequence.decode_timeline.add("first_step", start_ns)
        else:
            metrics.PREFILL_TOKENS.labels("computed").inc(count)
            sequence.timeline.add("chunk", start_ns, num_tokens=count)
            self._residency.written(sequence)
            self._push(sequence)
        if token is not None:
            sequence.take(token)
            self._sampled(sequence, token, was_decoding)

    def _sampled(self, sequence: Sequence, token: Token, was_decoding: bool) -> None:
        if not was_decoding:
            sequence.timeline.add("first_token", self._clock.monotonic_ns())
        reason = sequence.finish_reason(token)
        if reason is None and sequence.needs_handoff:
            sequence.phase = advance(sequence.phase, Phase.HANDING_OFF)
            self._tell(sequence, sequence.sink.handed_off, token, sequence.num_pushed_bytes)
            return
        self._tell(sequence, sequence.sink.tokens, [token])
        if reason is not None:
            self._finish(sequence, reason)
        elif not was_decoding:
            sequence.phase = advance(sequence.phase, Phase.DECODING)
            self._tell(sequence, sequence.sink.decoding)

    def _push(self, sequence: Sequence) -> None:
        """Copies what is new to the decode worker's pool."""
        start_ns, moved = self._clock.monotonic_ns(), push_pages(sequence, self.manager)
        if moved:
            sequence.timeline.add("kv_write", start_ns, num_bytes=moved)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._residency.answered(sequence)
        self._drop(sequence, Phase.DONE)
        was_told(sequence.sink.finished, reason)

    def _tell(self, sequence: Sequence, say: Callable[P, None], *news: P.args, **named: P.kwargs) -> None:
        """A listener that fails ends its own sequence, between two steps."""
        if not was_told(say, *news, **named):
            self.post(partial(self.abort, sequence.ref, TriptychError(INTERNAL_ERROR)))

    def _drop(self, sequence: Sequence, phase: Phase) -> None:
        sequence.phase = advance(sequence.phase, phase)
        del self._living[sequence.ref]
        self._retraction.forget(sequence)
        if not self._waiting.remove(sequence):
            self._seats.leave(sequence)
        self._residency.stop_waiting(sequence)
        release = partial(self._residency.release, sequence)
        if self._under_way is not None and self._under_way.names(sequence):
            self._under_way.afterwards.append(release)
        else:
            release()

    def _arrived(self, sequence: Sequence) -> None:
        self._num_arrived += 1
        sequence.arrival = self._num_arrived
        self._living[sequence.ref] = sequence

    def _stop(self) -> None:
        self._stopping = True
        self._abort_all(Aborted("the worker is shutting down"))

    def _abort_all(self, error: TriptychError) -> None:
        """One that cannot be ended keeps none of the others."""
        for ref in list(self._living):
            try:
                self.abort(ref, error)
            except Exception:
                log.exception("a sequence could not give back what it held")


def _as_told(error: Exception) -> TriptychError:
    """What a caller may know of it; the log has the rest."""
    if isinstance(error, TriptychError):
        return error
    log.error("a sequence met a bug", exc_info=error)
    return TriptychError(INTERNAL_ERROR)


def _view(sequence: Sequence, now_ns: int) -> SequenceView:
    is_decoding = sequence.phase is Phase.DECODING or sequence.is_awaiting_sample
    num_ready = sequence.num_launched if sequence.phase is Phase.HANDING_OFF else sequence.num_ready
    waited_s = (now_ns - (sequence.ran_ns if is_decoding else sequence.queued_ns)) / 1e9
    return SequenceView(
        sequence.num_launched, num_ready, sequence.num_known, is_decoding, waited_s, sequence.plan.priority
    )


def missing_items(sequence: Sequence) -> Mapping[int, PendingItem]:
    """Items whose embeddings have neither come nor are needed no more."""
    return {i: p for i, p in enumerate(sequence.items) if p.rows is None and p.item.end > sequence.num_computed}
