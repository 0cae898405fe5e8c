"""Memory over many unique pictures: each is seen once, through router, media process, encoder, prefill and decode.

Caches and tables that are bounded are made small, so that they are full long before the half from which the slope is
taken: what still grows then would grow for ever.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import gc
import io
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.storm.prompts import PICTURE_BEGIN_ID, PICTURE_END_ID, Piece, Prompt, Variant
from tests.storm.world import World
from triptych.core.ids import new_request_id
from triptych.core.plan import Sampling
from triptych.core.worker import Role
from triptych.stages import attempts, landing
from triptych.stages.settings import VisionSettings
from triptych.stages.worker import WorkerPlan
from triptych.testing.cluster import InProcessCluster

PICTURES_A_REQUEST = 8
AT_ONCE = 8
SAMPLES = 20
CACHE_BYTES = 256 << 10
POOL_BYTES = 1 << 20
TABLE_ENTRIES = 256
SIDE_PX = 56

ALLOWED_BYTES_A_PICTURE = 512
NOISE_BYTES = 5 << 20

EachRequest = Callable[[InProcessCluster, Prompt], None]


class SmallCluster(InProcessCluster):
    """e-p-d, whose caches hold a few hundred pictures."""

    def __init__(self, world: World) -> None:
        super().__init__(world.model_dir, "e-p-d", kv_pool_bytes=POOL_BYTES, host_pool_bytes=POOL_BYTES)
        self._language["landing_bytes"] = CACHE_BYTES

    def _plan_of(self, worker_id: str, roles: frozenset[Role]) -> WorkerPlan:
        plan = super()._plan_of(worker_id, roles)
        if plan.vision is None:
            return plan
        return dataclasses.replace(plan, vision=VisionSettings(embedding_cache_bytes=CACHE_BYTES))


def measure(world: World, num_pictures: int, each: EachRequest = lambda cluster, prompt: None) -> list[tuple[int, int]]:
    """(pictures so far, resident bytes of this process and its children) at SAMPLES places. `each` is called after
    every request: tests leak there."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(attempts, "MAX_REMEMBERED", TABLE_ENTRIES)
        patch.setattr(landing, "MAX_EXPECTED", TABLE_ENTRIES)
        return asyncio.run(_measure(world, num_pictures, each))


async def _measure(world: World, num_pictures: int, each: EachRequest) -> list[tuple[int, int]]:
    samples: list[tuple[int, int]] = []
    a_sample = num_pictures // SAMPLES
    async with SmallCluster(world) as cluster:
        for start in range(0, num_pictures, a_sample):
            prompts = [_prompt(first) for first in range(start, start + a_sample, PICTURES_A_REQUEST)]
            await _ask_all(cluster, world, prompts, each)
            _give_back_free_memory()
            samples.append((start + a_sample, resident_bytes()))
        await asyncio.to_thread(cluster.check_integrity)
    return samples


async def _ask_all(cluster: InProcessCluster, world: World, prompts: list[Prompt], each: EachRequest) -> None:
    gate = asyncio.Semaphore(AT_ONCE)

    async def ask(prompt: Prompt) -> None:
        plan = world.plan(prompt, Sampling(max_tokens=1))
        async with gate, cluster.pipeline.answer(plan, prompt.media, new_request_id()) as answer:
            assert len([event async for event in answer.events()]) == 2, "one token, and the end"
        each(cluster, prompt)

    async with asyncio.TaskGroup() as group:
        for prompt in prompts:
            group.create_task(ask(prompt))


def _prompt(first_picture: int) -> Prompt:
    pieces: list[Piece] = [7, 8, 9]
    for number in range(first_picture, first_picture + PICTURES_A_REQUEST):
        pieces += [PICTURE_BEGIN_ID, unique_picture(number), PICTURE_END_ID]
    return Prompt(first_picture, Variant.BASE, (*pieces, 10))


def unique_picture(number: int) -> bytes:
    """A noisy square whose corner spells its number."""
    pixels = np.random.default_rng(number).integers(0, 256, (SIDE_PX, SIDE_PX, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format="PNG", compress_level=0)
    return out.getvalue()


def slope_bytes(samples: list[tuple[int, int]]) -> float:
    """Bytes that each further picture costs: least squares over the second half."""
    half = samples[len(samples) // 2 :]
    pictures, resident = np.array(half, dtype=np.float64).T
    return float(np.polyfit(pictures, resident, 1)[0])


def allowed_slope_bytes(num_pictures: int) -> float:
    """A part for each picture, far below the kilobytes that its media, its embedding or its KV have, and what the
    allocator's noise over the half of the run amounts to."""
    return ALLOWED_BYTES_A_PICTURE + NOISE_BYTES / (num_pictures // 2)


def resident_bytes() -> int:
    return sum(_rss_bytes(pid) for pid in [os.getpid(), *_children(os.getpid())])


def _give_back_free_memory() -> None:
    """What the allocator keeps for later is no growth, and its comings and goings would hide some."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]
