"""Embeddings by identity at an encoder: cached, or computed once for everybody who waits (single flight)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Final, Protocol

import torch

from triptych.core.clock import Clock
from triptych.core.errors import MediaMismatch
from triptych.core.plan import EmbeddingSource, Grid, Item, ItemFormat
from triptych.core.timeline import Timeline
from triptych.engine.delivery import Delivery, RowsWriter, Written
from triptych.engine.encoder import Encoded, EncodeEngine
from triptych.faults import points
from triptych.media.frames import Target
from triptych.media.process import Decoded
from triptych.mm.embedding_cache import CacheKey, EmbeddingCache
from triptych.mm.item import MultimodalDataItem, check_announced_bytes, grid_patches
from triptych.mm.tensor import TensorValue
from triptych.obs import metrics
from triptych.stages.encode_room import EncodeRoom
from triptych.stages.tensors import as_patches, as_rows, host_rows, own_rows
from triptych.transport.slot_writer import size_bytes

INLINE_COPY_BYTES: Final = 1 << 18

FetchItem = Callable[[], Awaitable[MultimodalDataItem]]
"""Gets the item's data from the router, found to be what its identity names."""


GridOf = Callable[[int, int], Grid]
"""The patches of a picture of that width and height in pixels, upright. Raises MediaInvalid."""


class Pictures(Protocol):
    """Where encoded pictures are decoded and resized."""

    def submit(self, media: bytes, target: Target) -> Future[Decoded]:
        """See `triptych.media.pool.MediaPool`."""
        ...


class _Flight:
    """One computation.

    Attributes:
        held: set once its leader has the data; from then on it needs the leader no more.
        delivery: the slots that the tower's pass writes to.
        delivered: what the pass made and whom it has written to (None: there was no pass); the others wait for `task`.
        waiting: those who wait, each by the writer of his slot (None: he has none).
        task: ends with the rows, on the host and in storage of their own; None when nobody had any use for them.
    """

    task: asyncio.Task[torch.Tensor | None]

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.held: asyncio.Future[MultimodalDataItem] = loop.create_future()
        self.delivered: asyncio.Future[Encoded | None] = loop.create_future()
        self.delivery = Delivery()
        self.waiting: list[RowsWriter | None] = []

    def join(self, writer: RowsWriter | None) -> None:
        self.waiting.append(writer)
        if writer is not None:
            self.delivery.join(writer)

    def leave(self, writer: RowsWriter | None) -> None:
        self.waiting.remove(writer)
        if writer is not None:
            self.delivery.leave(writer)

    def fail(self, error: BaseException) -> None:
        if not self.delivered.done():
            self.delivered.set_exception(error)
            self.delivered.exception()  # retrieved by those who wait, if there are any


class LeaderGone(Exception):
    """The call that was to bring the media ended before it did; one of those who wait takes over."""


