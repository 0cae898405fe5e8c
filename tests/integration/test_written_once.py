"""An embedding is written once: when the tower's last copy is done its rows lie in the receiver's memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parity.checkpoints import DEMO_DIR
from tests.parity.prompts import draw_picture
from triptych.engine.encoder import EncodeEngine
from triptych.obs import metrics
from triptych.stages import embeddings
from triptych.stages.worker import Worker
from triptych.testing.cluster import ChatRequest, InProcessCluster
from triptych.testing.holdings import until_idle

SIZES = [(84, 56), (112, 112), (56, 140)]


def asked(*seeds: int) -> ChatRequest:
    content = [*({"type": "image"} for _ in seeds), {"type": "text", "text": "what is this?"}]
    media = tuple(draw_picture(seed, SIZES[seed % len(SIZES)]) for seed in seeds)
    return ChatRequest([{"role": "user", "content": content}], media, max_tokens=4)


@dataclass
class Watched:
    """What torch did in the encoder's thread after each pass of the tower, and how often rows were copied for a
    cache."""

    written: list[tuple[str, int, int, str]] = field(default_factory=list)  # operation, address, bytes, whose memory
    num_own_copies: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(size for _, _, size, _ in self.written)


class Operations(TorchDispatchMode):
    """Notes every operation that is no mere view once `is_after_tower`."""

    def __init__(self, watched: Watched) -> None:
        super().__init__()
        self.watched = watched
        self.is_after_tower = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if self.is_after_tower and isinstance(result, torch.Tensor) and not function.is_view:
            name, address = str(function.overloadpacket), result.data_ptr()
            size = result.numel() * result.element_size()
            self.watched.written.append((name, address, size, memory_at(address, size)))
        return result


def memory_at(address: int, num_bytes: int) -> str:
    """The file behind those bytes of this process; empty when there is none. As the kernel has it."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            low, high = (int(end, 16) for end in line.split()[0].split("-"))
            if low <= address < high:
                assert address + num_bytes <= high
                return line.split(maxsplit=5)[5].strip() if "/" in line else ""
    return ""


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    found, sound_run, sound_copy = Watched(), EncodeEngine._run, embeddings.own_rows

    def run(engine: EncodeEngine, batch: Any) -> None:
        part, sound_encode = engine.part, engine.part.encode
        with Operations(found) as operations:

            def encode(*args: Any) -> Any:
                rows = sound_encode(*args)
                operations.is_after_tower = True
                return rows

            part.encode = encode  # type: ignore[method-assign]
            try:
                sound_run(engine, batch)
            finally:
                del part.encode

    def own_rows(rows: torch.Tensor) -> torch.Tensor:
        found.num_own_copies += 1
        return sound_copy(rows)

    monkeypatch.setattr(EncodeEngine, "_run", run)
    monkeypatch.setattr(embeddings, "own_rows", own_rows)
    return found


def worker_with(cluster: InProcessCluster, what: str) -> Worker:
    return next(worker for worker in cluster.workers if getattr(worker, what) is not None)


def moved_bytes(way: str) -> float:
    return float(metrics.EMBEDDING_TRANSFER_BYTES.labels(transport=way)._value.get())


@pytest.mark.parametrize(("topology", "way"), [("e-p-d", "shm"), ("p-d", "inproc")])
async def test_the_towers_last_copy_ends_in_the_receivers_memory(topology: str, way: str, watched: Watched) -> None:
    torch.set_num_threads(1)
    requests = [asked(0, 1), asked(2), asked(3, 4, 5)]
    async with InProcessCluster(DEMO_DIR, topology) as cluster:
        supply, landing = worker_with(cluster, "supply").supply, worker_with(cluster, "landing").landing
        assert supply is not None and landing is not None
        control = [answer.token_ids for answer in await cluster.generate_many(requests, concurrency=3)]
        cluster.clear_caches()
        supply._cache.capacity_bytes = 0
        watched.__init__()  # type: ignore[misc]
        before = moved_bytes(way)
        answers = [answer.token_ids for answer in await cluster.generate_many(requests, concurrency=3)]
        plans = [cluster.plan(request) for request in requests]
        await until_idle(cluster.workers)
        num_bytes = sum(item.num_tokens * supply.row_bytes for plan in plans for item in plan.items)
        own = np.frombuffer(landing.arena.buffer, dtype=np.uint8)
        segment = landing.arena.segment
        for name, address, size, file in watched.written:
            assert name == "aten.copy_"
            if segment is not None:
                assert file == f"/dev/shm/{segment.name}", "not in the receiver's mapping"
            else:
                assert own.ctypes.data <= address <= own.ctypes.data + own.size - size, "not in the receiver's arena"
        del own
        assert len(watched.written) == sum(len(plan.items) for plan in plans)
        assert watched.num_bytes == moved_bytes(way) - before == num_bytes
        assert watched.num_own_copies == 0
    assert answers == control


async def test_a_cached_embedding_owns_its_storage_and_is_written_once_more_for_it(watched: Watched) -> None:
    torch.set_num_threads(1)
    async with InProcessCluster(DEMO_DIR, "e-p-d") as cluster:
        supply = worker_with(cluster, "supply").supply
        assert supply is not None
        first = await cluster.generate(asked(0, 1))
        assert watched.num_own_copies == 2
        kept = [rows for rows, _ in supply._cache._entries.values()]
        assert all(rows.untyped_storage().nbytes() == rows.numel() * rows.element_size() for rows in kept)
        before, num_written = moved_bytes("shm"), len(watched.written)
        cluster.clear_language_caches()
        again = await cluster.generate(asked(0, 1))
        assert moved_bytes("shm") - before == sum(rows.numel() * rows.element_size() for rows in kept)
        assert len(watched.written) == num_written and watched.num_own_copies == 2
    assert again.token_ids == first.token_ids
