"""20,000 unique pictures and no more memory than for the first thousands: in full by `make verify-engine`, here a few
hundred, with a bound that allows for the noise of so few."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parity.reference import one_thread
from tests.storm.growth import allowed_slope_bytes, measure, slope_bytes
from tests.storm.prompts import Prompt
from tests.storm.world import world_of
from triptych.testing.cluster import InProcessCluster

NUM_PICTURES = 160


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.timeout(120)
def test_memory_does_not_grow_with_unique_pictures() -> None:
    slope = slope_bytes(measure(world_of("qwen2.5-vl"), NUM_PICTURES))
    print(f"{slope:.0f} bytes a picture")
    assert slope < allowed_slope_bytes(NUM_PICTURES)


@pytest.mark.timeout(120)
def test_memory_growth_would_be_seen() -> None:
    """Somebody keeps 128 KiB for every picture."""
    kept: list[bytearray] = []

    def leak(cluster: InProcessCluster, prompt: Prompt) -> None:
        kept.extend(bytearray(b"\1" * (128 << 10)) for _ in prompt.media)

    slope = slope_bytes(measure(world_of("qwen2.5-vl"), NUM_PICTURES, leak))
    assert slope > allowed_slope_bytes(NUM_PICTURES)
