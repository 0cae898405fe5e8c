"""The step loop of a language-model worker: drain the inbox, admit, schedule, run, apply.

One thread owns everything here: sequences, the cache manager, landing slots, grants. Others speak to it by `post` and
`call`. The same loop serves a prefill worker (prompts, then KV handed off), a decode worker (sequences whose KV was
written by others) and both in one.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from triptych.core.clock import Clock
from triptych.core.errors import Aborted, NoRoom, RequestTooLarge, StaleAttempt, TriptychError
from triptych.core.ids import AttemptRef
from triptych.core.lifecycle import Phase, advance
from triptych.core.plan import EmbeddingSource, FinishReason, Token
from triptych.engine.gauges import publish
from triptych.engine.landing import LandingTable
from triptych.engine.sequence import Handoff, PendingItem, Sequence
from triptych.engine.slices import build_slice
from triptych.kv.manager import CacheManager
from triptych.model.runner import LanguageRunner, RunSlice, check_coverage
from triptych.obs import metrics
from triptych.sched.admission import AdmissionQueue, Ticket
from triptych.sched.language import SequenceView, Slice, StepBudget, plan_step

log = logging.getLogger(__name__)

T = TypeVar("T")

IDLE_WAIT_S = 0.2
STUCK_AFTER_S = 30.0
MAX_FAILED_TURNS = 3
INTERNAL_ERROR = "the worker met an internal error"


class StepFailed(Exception):
    """A step met a bug. The sequences in it have failed; the others go on."""


class LogitsObserver(Protocol):
    def __call__(self, ref: AttemptRef, index: int, logits: torch.Tensor) -> None:
        """Sees the float32 logits (vocabulary,) from which token `index` was chosen."""
        ...


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """`row_bytes` is one embedding row, all its levels; `max_sequences` bounds those that hold a reservation."""

    budget: StepBudget
    max_sequences: int
    max_waiting: int
    row_bytes: int


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
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: AdmissionQueue[Sequence] = AdmissionQueue()
        self._living: dict[AttemptRef, Sequence] = {}
        self._running: list[Sequence] = []
        self._stopping = False
        self._gate = threading.Lock()
        self._has_ended = False
        self._num_failed_turns = 0
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
        with self._gate:
            if not self._has_ended:
                self._inbox.put(action)
            return not self._has_ended

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Like `post`, with its result or error; Aborted when the engine has stopped."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(action())
            except BaseException as error:
                future.set_exception(error)

        if not self.post(run):
            future.set_exception(Aborted("the worker is shutting down"))
        return future

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
            if sequence.ref in self._living:
                raise StaleAttempt("this attempt is already under way")
            self._check_fits(sequence)
            if len(self._waiting) >= self.limits.max_waiting:
                raise NoRoom("the prefill worker's queue is full right now")
        except TriptychError as error:
            sequence.phase = advance(sequence.phase, Phase.ABORTED)
            sequence.sink.failed(error)
            return
        self._living[sequence.ref] = sequence
        self._waiting.push(sequence, Ticket(sequence.num_prompt, sequence.queued_ns, sequence.plan.priority))

    def adopt(self, sequence: Sequence, token: Token) -> None:
        """A sequence whose prompt KV was written by another worker: goes on after its first token."""
        sequence.phase = advance(advance(Phase.GRANTED, Phase.BOUND), Phase.DECODING)
        sequence.is_adopted, sequence.ran_ns = True, self._clock.monotonic_ns()
        sequence.num_computed, sequence.num_sampled = sequence.num_prompt, token.index + 1
        sequence.ids.append(token.id)
        self._living[sequence.ref] = sequence
        self._running.append(sequence)

    def bound(self, ref: AttemptRef, handoff: Handoff) -> None:
        """The decode worker named the pages."""
        sequence = self._living.get(ref)
        if sequence is not None:
            sequence.handoff = handoff

    def land(self, ref: AttemptRef, item_index: int, rows: torch.Tensor, source: EmbeddingSource) -> None:
        """An embedding is complete in its slot; `rows` is (num_tokens, row_elements) over it."""
        self.landing.landed(ref, item_index)
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
            sequence.sink.decoding()

    def abort(self, ref: AttemptRef, error: TriptychError) -> None:
        """Ends an attempt in whatever phase; frees or quarantines all it holds. Unknown refs are ignored."""
        sequence = self._living.get(ref)
        if sequence is None:
            return
        self._drop(sequence, Phase.ABORTED)
        sequence.sink.failed(error)

    def find(self, ref: AttemptRef) -> Sequence | None:
        return self._living.get(ref)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def _loop(self) -> None:
        while not self._stopping:
            self._beat_ns = self._clock.monotonic_ns()
            try:
                self._turn()
                self._num_failed_turns = 0
            except StepFailed:
                self._num_failed_turns += 1
            except Exception:
                self._num_failed_turns += 1
                log.exception("an engine turn failed")
                for sequence in list(self._living.values()):
                    self.abort(sequence.ref, TriptychError(INTERNAL_ERROR))
        self._end()

    def _end(self) -> None:
        """Nothing is taken in any more; what was posted until now still runs, so that nobody waits for ever."""
        with self._gate:
            self._has_ended = True
        while not self._inbox.empty():
            try:
                self._inbox.get_nowait()()
            except Exception:
                log.exception("an action failed while the engine was stopping")
        self._stop()

    def _turn(self) -> None:
        self._admit()
        now_ns = self._clock.monotonic_ns()
        slices = plan_step([_view(sequence, now_ns) for sequence in self._running], self.limits.budget)
        if slices:
            self._step(slices)
        publish(self._stage, self.manager, self.landing, self._running, len(self._waiting))
        self._drain(wait=not slices)

    def _drain(self, wait: bool) -> None:
        try:
            action = self._inbox.get(timeout=IDLE_WAIT_S) if wait else self._inbox.get_nowait()
            while True:
                action()
                action = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _admit(self) -> None:
        room = self.limits.max_sequences - len(self._running)
        for sequence in self._waiting.admit(self._reserve, room, self._clock.monotonic_ns()):
            sequence.phase = advance(advance(sequence.phase, Phase.ADMITTED), Phase.RUNNING)
            sequence.timeline.add("queue", sequence.queued_ns)
            self._running.append(sequence)
            assert sequence.pages is not None
            sequence.sink.admitted(sequence.pages.cached_tokens)

    def _reserve(self, sequence: Sequence) -> bool:
        """All uncached pages and the landing room of all missing items, or nothing.

        Landing room comes first: it is given back without loss, while room for pages may cost cached ones.
        """
        salt, items = sequence.plan.cache_salt, [PendingItem(item) for item in sequence.plan.items]
        cached_tokens = self.manager.match_tokens(salt, sequence.ids)
        missing = {i: self._item_bytes(p) for i, p in enumerate(items) if p.item.end > cached_tokens}
        if not self.landing.try_reserve(sequence.ref, missing):
            return False
        pages = self.manager.reserve(salt, sequence.ids, self._tokens_to_hold(sequence))
        if pages is None:
            self.landing.abandon(sequence.ref)
            return False
        assert pages.cached_tokens == cached_tokens, "nothing came between"
        for pending in items:
            if pending.item.end <= pages.cached_tokens:
                pending.source = EmbeddingSource.RADIX
                metrics.EMBEDDING_SOURCE.labels(EmbeddingSource.RADIX.value).inc()
        sequence.pages, sequence.items = pages, items
        sequence.num_computed = pages.cached_tokens
        metrics.PREFILL_TOKENS.labels("cached").inc(pages.cached_tokens)
        metrics.RADIX_LOOKUP_TOKENS.labels("hit").inc(pages.cached_tokens)
        metrics.RADIX_LOOKUP_TOKENS.labels("miss").inc(sequence.num_prompt - pages.cached_tokens)
        return True

    def _step(self, planned: list[Slice]) -> None:
        start_ns = self._clock.monotonic_ns()
        batch = self._slices(planned)
        if not batch:
            return
        try:
            output = self._runner.run([piece for _, piece in batch])
        except TriptychError as error:
            for sequence, _ in batch:
                self.abort(sequence.ref, error)
            return
        except Exception as error:
            log.exception("an engine step failed")
            for sequence, _ in batch:
                self.abort(sequence.ref, TriptychError(INTERNAL_ERROR))
            raise StepFailed from error
        row = 0
        for (sequence, piece), token_id in zip(batch, output.token_ids, strict=True):
            token: Token | None = None
            if token_id is not None and output.logits is not None:
                if self._observer is not None:
                    self._observer(sequence.ref, sequence.num_sampled, output.logits[row])
                token = Token(sequence.num_sampled, token_id, output.logprobs[row])
                row += 1
            self._apply(sequence, len(piece.ids), token, start_ns)
        metrics.STEP_SECONDS.labels(self._stage).observe((self._clock.monotonic_ns() - start_ns) / 1e9)
        metrics.STEP_TOKENS.labels(self._stage).observe(sum(len(piece.ids) for _, piece in batch))

    def _slices(self, planned: list[Slice]) -> list[tuple[Sequence, RunSlice]]:
        """What runs. A sequence whose embeddings do not fit its prompt fails here, alone."""
        batch: list[tuple[Sequence, RunSlice]] = []
        for sequence, count in [(self._running[piece.index], piece.count) for piece in planned]:
            piece = build_slice(sequence, count)
            try:
                check_coverage(piece)
            except TriptychError as error:
                self.abort(sequence.ref, error)
            else:
                batch.append((sequence, piece))
        return batch

    def _apply(self, sequence: Sequence, count: int, token: Token | None, start_ns: int) -> None:
        assert sequence.pages is not None
        was_decoding = sequence.phase is Phase.DECODING
        sequence.num_computed, sequence.ran_ns = sequence.num_computed + count, start_ns
        if was_decoding:
            metrics.DECODE_TOKENS.inc()
            if sequence.num_sampled == 1:
                sequence.decode_timeline.add("first_step", start_ns)
        else:
            metrics.PREFILL_TOKENS.labels("computed").inc(count)
            sequence.timeline.add("chunk", start_ns, num_tokens=count)
            self.manager.share(sequence.pages, sequence.ids, sequence.num_computed)
            self._free_consumed(sequence)
            self._push(sequence)
        if token is not None:
            sequence.take(token)
            self._sampled(sequence, token, was_decoding)

    def _sampled(self, sequence: Sequence, token: Token, was_decoding: bool) -> None:
        sequence.sink.tokens([token])
        if not was_decoding:
            sequence.timeline.add("first_token", self._clock.monotonic_ns())
        reason = sequence.finish_reason(token)
        if reason is not None:
            self._finish(sequence, reason)
        elif sequence.needs_handoff:
            sequence.phase = advance(sequence.phase, Phase.HANDING_OFF)
            sequence.sink.handed_off(sequence.num_pushed_bytes)
        elif not was_decoding:
            sequence.phase = advance(sequence.phase, Phase.DECODING)
            sequence.sink.decoding()

    def _push(self, sequence: Sequence) -> None:
        """Copies pages that filled up, and at the prompt's end the partial one, to the decode worker's pool."""
        if sequence.handoff is None or sequence.pages is None:
            return
        is_whole = sequence.num_computed >= sequence.num_prompt
        page_tokens = self.manager.page_tokens
        end = self.manager.pages_for(sequence.num_computed) if is_whole else sequence.num_computed // page_tokens
        if end <= sequence.num_pushed_pages:
            return
        start_ns = self._clock.monotonic_ns()
        first = sequence.num_pushed_pages
        moved = sequence.handoff.copy(sequence.pages.pages[first:end], first)
        sequence.num_pushed_pages, sequence.num_pushed_bytes = end, sequence.num_pushed_bytes + moved
        sequence.timeline.add("kv_write", start_ns, num_bytes=moved)

    def _free_consumed(self, sequence: Sequence) -> None:
        for item_index, pending in enumerate(sequence.items):
            if pending.rows is not None and pending.item.end <= sequence.num_computed:
                pending.rows = None
                self.landing.consumed(sequence.ref, item_index)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.pages is not None and not sequence.is_adopted:
            self.manager.share(sequence.pages, sequence.ids, sequence.num_computed)
        self._drop(sequence, Phase.DONE)
        sequence.sink.finished(reason)

    def _drop(self, sequence: Sequence, phase: Phase) -> None:
        sequence.phase = advance(sequence.phase, phase)
        del self._living[sequence.ref]
        if not self._waiting.remove(sequence):
            self._running = [other for other in self._running if other is not sequence]
        self.landing.abandon(sequence.ref)
        if sequence.pages is not None:
            self.manager.release(sequence.pages)

    def _tokens_to_hold(self, sequence: Sequence) -> int:
        """The prompt, and the answer's room when it is decoded here (the last token's KV is never needed)."""
        if sequence.needs_handoff:
            return sequence.num_prompt
        return sequence.num_prompt + sequence.plan.sampling.max_tokens - 1

    def _item_bytes(self, pending: PendingItem) -> int:
        return pending.item.num_tokens * self.limits.row_bytes

    def _check_fits(self, sequence: Sequence) -> None:
        if self.manager.pages_for(self._tokens_to_hold(sequence)) > self.manager.num_usable:
            raise RequestTooLarge(
                f"the request needs KV room for {self._tokens_to_hold(sequence)} tokens; a worker holds "
                f"{self.manager.num_usable * self.manager.page_tokens}. Shorten the prompt or lower max_tokens"
            )
        if not self.landing.can_ever_hold([item.num_tokens * self.limits.row_bytes for item in sequence.plan.items]):
            raise RequestTooLarge("the pictures of this request do not fit the worker's landing arena; send fewer")

    def _stop(self) -> None:
        for sequence in list(self._living.values()):
            self.abort(sequence.ref, Aborted("the worker is shutting down"))
        self._stopping = True


def _view(sequence: Sequence, now_ns: int) -> SequenceView:
    is_decoding = sequence.phase is Phase.DECODING
    num_ready = sequence.num_computed if sequence.phase is Phase.HANDING_OFF else sequence.num_ready
    waited_s = (now_ns - (sequence.ran_ns if is_decoding else sequence.queued_ns)) / 1e9
    return SequenceView(
        sequence.num_computed, num_ready, sequence.num_prompt, is_decoding, waited_s, sequence.plan.priority
    )


def missing_items(sequence: Sequence) -> Mapping[int, PendingItem]:
    """Items whose embeddings have neither come nor are needed no more."""
    return {i: p for i, p in enumerate(sequence.items) if p.rows is None and p.item.end > sequence.num_computed}
