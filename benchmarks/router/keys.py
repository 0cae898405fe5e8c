"""The figures by name that a run ends in. A key is null where what it needs is absent, with a note that says why."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.engine.keys import Key
from benchmarks.router.results import NOT_MEASURED, Results, percentile

CPU_TEXT, CPU_PICTURE = "cpu_ms_per_text_request", "cpu_ms_per_picture_request"
ECHO_RATIO = "req_per_s_vs_asgi_echo_200kb"
ADDED_P99 = "added_p99_ms"
VS_TURNS, VS_LEAST, ENCODES = "ttft_p50_vs_round_robin", "ttft_p50_vs_least_loaded", "encodes_per_unique_picture"
ROUTING = (VS_TURNS, VS_LEAST, ENCODES)
OVERHEAD = (CPU_TEXT, CPU_PICTURE, ECHO_RATIO, ADDED_P99)
KEYS = (*OVERHEAD, *ROUTING)

TEXT, TEXT_WHOLE = "text", "text, whole"
PICTURE, PICTURE_WHOLE = "picture", "picture, whole"
SATURATED, ECHO = "picture, saturated", "asgi echo"
ROUTED, DIRECT = "through the router", "direct"


def all_keys(results: Results) -> Mapping[str, Key]:
    values = {
        CPU_TEXT: results.median(TEXT, "cpu_ms"),
        CPU_PICTURE: results.median(PICTURE, "cpu_ms"),
        ECHO_RATIO: results.paired_ratio(SATURATED, ECHO, "req_per_s"),
        ADDED_P99: _added_p99_ms(results),
        **{name: results.routing.get(name) for name in ROUTING},
    }
    return {name: _key(results, name, value) for name, value in values.items()}


def _key(results: Results, name: str, value: float | None) -> Key:
    if value is not None:
        return Key(round(value, 3))
    return Key(None, results.notes.get(name, NOT_MEASURED))


def _added_p99_ms(results: Results) -> float | None:
    routed, direct = results.first_ms.get(ROUTED), results.first_ms.get(DIRECT)
    return percentile(routed, 0.99) - percentile(direct, 0.99) if routed and direct else None
