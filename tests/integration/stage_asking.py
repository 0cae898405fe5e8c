"""Requests to stages that run in one process, and what is looked at in them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence

from tests.integration.tiny_cluster import MAX_TOKENS
from tests.parity.prompts import draw_picture
from triptych.core.ids import new_request_id
from triptych.core.plan import Plan
from triptych.core.timeline import TimelineEvent
from triptych.core.topology import TOPOLOGIES
from triptych.core.worker import Role, WorkerInfo
from triptych.engine.loop import LanguageEngine
from triptych.obs import metrics
from triptych.stages.embeddings import EmbeddingSupply
from triptych.testing.cluster import ChatRequest, ChatResult, InProcessCluster
from triptych.testing.holdings import until_idle


def picture(seed: int, size: tuple[int, int] = (84, 56)) -> bytes:
    return draw_picture(seed, size)


def asked(text: str, *media: bytes, max_tokens: int = MAX_TOKENS) -> ChatRequest:
    parts = [*({"type": "image"} for _ in media), {"type": "text", "text": text}]
    return ChatRequest([{"role": "user", "content": parts}], media, max_tokens)


def mixed_load(seed: int, count: int) -> list[ChatRequest]:
    """Text only, one picture, several, repeats of both."""
    rng = random.Random(seed)
    pictures = [picture(number, (28 * rng.randint(2, 5), 28 * rng.randint(2, 5))) for number in range(6)]
    return [
        asked(f"question {rng.randrange(8)}", *rng.choices(pictures, k=rng.choice([0, 1, 1, 2, 3])))
        for _ in range(count)
    ]


def engines(cluster: InProcessCluster) -> list[LanguageEngine]:
    return [worker.language_engine for worker in cluster.workers if worker.language_engine is not None]


def events(result: ChatResult, name: str) -> list[TimelineEvent]:
    return [event for event in result.timeline if event.event == name]


def supply_of(cluster: InProcessCluster) -> EmbeddingSupply:
    return next(worker.supply for worker in cluster.workers if worker.supply is not None)


async def never(*_: object) -> object:
    """Stands in for what does not come."""
    return await asyncio.get_running_loop().create_future()


async def eventually(condition: Callable[[], object], within_s: float = 8.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(0.02)


async def all_is_given_back(cluster: InProcessCluster) -> None:
    """Pages free or cached, no slot, no grant, no call that waits, within a few seconds."""
    await until_idle(cluster.workers)


# --- load -------------------------------------------------------------------------------------------------------------


WIRINGS: list[tuple[str, str | None]] = [
    *((topology, None) for topology in TOPOLOGIES),
    ("e-p-d", "zmq-ipc"),
    ("e-p-d", "zmq-tcp"),
    ("e-p-d+mono", None),
    ("e-pd+p-d", None),
]


# --- transports -------------------------------------------------------------------------------------------------------


def moved_bytes() -> dict[tuple[str, str], float]:
    """What every link of this process has moved, by kind and transport."""
    kinds = {"embedding": metrics.EMBEDDING_TRANSFER_BYTES, "kv": metrics.KV_TRANSFER_BYTES}
    return {
        (kind, transport): counter.labels(transport=transport)._value.get()
        for kind, counter in kinds.items()
        for transport in ("shm", "zmq")
    }


# --- cancellation -----------------------------------------------------------------------------------------------------


def pages_in(cluster: InProcessCluster, state: str) -> int:
    return sum(engine.call(engine.manager.counts).result(5)[state] for engine in engines(cluster))


# --- attempts ---------------------------------------------------------------------------------------------------------


def worker_of(cluster: InProcessCluster, role: Role) -> WorkerInfo:
    found = next(worker.info for worker in cluster.workers if worker.info is not None and role in worker.info.roles)
    assert found is not None
    return found


async def answer(cluster: InProcessCluster, plan: Plan, media: Sequence[bytes]) -> list[int]:
    async with cluster.pipeline.answer(plan, media, new_request_id()) as running:
        ids: list[int] = []
        async for event in running.events():
            ids += [token.id for token in getattr(event, "tokens", ())]
        return ids
