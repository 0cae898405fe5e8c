"""Pages and slots that were given back are poisoned in clusters of tests, and no answer knows: also where everything is
used again at once. A worker that reads what it gave back is found out."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest

from tests.integration import tiny_cluster
from tests.integration.answers import assert_same_answers
from tests.parity.prompts import draw_picture
from tests.storm.faults import FAULTS
from triptych.core.errors import TriptychError
from triptych.testing.cluster import ChatRequest, InProcessCluster
from triptych.testing.holdings import until_idle

model_dir = tiny_cluster.model_dir

SMALL = {"chunk_tokens": 16, "kv_pool_bytes": 1 << 20, "landing_bytes": 96 << 10, "capture_logits": True}
"""Little enough that what one request gives back is the next one's."""


def asked(number: int, size: tuple[int, int] = (112, 84)) -> ChatRequest:
    rng = random.Random(number)
    media = tuple(draw_picture(rng.randrange(50), size) for _ in range(1 + number % 2))
    content = [*({"type": "image"} for _ in media), {"type": "text", "text": f"say {number}"}]
    return ChatRequest([{"role": "user", "content": content}], media, max_tokens=6)


@pytest.mark.parametrize("topology", ["e-p-d", "e-pd"])
async def test_no_answer_knows_that_memory_is_poisoned(model_dir: Path, topology: str) -> None:
    requests = [asked(number) for number in range(8)]
    async with InProcessCluster(model_dir, topology, poison_freed=False, **SMALL) as plain:
        expected = await plain.generate_many(requests)
    async with InProcessCluster(model_dir, topology, **SMALL) as cluster:
        answers = await cluster.generate_many(requests, concurrency=4)
        await until_idle(cluster.workers)
    assert_same_answers(expected, [answer.token_ids for answer in answers])
    assert all(np.isfinite(answer.logits).all() for answer in answers)


@pytest.mark.parametrize("fault", ["slot returned too early"])
async def test_a_worker_that_reads_what_it_gave_back_is_found_out(model_dir: Path, fault: str) -> None:
    """Without poison the bytes would still be there, and nobody would notice."""
    request = asked(1, (280, 224))  # more rows than a chunk has tokens
    async with InProcessCluster(model_dir, "e-pd", **SMALL) as cluster:
        for worker in cluster.workers:
            if worker.language_engine is not None:
                worker.language_engine.landing._cache.capacity_bytes = 0  # what is given back is freed, not kept
        with FAULTS[fault].planted():
            try:
                async with asyncio.timeout(30):
                    answer = await cluster.generate(request)
            except TriptychError:
                return
        assert not np.isfinite(answer.logits).all()
