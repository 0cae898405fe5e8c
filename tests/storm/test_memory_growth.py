"""20,000 unique pictures and no more memory than for the first thousands: in full, and with its narrow bound, by
`make verify-engine`. Here a few, which shows that what is measured is sound and would tell a leak."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parity.reference import one_thread
from tests.storm.growth import measure, slope_bytes
from tests.storm.prompts import Prompt
from tests.storm.world import world_of
from triptych.testing.cluster import InProcessCluster

NUM_PICTURES = 160
ALLOWED_BYTES = 400 << 10
"""A picture; so few are over before threads and allocators have all that they will ever take."""
LEAKED_BYTES = 1 << 20


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.timeout(120)
def test_memory_does_not_grow_with_unique_pictures() -> None:
    slope = slope_bytes(measure(world_of("qwen2.5-vl"), NUM_PICTURES))
    print(f"{slope:.0f} bytes a picture")
    assert slope < ALLOWED_BYTES


@pytest.mark.timeout(120)
def test_memory_growth_would_be_seen() -> None:
    """Somebody keeps something of every picture."""
    kept: list[bytearray] = []

    def leak(cluster: InProcessCluster, prompt: Prompt) -> None:
        kept.extend(bytearray(b"\1" * LEAKED_BYTES) for _ in prompt.media)

    slope = slope_bytes(measure(world_of("qwen2.5-vl"), NUM_PICTURES, leak))
    assert slope > ALLOWED_BYTES
