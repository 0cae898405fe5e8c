"""A cluster in one process over a small random checkpoint, for the tests of a module.

A test module names the fixtures as its own, all three, and runs in one loop:

    pytestmark = pytest.mark.asyncio(loop_scope="module")
    model_dir, shared, epd = tiny_cluster.model_dir, tiny_cluster.shared, tiny_cluster.epd
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from tests.parity.checkpoints import DEFAULT_SEED, DEMO_DIR, make_tiny_qwen2_5_vl
from triptych.testing.cluster import InProcessCluster

MAX_TOKENS = 6
SMALL_POOL = 4 << 20


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    base = Path(os.environ.get("DEMO_MODEL_DIR") or DEMO_DIR)
    return make_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny-qwen2-5-vl"), DEFAULT_SEED, base)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(model_dir: Path) -> AsyncIterator[InProcessCluster]:
    async with InProcessCluster(model_dir, chunk_tokens=48, kv_pool_bytes=SMALL_POOL) as cluster:
        yield cluster


@pytest.fixture
def epd(shared: InProcessCluster) -> InProcessCluster:
    """One worker of each kind, with empty caches."""
    shared.clear_caches()
    return shared
