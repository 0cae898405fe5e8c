"""The media processes of a worker: a lane for each, one queue before them all.

A lane is a thread that talks to one process and starts another when that one is lost. What a picture does to its
process ends there: the worker gets a refusal, and the next picture a process that works.
"""

from __future__ import annotations

import logging
import queue
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from triptych.core.clock import Clock
from triptych.core.errors import (
    Aborted,
    DeadlineExceeded,
    MediaInvalid,
    NoRoom,
    RequestError,
    TriptychError,
    Unavailable,
)
from triptych.faults import points
from triptych.media.frames import Limits, Target
from triptych.media.process import Confinement, Decoded, MediaProcess, ProcessLost, seconds_from_now
from triptych.obs import metrics

log = logging.getLogger(__name__)

MAX_ATTEMPTS: Final = 2


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """What the pool allows.

    Attributes:
        processes: how many, at least 1.
        picture: of each picture.
        confinement: of each process.
        timeout_s: from when a process has a picture until it must have answered, whatever else the cores do.
        max_waiting: pictures in the queue.
    """

    processes: int
    picture: Limits
    confinement: Confinement
    timeout_s: float
    max_waiting: int


@dataclass(frozen=True, slots=True)
class _Job:
    media: bytes
    target: Target
    future: Future[Decoded]


class MediaPool:
    """Owner of the processes, from `start` to `stop`."""

    def __init__(self, limits: MediaLimits, clock: Clock) -> None:
        self._queue: queue.Queue[_Job | None] = queue.Queue(max(limits.max_waiting, limits.processes))
        self._lanes = [_Lane(self._queue, limits, clock) for _ in range(limits.processes)]
        self._gate = threading.Lock()
        self._is_closed = False

    def start(self) -> None:
        for lane in self._lanes:
            lane.start()

    @property
    def pids(self) -> list[int]:
        """Of the processes that are there now."""
        return [pid for lane in self._lanes if (pid := lane.pid)]

    def submit(self, media: bytes, target: Target) -> Future[Decoded]:
        """Decodes and resizes; cancel the future to drop it while it waits. Raises NoRoom when too many wait.

        The future's errors: MediaInvalid, DeadlineExceeded, Unavailable when processes do not start or are killed
        again and again, Aborted when the pool has closed.
        """
        job = _Job(media, target, Future())
        with self._gate:
            if self._is_closed:
                raise Aborted("the encoder is shutting down")
            # Counted, not asked of the queue: by the time that an answer is shown a lane may have shown a later one.
            metrics.MEDIA_QUEUE_DEPTH.inc()
            try:
                self._queue.put_nowait(job)
            except queue.Full:
                metrics.MEDIA_QUEUE_DEPTH.dec()
                raise NoRoom("too many pictures wait to be decoded right now") from None
        return job.future

    def is_progressing(self) -> bool:
        """Whether every lane is there; what a picture may take is bounded, so none is stuck."""
        return all(lane.is_alive for lane in self._lanes)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Refuses what waits, and ends the processes. Idempotent."""
        with self._gate:
            self._is_closed = True
            self._refuse_waiting()
        for lane in self._lanes:
            lane.interrupt()
        for lane in self._lanes:
            lane.join(timeout_s)

    def _refuse_waiting(self) -> None:
        """Makes room for one end mark a lane, which is put under the same lock."""
        with suppress(queue.Empty):  # not asked before: the lanes take from it too
            while True:
                job = self._queue.get_nowait()
                if job is not None:
                    metrics.MEDIA_QUEUE_DEPTH.dec()
                if job is not None and job.future.set_running_or_notify_cancel():
                    job.future.set_exception(Aborted("the encoder is shutting down"))
        for _ in self._lanes:
            self._queue.put(None)


class _Lane:
    """One thread and, while it runs, one process."""

    def __init__(self, jobs: queue.Queue[_Job | None], limits: MediaLimits, clock: Clock) -> None:
        self._jobs = jobs
        self._limits = limits
        self._clock = clock
        self._process: MediaProcess | None = None
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="media", daemon=True)

    @property
    def pid(self) -> int:
        """Zero when there is none."""
        process = self._process
        return process.pid if process is not None else 0

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def interrupt(self) -> None:
        self._is_stopping = True
        process = self._process
        if process is not None:
            process.interrupt()

    def join(self, timeout_s: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._start_early()
            while (job := self._jobs.get()) is not None:
                metrics.MEDIA_QUEUE_DEPTH.dec()
                if job.future.set_running_or_notify_cancel():
                    self._serve(job)
        finally:
            if self._process is not None:
                self._process.end()

    def _start_early(self) -> None:
        """So that the first picture need not wait for it. If this fails, the first picture tells why."""
        with suppress(Unavailable):
            self._ready()

    def _serve(self, job: _Job) -> None:
        start_ns = self._clock.monotonic_ns()
        try:
            decoded = self._decode(job)
        except TriptychError as error:
            metrics.MEDIA_PICTURES.labels(_result(error)).inc()
            job.future.set_exception(error)
        except Exception:
            log.exception("a picture could not be given to a media process")
            metrics.MEDIA_PICTURES.labels("lost").inc()
            job.future.set_exception(TriptychError("the encoder met an internal error"))
        else:
            metrics.MEDIA_PICTURES.labels("decoded").inc()
            metrics.MEDIA_SECONDS.observe((self._clock.monotonic_ns() - start_ns) / 1e9)
            job.future.set_result(decoded)

    def _decode(self, job: _Job) -> Decoded:
        """A process that dies may have been killed for no fault of the picture: another tries once more."""
        points.passing("media.before_decode")
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                give_up_at = seconds_from_now(self._limits.timeout_s)
                return self._ready().decode(job.media, job.target, self._limits.picture, give_up_at)
            except RequestError:
                raise
            except TimeoutError:
                self._lose("did not answer in time")
                raise DeadlineExceeded("the picture was not decoded in time") from None
            except ProcessLost as lost:
                self._lose(f"ended with status {lost.status}")
                if self._is_stopping:
                    raise Aborted("the encoder is shutting down") from None
                if lost.is_out_of_time:
                    raise MediaInvalid("the picture takes too long to decode; send a simpler one") from None
                if attempt == MAX_ATTEMPTS:
                    raise _told(lost) from None
            except TriptychError:
                raise
            except BaseException:
                # What it still has to say of this picture must not be taken for the next one.
                self._lose("was left in the middle of a picture")
                raise
        raise AssertionError

    def _ready(self) -> MediaProcess:
        """Raises Unavailable when the machine has no process to give."""
        if self._process is None:
            try:
                self._process = MediaProcess(self._limits.confinement)
            except OSError as error:
                log.warning("a media process cannot be started", extra={"reason": error.strerror})
                raise Unavailable("the encoder cannot start a media process; try again later") from error
            metrics.MEDIA_PROCESS_STARTS.inc()
            if self._is_stopping:
                self._process.interrupt()
        return self._process

    def _lose(self, how: str) -> None:
        if self._process is None:
            return
        if not self._is_stopping:
            log.warning("a media process was lost", extra={"pid": self._process.pid, "how": how})
        self._process.interrupt()
        self._process.end()
        self._process = None


def _told(lost: ProcessLost) -> TriptychError:
    if not lost.has_started:
        return Unavailable("the encoder's media processes do not start; try again later")
    if lost.has_crashed:
        return MediaInvalid("the picture is damaged and cannot be decoded")
    return Unavailable("the encoder's media processes end before they answer; try again later")


def _result(error: TriptychError) -> str:
    if isinstance(error, DeadlineExceeded):
        return "late"
    return "refused" if isinstance(error, RequestError) else "lost"
