"""How other threads speak to an engine: actions that its own thread runs, in order."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from triptych.core.errors import Aborted

log = logging.getLogger(__name__)

T = TypeVar("T")


class Inbox:
    """Actions that wait for the owner's thread. `post` and `call` may be used by any, the rest by the owner."""

    def __init__(self) -> None:
        self._actions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._is_closed = False

    def post(self, action: Callable[[], None]) -> bool:
        """False, and the action is not run, when the inbox is closed."""
        with self._gate:
            if not self._is_closed:
                self._actions.put(action)
            return not self._is_closed

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Like `post`, with its result or error; Aborted when the inbox is closed."""
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

    def run_waiting(self, timeout_s: float) -> None:
        """Runs all that is there; waits up to `timeout_s` for the first. One that fails takes no other along."""
        try:
            action = self._actions.get(timeout=timeout_s) if timeout_s > 0 else self._actions.get_nowait()
            while True:
                _run(action)
                action = self._actions.get_nowait()
        except queue.Empty:
            return

    def close(self) -> None:
        """Nothing is taken in any more; what was posted until now still runs, so that nobody waits for ever."""
        with self._gate:
            self._is_closed = True
        while not self._actions.empty():
            _run(self._actions.get_nowait())


def _run(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception:
        log.exception("an action on the engine's thread failed")
