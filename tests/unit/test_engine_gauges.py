"""What an engine shows of itself, and that it shows nothing once it has ended."""

from __future__ import annotations

from prometheus_client import REGISTRY

from tests.unit.engine_house import ENCODER, ROW_BYTES, House
from triptych.core.lifecycle import Phase

ENGINE_GAUGES = (
    "triptych_kv_pages",
    "triptych_landing_bytes",
    "triptych_prefill_queue_depth",
    "triptych_prefill_running_sequences",
    "triptych_radix_pages",
    "triptych_decode_running_sequences",
    "triptych_decode_retracted_sequences",
    "triptych_host_pool_bytes",
)


def raised(*names: str) -> dict[str, float]:
    """Those of the named gauges that show anything, with their labels."""
    return {
        f"{sample.name}{sample.labels}": sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name in names and sample.value
    }


def test_gauges_of_an_engine_that_has_ended_are_at_rest() -> None:
    house = House(host_pages=20, landed_cache_bytes=64 * ROW_BYTES)
    parked = house.submit([1, 2, 3, 4, 5], max_tokens=40)
    held = house.submit([6, 7, (1, 5)], max_tokens=8)
    house.turn_until(lambda: parked.phase is Phase.DECODING)
    house.landing.hand(held.ref, 0, ENCODER)
    house.engine.retract(parked.ref)
    house.turn_until(lambda: parked.num_parked == 1)
    assert raised("triptych_kv_pages", "triptych_landing_bytes", "triptych_prefill_running_sequences")
    house.engine._stopping = True
    house.engine._loop()
    assert raised(*ENGINE_GAUGES) == {}
