"""The encoder's step loop: one vision pass over whatever pictures wait, across requests."""

from __future__ import annotations

import logging
import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from triptych.core.clock import Clock
from triptych.core.errors import Aborted, TriptychError
from triptych.core.plan import Grid
from triptych.core.rate import RateMeter
from triptych.engine.delivery import Delivery, RowsWriter
from triptych.engine.timeslice import lengthen_time_slice
from triptych.faults import points
from triptych.model.parts import VisionPart
from triptych.obs import metrics
from triptych.sched.encode import PassBudget, PictureView, plan_batch

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.2
STUCK_AFTER_S = 60.0
TIME_SLICE_S = 0.02
"""About a pass of a small tower on one core: who waits for its embeddings, and who carries them there, go first."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """What came of one picture.

    Attributes:
        rows: (num_tokens, row_elements) on the tower's device, in memory of the whole pass: to be copied, not kept.
        delivered: who has had them written to his slot already.
        start_ns, end_ns: when the pass ran; the writing began at its end.
    """

    rows: torch.Tensor
    delivered: frozenset[RowsWriter]
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class _Waiting:
    pixels: torch.Tensor
    grid: Grid
    delivery: Delivery
    future: Future[Encoded]
    queued_ns: int

    @property
    def patches(self) -> int:
        return self.grid.t * self.grid.h * self.grid.w


class EncodeEngine:
    """Sole caller of the vision part; one thread."""

    def __init__(self, part: VisionPart, max_patches: int, max_items: int, clock: Clock) -> None:
        self.part = part
        self.rate = RateMeter()
        self._budget = PassBudget(max_patches, max_items)
        self._clock = clock
        self._inbox: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._backlog: list[_Waiting] = []
        self._stopping = False
        self._gate = threading.Lock()
        self._has_ended = False
        self._beat_ns = clock.monotonic_ns()
        self._thread = threading.Thread(target=self._loop, name="encoder-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        self._inbox.put(None)
        self._thread.join(timeout_s)

    def submit(self, pixels: torch.Tensor, grid: Grid, delivery: Delivery | None = None) -> Future[Encoded]:
        """One picture's patches (patches, elements); cancel the future to drop it while it waits. When its pass has run
        the embedding is written to all who have joined `delivery` by then. Aborted when the engine has stopped."""
        waiting = _Waiting(pixels, grid, delivery or Delivery(), Future(), self._clock.monotonic_ns())
        with self._gate:
            if not self._has_ended:
                self._inbox.put(waiting)
                return waiting.future
        _refuse(waiting)
        return waiting.future

    def is_progressing(self) -> bool:
        return self._thread.is_alive() and self._clock.monotonic_ns() - self._beat_ns < STUCK_AFTER_S * 1e9

    def _loop(self) -> None:
        lengthen_time_slice(TIME_SLICE_S)
        try:
            while not self._stopping:
                self._beat_ns = self._clock.monotonic_ns()
                self._drain()
                batch = self._take_batch()
                self._run([waiting for waiting in batch if waiting.future.set_running_or_notify_cancel()])
        finally:
            self._end()

    def _take_batch(self) -> list[_Waiting]:
        now_ns = self._clock.monotonic_ns()
        views = [PictureView(waiting.patches, (now_ns - waiting.queued_ns) / 1e9) for waiting in self._backlog]
        chosen = plan_batch(views, self._budget)
        batch, taken = [self._backlog[index] for index in chosen], set(chosen)
        self._backlog = [waiting for index, waiting in enumerate(self._backlog) if index not in taken]
        return batch

    def _end(self) -> None:
        """Nobody waits for ever: what came until now is refused, and so is what comes later."""
        with self._gate:
            self._has_ended = True
        while not self._inbox.empty():
            entry = self._inbox.get_nowait()
            self._backlog += [entry] if entry is not None else []
        for waiting in self._backlog:
            _refuse(waiting)

    def _drain(self) -> None:
        try:
            entry = self._inbox.get_nowait() if self._backlog else self._inbox.get(timeout=IDLE_WAIT_S)
            while True:
                if entry is None:
                    self._stopping = True
                else:
                    self._backlog.append(entry)
                entry = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _run(self, batch: list[_Waiting]) -> None:
        if not batch:
            return
        start_ns = self._clock.monotonic_ns()
        try:
            points.passing("encoder.before_encode")
            outputs = self.part.encode([waiting.pixels for waiting in batch], [waiting.grid for waiting in batch])
            passed = list(zip(batch, outputs, strict=True))  # complete before anybody gets anything
            self._await_device()
            end_ns = self._clock.monotonic_ns()
            delivered = [waiting.delivery.deliver(rows) for waiting, rows in passed]
        except Exception as error:
            log.exception("a vision pass failed")
            self._run_apart(batch, error)
            return
        for (waiting, rows), writers in zip(passed, delivered, strict=True):
            waiting.future.set_result(Encoded(rows, writers, start_ns, end_ns))
        metrics.ENCODER_BATCH_SECONDS.observe((end_ns - start_ns) / 1e9)
        metrics.ENCODER_BATCH_ITEMS.observe(len(batch))
        num_patches = sum(waiting.patches for waiting in batch)
        self.rate.add(num_patches, (end_ns - start_ns) / 1e9)
        metrics.ENCODER_PATCHES.inc(num_patches)
        metrics.ENCODER_EMBEDDING_TOKENS.inc(sum(rows.shape[0] for rows in outputs))

    def _await_device(self) -> None:
        """No pass begins while the former is under way: their number is what bounds memory, and the time of each is
        measured."""
        if self.part.device.type == "cuda":
            torch.cuda.current_stream(self.part.device).synchronize()

    def _run_apart(self, batch: list[_Waiting], error: Exception) -> None:
        """After a pass failed: each picture by itself, so that only the one at fault fails."""
        if len(batch) > 1:
            for waiting in batch:
                self._run([waiting])
        else:
            told = error if isinstance(error, TriptychError) else TriptychError("the encoder met an internal error")
            batch[0].future.set_exception(told)


def _refuse(waiting: _Waiting) -> None:
    if waiting.future.set_running_or_notify_cancel():
        waiting.future.set_exception(Aborted("the encoder is shutting down"))
