"""Publishes what an engine holds, once a turn, and nothing more once it has ended."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from triptych.core.cache_feed import WorkerLoad
from triptych.core.lifecycle import Phase
from triptych.core.rate import RateMeter
from triptych.engine.landing import LandingTable
from triptych.engine.retraction import Retraction
from triptych.engine.sequence import Sequence
from triptych.kv.manager import CacheManager
from triptych.obs import metrics


def publish(
    stage: str,
    manager: CacheManager,
    landing: LandingTable,
    running: SequenceOf[Sequence],
    num_waiting: int,
    retraction: Retraction,
) -> None:
    for state, count in manager.counts().items():
        metrics.KV_PAGES.labels(state).set(count)
    decoding = sum(sequence.phase is Phase.DECODING for sequence in running)
    metrics.DECODE_RUNNING.set(decoding)
    metrics.DECODE_RETRACTED.set(retraction.num_waiting)
    metrics.HOST_POOL_BYTES.set(retraction.host_pool_bytes)
    metrics.RADIX_PAGES.set(manager.tree.num_pages)
    metrics.RADIX_EVICTED_PAGES.inc(manager.take_num_evicted())
    if stage != "decode":
        metrics.PREFILL_QUEUE_DEPTH.set(num_waiting)
        metrics.PREFILL_RUNNING.set(len(running) - decoding)
        for state, num_bytes in landing.counts_bytes().items():
            metrics.LANDING_BYTES.labels(state).set(num_bytes)


def load_of(living: Iterable[Sequence], manager: CacheManager, rate: RateMeter) -> WorkerLoad:
    """What routers are told. A prompt that waits for its reservation counts as a whole."""
    waiting_tokens = num_decoding = 0
    for sequence in living:
        if sequence.phase is Phase.DECODING:
            num_decoding += 1
        else:
            waiting_tokens += max(sequence.num_known - sequence.num_computed, 0)
    return WorkerLoad(
        waiting_tokens=waiting_tokens,
        free_pages=max(manager.num_available, 0),
        num_decoding=num_decoding,
        tokens_per_s=rate.per_s,
    )


def withdraw(stage: str, manager: CacheManager, landing: LandingTable) -> None:
    """The engine has ended: all that `publish` sets is at rest, as in a process that never had one."""
    for state in manager.counts():
        metrics.KV_PAGES.labels(state).set(0)
    for gauge in (metrics.DECODE_RUNNING, metrics.DECODE_RETRACTED, metrics.HOST_POOL_BYTES, metrics.RADIX_PAGES):
        gauge.set(0)
    if stage != "decode":
        for gauge in (metrics.PREFILL_QUEUE_DEPTH, metrics.PREFILL_RUNNING):
            gauge.set(0)
        for state in landing.counts_bytes():
            metrics.LANDING_BYTES.labels(state).set(0)
