"""From a worker's name in a message to a session with it: addresses come from the registry only."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from triptych.core.errors import DeadlineExceeded, PeerLost, ReceiverLost, TriptychError
from triptych.core.ids import WorkerRef
from triptych.core.worker import WorkerInfo
from triptych.registry.static import StaticRegistry
from triptych.rpc.client import ChannelPool
from triptych.transport.link import EmbeddingLink, KvLink
from triptych.transport.link_pool import LinkPool


@dataclass(frozen=True, slots=True)
class RegistryLinks:
    """Implements `EmbeddingLinks` and `KvLinks`."""

    registry: StaticRegistry
    pool: LinkPool
    embedding_layout: bytes
    kv_layout: bytes

    async def embedding(self, worker: WorkerRef) -> EmbeddingLink:
        return await self.pool.embedding_link(self._find(worker), self.embedding_layout)

    async def kv(self, worker: WorkerRef) -> KvLink:
        return await self.pool.kv_link(self._find(worker), self.kv_layout)

    def _find(self, worker: WorkerRef) -> WorkerInfo:
        for known in (self.registry.workers(), self.registry.refresh()):
            for info in known:
                if info.ref == worker:
                    return info
        raise PeerLost("a worker of this request has left the cluster")


TEND_EVERY_S: Final = 10.0


async def tend_peers(registry: StaticRegistry, pool: LinkPool, channels: ChannelPool) -> None:
    """Until cancelled: lets go of workers that left, of their links when those are over, and then of their channels. A
    cluster that grows and shrinks would leave one of each behind every time."""
    while True:
        living = {worker.ref for worker in registry.workers()}
        await channels.keep_only(living | pool.keep_only(living))
        with suppress(TimeoutError):
            async with asyncio.timeout(TEND_EVERY_S):  # a link may end long after its worker left
                await registry.changed()


@contextmanager
def needs_receiver() -> Iterator[None]:
    """Around what only waits for the receiver. Raises ReceiverLost where `blaming_receiver` does."""
    try:
        yield
    except (DeadlineExceeded, PeerLost) as error:
        raise blaming_receiver(error) from error


def blaming_receiver(error: TriptychError) -> TriptychError:
    """What a transfer failed with: if the receiver is gone, or silent until the link's own time is up, the fault is its
    own and not the sender's, and another receiver may do: ReceiverLost then."""
    if isinstance(error, DeadlineExceeded):
        return ReceiverLost("a worker did not answer the one that was to send to it")
    if isinstance(error, PeerLost):
        return ReceiverLost("a worker was lost to the one that was to send to it")
    return error
