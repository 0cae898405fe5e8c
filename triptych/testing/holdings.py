"""What the workers of an in-process cluster still hold for requests: nothing, when all of them have ended.

Looks into the parts themselves, so that a test sees what no metric shows: grants, landing slots, waiting calls, what a
link has asked and not heard of, and the gauges too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from triptych.engine.loop import LanguageEngine
from triptych.obs import metrics
from triptych.stages.worker import Worker
from triptych.transport.inproc import InprocLink
from triptych.transport.link_pool import LinkPool

PATIENCE_S = 10.0
_ENGINE_WAIT_S = 5.0
_GAUGES = (
    metrics.ROUTER_QUEUE_DEPTH,
    metrics.ENCODER_QUEUE_DEPTH,
    metrics.PREFILL_QUEUE_DEPTH,
    metrics.PREFILL_RUNNING,
    metrics.DECODE_RUNNING,
    metrics.DECODE_WAITING_KV,
    metrics.DECODE_RETRACTED,
    metrics.HOST_POOL_BYTES,
    metrics.OPEN_CIRCUITS,
    metrics.EMBEDDING_IN_FLIGHT_BYTES,
    metrics.EMBEDDING_PARKED_ITEMS,
    *(metrics.KV_PAGES.labels(state) for state in ("owned", "leased", "quarantined")),
    *(metrics.LANDING_BYTES.labels(state) for state in ("owned", "quarantined")),
)


async def until_idle(workers: Sequence[Worker], patience_s: float = PATIENCE_S) -> None:
    """Waits until nothing is held, and checks that no page was lost. Raises AssertionError with what is left."""
    deadline_s = asyncio.get_running_loop().time() + patience_s
    while left := [line for worker in workers for line in holdings(worker)] + _raised_gauges():
        assert asyncio.get_running_loop().time() < deadline_s, left
        await asyncio.sleep(0.05)
    for worker in workers:
        if worker.language_engine is not None:
            engine = worker.language_engine
            await asyncio.wrap_future(engine.call(engine.manager.check_integrity))
            await asyncio.wrap_future(engine.call(engine.landing.check_integrity))


def holdings(worker: Worker) -> list[str]:
    """One line for each part that holds something. To be called on the event loop."""
    found: dict[str, object] = {}
    if worker.language_engine is not None:
        found |= worker.language_engine.call(lambda: _engine_holdings(worker)).result(_ENGINE_WAIT_S)
    if worker.decode_stage is not None:
        stage = worker.decode_stage
        found["calls"] = [*stage._answers, *stage._opening, *stage._without_kv]
    if worker.landing is not None:
        landing = worker.landing
        found["expected"] = [*landing._admissions, *landing._waiters, *landing._expected]
    if worker.supply is not None:
        found["flights"] = list(worker.supply._flights)
        found["backlog"] = len(worker.supply._engine._backlog)
    if worker.link_pool is not None:
        found["unanswered"] = list(_unanswered(worker.link_pool))
    found["background"] = len(worker._background._tasks)
    return [f"{worker.ref.worker_id}: {what} {held}" for what, held in found.items() if held]


def _engine_holdings(worker: Worker) -> dict[str, object]:
    """On the engine's thread."""
    engine = worker.language_engine
    assert engine is not None
    manager = engine.manager
    pages = {state: count for state, count in manager.counts().items() if count and state not in ("free", "cached")}
    grants = worker.decode_stage._parts.grants if worker.decode_stage is not None else ()
    return {
        "pages": pages,
        "credited": manager._num_credited,
        "locks": sum(node.locks for node in manager.tree.nodes()),
        "grants": len(grants),
        "slots": len(engine.landing),
        "sequences": _num_sequences(engine),
        "host pool": engine.host_pool_bytes,
    }


def _num_sequences(engine: LanguageEngine) -> int:
    return len(engine._living) + len(engine._running) + engine.num_waiting


def _unanswered(pool: LinkPool) -> Iterator[object]:
    """An abort counts until it is acknowledged, a link until it is made or has failed."""
    for connecting in pool._links.values():
        if not connecting.done():
            yield "a link that is being made"
        elif not connecting.cancelled() and connecting.exception() is None:
            link = connecting.result()
            yield from link._aborts if isinstance(link, InprocLink) else link._session._outstanding.values()


def _raised_gauges() -> list[str]:
    """The workers of one process share them, and each sets all it has to say every turn: idle, they are zero."""
    return [str(gauge) for gauge in _GAUGES if next(iter(gauge.collect())).samples[0].value]
