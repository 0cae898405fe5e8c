"""Publishes what an engine holds, once a turn."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from triptych.core.lifecycle import Phase
from triptych.engine.landing import LandingTable
from triptych.engine.sequence import Sequence
from triptych.kv.manager import CacheManager
from triptych.obs import metrics


def publish(
    stage: str,
    manager: CacheManager,
    landing: LandingTable,
    running: SequenceOf[Sequence],
    num_waiting: int,
) -> None:
    for state, count in manager.counts().items():
        metrics.KV_PAGES.labels(state).set(count)
    decoding = sum(sequence.phase is Phase.DECODING for sequence in running)
    metrics.DECODE_RUNNING.set(decoding)
    if stage != "decode":
        metrics.PREFILL_QUEUE_DEPTH.set(num_waiting)
        metrics.PREFILL_RUNNING.set(len(running) - decoding)
        metrics.RADIX_PAGES.set(manager.tree.num_pages)
        metrics.RADIX_EVICTED_PAGES.inc(manager.take_num_evicted())
        for state, num_bytes in landing.counts_bytes().items():
            metrics.LANDING_BYTES.labels(state).set(num_bytes)
