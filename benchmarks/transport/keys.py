"""The figures by name that a run ends in. A key is null where an arm of it is absent, with a note that says why."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.engine.keys import Key
from benchmarks.transport.cells import COMPARISONS, Comparison
from benchmarks.transport.results import NOT_MEASURED, Results

EXPOSED, SHARE, HIDDEN = "handoff_exposed_ms", "handoff_share_of_ttft", "kv_hidden_share_throttled"
OF_CLUSTERS = (EXPOSED, SHARE, HIDDEN)
KEYS = (*COMPARISONS, *OF_CLUSTERS)


def all_keys(results: Results) -> Mapping[str, Key]:
    return {
        **{name: _compared(results, comparison) for name, comparison in COMPARISONS.items()},
        **{name: _of_cluster(results, name) for name in OF_CLUSTERS},
    }


def _compared(results: Results, comparison: Comparison) -> Key:
    if comparison.base is None:
        turn = results.of(comparison.arm, comparison.num_bytes)
        value = None if turn is None else round(1e6 * turn.round_trip_s, 1)
    else:
        ratio = results.speed_over(comparison)
        value = None if ratio is None else round(ratio, 3)
    if value is not None:
        return Key(value)
    absent = [arm for arm in comparison.arms if results.of(arm, comparison.num_bytes) is None]
    reasons = "; ".join(f"no {arm}: {results.why_missing(arm)}" for arm in absent)
    return Key(None, reasons or "its two arms were measured in no round together")


def _of_cluster(results: Results, name: str) -> Key:
    handoff, hidden = results.handoff, results.hidden
    values = {
        EXPOSED: handoff and round(handoff.exposed_ms, 2),
        SHARE: handoff and round(handoff.share, 4),
        HIDDEN: hidden and round(hidden.share, 3),
    }
    if values[name] is not None:
        return Key(values[name])
    return Key(None, results.notes.get(name, NOT_MEASURED))
