"""Task groups whose failures read like those of plain calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from triptych.core.errors import AttemptError, CapacityError, DeadlineExceeded, RequestError, TriptychError

T = TypeVar("T")

# When several tasks of one request fail together, the cause is more telling than what it led to.
_MOST_TELLING_FIRST = (RequestError, DeadlineExceeded, CapacityError, AttemptError, TriptychError)


@contextmanager
def unwrapped_group() -> Iterator[None]:
    """Turns the ExceptionGroup of a task group into the most telling of its exceptions."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise most_telling(leaves(group)) from None


def leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]


def most_telling(errors: list[BaseException]) -> BaseException:
    """A bug first (it must not hide behind a typed error), then by how much it explains."""
    bugs = [error for error in errors if not isinstance(error, TriptychError)]
    if bugs:
        return bugs[0]
    for kind in _MOST_TELLING_FIRST:
        for error in errors:
            if isinstance(error, kind):
                return error
    return errors[0]


@asynccontextmanager
async def owned_task(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """A task that has ended when the block is left, and whose failure is its owner's to read from the task.

    Unlike a task group it leaves an exception of the block as it is.
    """
    task = asyncio.get_running_loop().create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def first_of(work: Awaitable[T], stop_when: Callable[[], Coroutine[Any, Any, None]]) -> T | None:
    """The result of `work`, or None (and `work` cancelled and ended) when `stop_when()` returned first."""
    worker = asyncio.ensure_future(work)
    async with owned_task(stop_when()) as watcher:
        try:
            await asyncio.wait([worker, watcher], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not worker.done():
                worker.cancel()
                await asyncio.wait([worker])
    return None if worker.cancelled() else worker.result()
