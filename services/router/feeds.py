"""Listens to the workers' feeds, and tells routing. Requests never wait for it.

in the registry ──► Watch ──► apply ──► …          gone from the registry: forgotten
                      ▲         │
                      └── a gap, or the stream ended: again, from where the index is, or anew
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import grpc

from services.router.pipeline import Workers
from services.router.routing.index import Applied
from services.router.routing.routing import Routing
from services.router.tasks import unwrapped_group
from triptych.core.errors import TriptychError
from triptych.core.ids import WorkerRef
from triptych.core.worker import WorkerInfo
from triptych.obs import metrics
from triptych.rpc import convert
from triptych.rpc.client import ChannelPool, cache_feed_stub
from triptych.wire.v1 import feed_pb2 as pb

LOOK_S: Final = 0.1
AGAIN_S: Final = 0.5
UNKNOWN_AGAIN_S: Final = 30.0
"""To a worker that knows of no feed."""

_log = logging.getLogger(__name__)


class Feeds:
    """One listener for each worker of the registry."""

    def __init__(self, registry: Workers, channels: ChannelPool, routing: Routing) -> None:
        self._registry = registry
        self._channels = channels
        self._routing = routing
        self._listening: dict[WorkerRef, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until cancelled."""
        with unwrapped_group():
            async with asyncio.TaskGroup() as group:
                while True:
                    living = {worker.ref: worker for worker in self._registry.workers()}
                    for ref, worker in living.items():
                        if ref not in self._listening:
                            self._listening[ref] = group.create_task(self._listen(worker))
                    for ref in self._listening.keys() - living.keys():
                        self._listening.pop(ref).cancel()
                    self._routing.keep(living)
                    metrics.ROUTING_FEEDS.set(sum(self._routing.index.is_synced(ref) for ref in living))
                    await asyncio.sleep(LOOK_S)

    async def _listen(self, worker: WorkerInfo) -> None:
        while True:
            pause_s = AGAIN_S
            try:
                await self._follow(worker)
                metrics.ROUTING_RESYNCS.inc()
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    pause_s = UNKNOWN_AGAIN_S
            except (TriptychError, grpc.aio.UsageError) as error:
                extra = {"worker_id": worker.worker_id, "why": str(error)}
                _log.warning("a worker's feed is not understood", extra=extra)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise  # else its channel was closed under it
            self._routing.lost_feed(worker.ref)
            await asyncio.sleep(pause_s)

    async def _follow(self, worker: WorkerInfo) -> None:
        """Until there is a gap."""
        call = cache_feed_stub(self._channels, worker).Watch(pb.WatchRequest())
        try:
            async for message in call:
                if self._routing.apply(worker.ref, convert.feed_from_proto(message)) is Applied.GAP:
                    return
        finally:
            call.cancel()
