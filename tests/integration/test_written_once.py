"""An embedding is written once: when the tower's last copy is done its rows lie in the receiver's memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parity.checkpoints import DEMO_DIR
from tests.parity.prompts import draw_picture
from triptych.core.ids import new_request_id
from triptych.engine.encoder import EncodeEngine
from triptych.engine.landing import LandingTable
from triptych.obs import metrics
from triptych.stages import embeddings
from triptych.stages.worker import Worker
from triptych.testing.cluster import ChatRequest, InProcessCluster
from triptych.testing.holdings import until_idle
from triptych.transport.carrier import MemoryCarrier
from triptych.transport.slots import Slot
from triptych.transport.types import SlotGrant

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


# --- given up between grant and the end of the pass ------------------------------------------------------------------

POISON = 0xFF


class Held:
    """A place in the encoder's thread where the next one who comes is stopped."""

    def __init__(self) -> None:
        self.is_inside, self.go_on = threading.Event(), threading.Event()

    def stop(self) -> None:
        if not self.is_inside.is_set():
            self.is_inside.set()
            assert self.go_on.wait(20)

    async def is_reached(self) -> None:
        assert await asyncio.to_thread(self.is_inside.wait, 20)


def poison_what_is_freed(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> npt.NDArray[np.uint8]:
    """Returns the worker's arena of slots, none of which may be in use."""
    assert worker.landing is not None and worker.language_engine is not None
    memory = np.frombuffer(worker.landing.arena.buffer, dtype=np.uint8)
    slots = worker.language_engine.landing._book
    sound = slots._give_back

    def give_back(slot: Slot) -> None:
        memory[slot.offset : slot.offset + slots.room_bytes(slot)] = POISON
        sound(slot)

    monkeypatch.setattr(slots, "_give_back", give_back)
    memory[:] = POISON
    return memory


def hold_the_pass(engine: EncodeEngine, monkeypatch: pytest.MonkeyPatch) -> Held:
    held, sound = Held(), engine.part.encode

    def encode(*args: Any) -> Any:
        rows = sound(*args)
        held.stop()
        return rows

    monkeypatch.setattr(engine.part, "encode", encode, raising=False)
    return held


def hold_the_copy(monkeypatch: pytest.MonkeyPatch) -> Held:
    held, sound = Held(), MemoryCarrier._slot_view

    @contextmanager
    def view(carrier: MemoryCarrier, grant: SlotGrant) -> Iterator[memoryview]:
        with sound(carrier, grant) as memory:
            held.stop()
            yield memory

    monkeypatch.setattr(MemoryCarrier, "_slot_view", view)
    return held


async def read(cluster: InProcessCluster, request: ChatRequest) -> list[int]:
    ids: list[int] = []
    async with cluster.pipeline.answer(cluster.plan(request), request.media, new_request_id()) as answer:
        async for event in answer.events():
            ids += [token.id for token in getattr(event, "tokens", ())]
    return ids


@pytest.mark.parametrize("where", ["in the pass", "in the copy"])
@pytest.mark.parametrize("topology", ["e-p-d", "p-d"])
async def test_nothing_is_written_to_a_slot_after_it_was_given_back(
    topology: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client leaves while the tower works for it. Its slot is free at once, or, where the copy has begun, after it;
    the others, whose embeddings are cached, use the memory meanwhile."""
    torch.set_num_threads(1)
    others, victim = [asked(seed) for seed in (2, 5, 8)], asked(3)
    async with InProcessCluster(DEMO_DIR, topology, landing_bytes=1 << 20) as cluster:
        supply, prefill = worker_with(cluster, "supply").supply, worker_with(cluster, "landing")
        assert supply is not None and prefill.language_engine is not None
        landing = prefill.language_engine.landing
        control = [answer.token_ids for answer in await cluster.generate_many(others)]
        cluster.clear_language_caches()
        await until_idle(cluster.workers)
        memory = poison_what_is_freed(prefill, monkeypatch)
        with monkeypatch.context() as patched:
            held = hold_the_pass(supply._engine, patched) if where == "in the pass" else hold_the_copy(patched)
            leaving = asyncio.create_task(read(cluster, victim))
            try:
                await held.is_reached()
                leaving.cancel()
                await asyncio.gather(leaving, return_exceptions=True)
                async with asyncio.timeout(10):
                    while not _is_given_up(landing, is_waited_for=where == "in the copy"):  # noqa: ASYNC110
                        await asyncio.sleep(0.005)
                for _ in range(2):
                    again = [answer.token_ids for answer in await cluster.generate_many(others, concurrency=3)]
                    assert again == control
                    cluster.clear_language_caches()
                assert _is_given_up(landing, is_waited_for=where == "in the copy")
            finally:
                held.go_on.set()
        await until_idle(cluster.workers)
        cluster.clear_language_caches()
        assert landing.counts_bytes()["free"] == memory.size
        assert (memory == POISON).all(), "written after it was given back"
        after = [answer.token_ids for answer in await cluster.generate_many([*others, victim], concurrency=2)]
        assert after[:-1] == control
        del memory


def _is_given_up(landing: LandingTable, *, is_waited_for: bool) -> bool:
    """The attempt has ended at prefill, and its slot rests until its writer has, or is free already."""
    counts = landing.counts_bytes()
    return counts["owned"] == 0 and bool(counts["quarantined"]) == is_waited_for


@pytest.mark.parametrize("leaves", [False, True])
async def test_one_pass_writes_to_two_receivers_but_not_to_one_that_has_left(
    leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ask for the same picture. The second leaves while the pass copies to the first and has both on its list."""
    torch.set_num_threads(1)
    first, second = asked(4), asked(4)
    async with InProcessCluster(DEMO_DIR, "e-p-d", num_prefills=2, landing_bytes=1 << 20) as cluster:
        supply = worker_with(cluster, "supply").supply
        prefills = [worker for worker in cluster.workers if worker.landing is not None]
        assert supply is not None and len(prefills) == 2
        control = await read(cluster, first)
        cluster.clear_caches()
        await until_idle(cluster.workers)
        memories = [poison_what_is_freed(prefill, monkeypatch) for prefill in prefills]
        before, size = moved_bytes("shm"), cluster.plan(first).items[0].num_tokens * supply.row_bytes
        with monkeypatch.context() as patched:
            in_pass, in_copy = hold_the_pass(supply._engine, patched), hold_the_copy(patched)
            try:
                staying = asyncio.create_task(read(cluster, first))
                await in_pass.is_reached()
                leaving = asyncio.create_task(read(cluster, second))
                (flight,) = supply._flights.values()
                async with asyncio.timeout(20):
                    while len(flight.waiting) < 2:  # noqa: ASYNC110
                        await asyncio.sleep(0.005)
                in_pass.go_on.set()
                await in_copy.is_reached()
                if leaves:
                    leaving.cancel()
                    async with asyncio.timeout(10):
                        while sum(map(held_bytes, prefills)) >= 2 * size:  # noqa: ASYNC110
                            await asyncio.sleep(0.005)
            finally:
                in_pass.go_on.set()
                in_copy.go_on.set()
        assert await staying == control
        if not leaves:
            assert await leaving == control
        assert moved_bytes("shm") - before == size * (1 if leaves else 2)
        await until_idle(cluster.workers)
        cluster.clear_language_caches()
        assert all((memory == POISON).all() for memory in memories), "written after it was given back"
        del memories


def held_bytes(prefill: Worker) -> int:
    assert prefill.language_engine is not None
    counts = prefill.language_engine.landing.counts_bytes()
    return counts["owned"] + counts["quarantined"]