class EmbeddingSupply:
    """Owner of the encoder's embedding cache and of the flights. Runs on the event loop."""

    def __init__(
        self,
        engine: EncodeEngine,
        pictures: Pictures,
        grid_of: GridOf,
        cache_bytes: int,
        room: EncodeRoom,
        clock: Clock,
        told: Callable[[bytes, bool], None] | None = None,
    ) -> None:
        """`told` hears of each identity that is cached from now on, or not any more."""
        self._engine = engine
        self._pictures = pictures
        self._grid_of = grid_of
        self._room = room
        self._cache: EmbeddingCache[torch.Tensor] = EmbeddingCache(cache_bytes, told)
        self._flights: dict[CacheKey, _Flight] = {}
        self._clock = clock
        self._dtype_name = str(engine.part.dtype).removeprefix("torch.")

    @property
    def num_parameters(self) -> int:
        """Parameters of the vision part that was loaded."""
        return self._engine.part.num_parameters

    @property
    def waiting_patches(self) -> int:
        """Of pictures that are here and not encoded."""
        return sum(grid_patches(key.grid) for key in self._flights)

    @property
    def patches_per_s(self) -> float | None:
        """Of the tower's passes, of late."""
        return self._engine.rate.per_s

    @property
    def row_bytes(self) -> int:
        return self._engine.part.row_elements * self._engine.part.dtype.itemsize

    def check_announced(self, item: Item) -> None:
        """Raises InvalidRequest for a tensor that cannot have as many bytes as the item announces."""
        part = self._engine.part
        is_patches = item.format is ItemFormat.PROCESSOR_OUTPUT
        check_announced_bytes(item, part.patch_elements if is_patches else part.row_elements)

    async def get(
        self, item: Item, item_index: int, fetch: FetchItem, timeline: Timeline, writer: RowsWriter | None = None
    ) -> tuple[torch.Tensor | Written, EmbeddingSource]:
        """The item's embedding (num_tokens, row_elements) on the host, or that the tower's pass has written it with
        `writer`; and whether it was cached.

        Raises MediaInvalid, MediaMismatch or InvalidRequest; a failure is never cached.
        """
        key = CacheKey.of(item, self._dtype_name)
        while True:
            cached = self._cache.get(key)
            if cached is not None:
                metrics.EMBEDDING_CACHE_REQUESTS.labels("hit").inc()
                timeline.add("cache_hit", self._clock.monotonic_ns(), item_index=item_index)
                return cached, EmbeddingSource.CACHE
            flight = self._flights.get(key)
            try:
                if flight is not None:
                    metrics.EMBEDDING_CACHE_REQUESTS.labels("joined").inc()
                    return await self._join(key, flight, writer), EmbeddingSource.CACHE
                metrics.EMBEDDING_CACHE_REQUESTS.labels("miss").inc()
                return await self._lead(key, item_index, fetch, timeline, writer), EmbeddingSource.REMOTE
            except LeaderGone:
                continue

    def clear(self) -> None:
        self._cache.evict(0)

    async def _lead(
        self, key: CacheKey, item_index: int, fetch: FetchItem, timeline: Timeline, writer: RowsWriter | None
    ) -> torch.Tensor | Written:
        flight = self._flights[key] = _Flight()
        task = flight.task = asyncio.create_task(self._compute(key, item_index, flight, timeline))
        task.add_done_callback(_retrieve)
        try:
            leave = await self._room.enter(grid_patches(key.grid))
            task.add_done_callback(lambda _: leave())
            with timeline.span("fetch", item_index=item_index):
                flight.held.set_result(await fetch())
        except BaseException:
            self._end_flight(key, flight)
            flight.held.set_exception(LeaderGone())
            flight.held.exception()  # retrieved by the task, if anybody waits for it
            raise
        return await self._join(key, flight, writer)

    async def _join(self, key: CacheKey, flight: _Flight, writer: RowsWriter | None) -> torch.Tensor | Written:
        """Waits for a flight; the last waiter who leaves takes it down, unless only its copy for the cache is left."""
        flight.join(writer)
        try:
            encoded = await asyncio.shield(flight.delivered)
            if encoded is not None and writer in encoded.delivered:
                return Written(encoded.end_ns)
            rows = await asyncio.shield(flight.task)
            assert rows is not None, "somebody waits for them"
            return rows
        finally:
            flight.leave(writer)
            if not flight.waiting and flight.held.done() and not flight.delivered.done():
                self._end_flight(key, flight)
                flight.task.cancel()

    async def _compute(
        self, key: CacheKey, item_index: int, flight: _Flight, timeline: Timeline
    ) -> torch.Tensor | None:
        try:
            held = await flight.held
            if held.precomputed_embedding is not None:
                rows: torch.Tensor | None = await self._brought(held.precomputed_embedding, item_index, timeline)
                flight.delivered.set_result(None)
            else:
                rows = await self._encoded(flight, held, item_index, timeline)
            if rows is not None:
                self._cache.put(key, rows, size_bytes(rows))
                metrics.EMBEDDING_CACHE_BYTES.set(self._cache.num_bytes)
            return rows
        except BaseException as error:
            flight.fail(error)
            raise
        finally:
            self._end_flight(key, flight)

    async def _brought(self, embedding: TensorValue, item_index: int, timeline: Timeline) -> torch.Tensor:
        part = self._engine.part
        with timeline.span("preprocess", item_index=item_index):
            return await asyncio.to_thread(as_rows, embedding, part.row_elements, part.dtype)

    async def _encoded(
        self, flight: _Flight, held: MultimodalDataItem, item_index: int, timeline: Timeline
    ) -> torch.Tensor | None:
        """By the tower, which writes to the slots itself. What it made is copied only for the cache, and for those whom
        it could not write to."""
        item = held.item
        with timeline.span("preprocess", item_index=item_index):
            pixels = await self._pixels_of(held)
        await points.passing_async("encoder.encode_item", item_index)
        encoded = await asyncio.wrap_future(self._engine.submit(pixels, item.grid, flight.delivery))
        if encoded.rows.shape[0] != item.num_tokens:
            raise MediaMismatch("the picture's embedding has another length than the prompt")
        timeline.add("encode", encoded.start_ns, encoded.end_ns, num_tokens=item.num_tokens, item_index=item_index)
        flight.delivered.set_result(encoded)
        if self._cache.can_keep(size_bytes(encoded.rows)):
            return await _copied(encoded.rows)
        if not encoded.delivered.issuperset(flight.waiting):
            return await asyncio.to_thread(host_rows, encoded.rows)
        return None

    def _end_flight(self, key: CacheKey, flight: _Flight) -> None:
        """Nobody joins this flight any more; a newer one under the same key stays."""
        if self._flights.get(key) is flight:
            del self._flights[key]

    async def _pixels_of(self, held: MultimodalDataItem) -> torch.Tensor:
        """(patches, patch_elements) of the item's grid."""
        part, grid = self._engine.part, held.item.grid
        if isinstance(held.feature, TensorValue):
            return await asyncio.to_thread(as_patches, held.feature, part.patch_elements)
        assert held.feature is not None
        decoded = await asyncio.wrap_future(self._pictures.submit(held.feature, part.target(grid)))
        if self._grid_of(decoded.width_px, decoded.height_px) != grid:
            raise MediaMismatch("the picture's real size is not the one in its header")
        return await asyncio.to_thread(part.patches, decoded.pixels)


async def _copied(rows: torch.Tensor) -> torch.Tensor:
    """See `own_rows`. A thread costs more than a small copy; a device's copy waits for the device."""
    if rows.device.type == "cpu" and size_bytes(rows) <= INLINE_COPY_BYTES:
        return own_rows(rows)
    return await asyncio.to_thread(own_rows, rows)


def _retrieve(task: asyncio.Task[torch.Tensor | None]) -> None:
    """A flight may fail with nobody left who waits: that is no news for the log."""
    if not task.cancelled():
        task.exception()
