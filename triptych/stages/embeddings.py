"""Embeddings by identity at an encoder: cached, or computed once for everybody who waits (single flight)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import torch

from triptych.core.clock import Clock
from triptych.core.errors import MediaMismatch
from triptych.core.plan import EmbeddingSource, Item
from triptych.core.timeline import Timeline
from triptych.engine.encoder import EncodeEngine
from triptych.mm.embedding_cache import CacheKey, EmbeddingCache
from triptych.model.picture import decode_picture
from triptych.obs import metrics

FetchMedia = Callable[[], Awaitable[bytes]]
"""Gets the item's encoded bytes from the router."""


@dataclass(slots=True, eq=False)
class _Flight:
    """One computation. `media` is set once its leader has the bytes; from then on it needs the leader no more."""

    media: asyncio.Future[bytes]
    task: asyncio.Task[torch.Tensor]
    waiters: int = field(default=0)


class LeaderGone(Exception):
    """The call that was to bring the media ended before it did; one of those who wait takes over."""


class EmbeddingSupply:
    """Owner of the encoder's embedding cache and of the flights. Runs on the event loop."""

    def __init__(self, engine: EncodeEngine, cache_bytes: int, max_pixels: int, clock: Clock) -> None:
        self._engine = engine
        self._cache: EmbeddingCache[torch.Tensor] = EmbeddingCache(cache_bytes)
        self._flights: dict[CacheKey, _Flight] = {}
        self._max_pixels = max_pixels
        self._clock = clock

    @property
    def num_parameters(self) -> int:
        """Parameters of the vision part that was loaded."""
        return self._engine.part.num_parameters

    @property
    def row_bytes(self) -> int:
        return self._engine.part.row_elements * self._engine.part.dtype.itemsize

    async def get(
        self, item: Item, item_index: int, fetch: FetchMedia, timeline: Timeline
    ) -> tuple[torch.Tensor, EmbeddingSource]:
        """The item's embedding (num_tokens, row_elements) on the host, and whether it was cached.

        Raises MediaInvalid or MediaMismatch; a failure is never cached.
        """
        key = (item.identity, item.num_tokens)
        while True:
            cached = self._cache.get(*key)
            if cached is not None:
                metrics.EMBEDDING_CACHE_REQUESTS.labels("hit").inc()
                timeline.add("cache_hit", self._clock.monotonic_ns(), item_index=item_index)
                return cached, EmbeddingSource.CACHE
            flight = self._flights.get(key)
            try:
                if flight is not None:
                    metrics.EMBEDDING_CACHE_REQUESTS.labels("joined").inc()
                    return await self._join(key, flight), EmbeddingSource.CACHE
                metrics.EMBEDDING_CACHE_REQUESTS.labels("miss").inc()
                return await self._lead(key, item, item_index, fetch, timeline), EmbeddingSource.REMOTE
            except LeaderGone:
                continue

    def clear(self) -> None:
        self._cache.evict(0)

    async def _lead(
        self, key: CacheKey, item: Item, item_index: int, fetch: FetchMedia, timeline: Timeline
    ) -> torch.Tensor:
        media: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._compute(key, item, item_index, media, timeline))
        task.add_done_callback(_retrieve)
        flight = self._flights[key] = _Flight(media, task)
        try:
            with timeline.span("fetch", item_index=item_index):
                media.set_result(await fetch())
        except BaseException:
            self._end_flight(key, media)
            media.set_exception(LeaderGone())
            media.exception()  # retrieved by the task, if anybody waits for it
            raise
        return await self._join(key, flight)

    async def _join(self, key: CacheKey, flight: _Flight) -> torch.Tensor:
        """Waits for a flight; the last waiter who leaves takes it down."""
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if flight.waiters == 0 and flight.media.done() and not flight.task.done():
                self._end_flight(key, flight.media)
                flight.task.cancel()

    async def _compute(
        self, key: CacheKey, item: Item, item_index: int, media: asyncio.Future[bytes], timeline: Timeline
    ) -> torch.Tensor:
        data = await media
        try:
            with timeline.span("preprocess", item_index=item_index):
                pixels, grid = await asyncio.to_thread(self._preprocess, data)
            if grid != item.grid:
                raise MediaMismatch("the picture's real size is not the one in its header")
            encoded = await asyncio.wrap_future(self._engine.submit(pixels, grid))
            if encoded.rows.shape[0] != item.num_tokens:
                raise MediaMismatch("the picture's embedding has another length than the prompt")
            timeline.add("encode", encoded.start_ns, encoded.end_ns, num_tokens=item.num_tokens, item_index=item_index)
            self._cache.put(*key, encoded.rows, encoded.rows.numel() * encoded.rows.element_size())
            metrics.EMBEDDING_CACHE_BYTES.set(self._cache.num_bytes)
            return encoded.rows
        finally:
            self._end_flight(key, media)

    def _end_flight(self, key: CacheKey, media: asyncio.Future[bytes]) -> None:
        """Nobody joins this flight any more; a newer one under the same key stays."""
        flight = self._flights.get(key)
        if flight is not None and flight.media is media:
            del self._flights[key]

    def _preprocess(self, media: bytes) -> tuple[torch.Tensor, object]:
        return self._engine.part.preprocess(decode_picture(media, self._max_pixels))


def _retrieve(task: asyncio.Task[torch.Tensor]) -> None:
    """A flight may fail with nobody left who waits: that is no news for the log."""
    if not task.cancelled():
        task.exception()
