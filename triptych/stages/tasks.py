"""Tasks that outlive the call that started them: clean-up that must happen even when the call is cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)


class Background:
    """Owns clean-up tasks of a worker; `close` waits for them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def close(self, timeout_s: float = 5.0) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("clean-up failed", exc_info=task.exception())


async def on_engine(future: Future[T]) -> T:
    """Awaits something that the engine's thread does. Cancelling the wait does not undo it."""
    wrapped = asyncio.wrap_future(future)
    wrapped.add_done_callback(_retrieve)
    return await asyncio.shield(wrapped)


def _retrieve(future: asyncio.Future[T]) -> None:
    """It may fail with nobody left who waits: that is no news for the log."""
    if not future.cancelled():
        future.exception()
