"""The worker's feed: its caches' journal and its load, streamed to whoever listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc

from triptych.core.cache_feed import FeedMessage, WorkerLoad
from triptych.kv.journal import Journal
from triptych.rpc import convert
from triptych.rpc.errors import AbortOnError
from triptych.wire.v1 import feed_pb2 as pb
from triptych.wire.v1 import feed_pb2_grpc

CUT_S: Final = 0.05
"""From one batch to the next, where there is any news. Of what it sent itself a router knows at once."""


class FeedStage(feed_pb2_grpc.CacheFeedServicer):
    """Publisher of one worker's journal. `run` cuts it into batches until cancelled; a listener that is slow holds up
    nobody, and begins anew when its place in the journal is gone."""

    def __init__(self, journal: Journal, load: Callable[[], WorkerLoad]) -> None:
        self._journal = journal
        self._load = load
        self._news = asyncio.Event()

    async def run(self) -> None:
        while True:
            if self._journal.cut(self._load()):
                self._news.set()
                self._news = asyncio.Event()
            await asyncio.sleep(CUT_S)

    async def Watch(  # noqa: N802 - the name in the proto
        self, request: pb.WatchRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.WatchResponse]:
        async with AbortOnError(context):
            sequence = request.after_sequence if request.HasField("after_sequence") else None
            while True:
                news = self._news
                for message in self._after(sequence):
                    yield convert.feed_to_proto(message)
                    sequence = message.sequence
                await news.wait()

    def _after(self, sequence: int | None) -> list[FeedMessage]:
        batches = None if sequence is None else self._journal.since(sequence)
        return self._journal.snapshot() if batches is None else batches
