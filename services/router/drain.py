"""The end of a router: nobody new is let in, those under way end, and then it stops."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from triptych.core.errors import Unavailable
from triptych.obs import metrics


class Drain:
    """Owner of the count of requests under way, and of whether new ones are let in."""

    def __init__(self) -> None:
        self._num_under_way = 0
        self._begun = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def has_begun(self) -> bool:
        return self._begun.is_set()

    @property
    def num_under_way(self) -> int:
        return self._num_under_way

    def begin(self) -> None:
        self._begun.set()

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Around a request. Raises Unavailable for one that comes too late."""
        if self.has_begun:
            raise Unavailable("this server is stopping and takes no new requests; ask another, or again later")
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    async def finished(self, timeout_s: float) -> int:
        """Begun and empty, or `timeout_s` after it began: how many are under way still."""
        await self._begun.wait()
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            pass
        return self._num_under_way

    def _count(self, change: int) -> None:
        self._num_under_way += change
        metrics.ROUTER_INFLIGHT.set(self._num_under_way)
        if self._num_under_way:
            self._empty.clear()
        else:
            self._empty.set()
