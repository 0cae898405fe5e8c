"""The transports between stages in one process: all give the same answers, and what is damaged or cut is an error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration import tiny_cluster
from tests.integration.stage_asking import all_is_given_back, asked, moved_bytes, picture
from tests.integration.tiny_cluster import SMALL_POOL
from triptych.core.errors import (
    TriptychError,
)
from triptych.testing.cluster import InProcessCluster
from triptych.transport import zmq_carrier
from triptych.transport.data_frame import DataHeader
from triptych.transport.pages import MappedPages
from triptych.transport.types import ArenaKind
from triptych.transport.zmq_carrier import ZmqPageWriter

pytestmark = pytest.mark.asyncio(loop_scope="module")
model_dir, shared, epd = tiny_cluster.model_dir, tiny_cluster.shared, tiny_cluster.epd


# --- transports -------------------------------------------------------------------------------------------------------


async def test_every_transport_gives_the_tokens_and_logits_of_shared_memory(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames smaller than a page, and a link that is congested by every chunk."""
    monkeypatch.setattr(zmq_carrier, "MAX_PAYLOAD_BYTES", 1000)
    monkeypatch.setattr(zmq_carrier, "CONGESTED_BYTES", 1)
    requests = [asked(f"q{n}", picture(n), picture(n + 1)) for n in range(4)]
    results = {}
    for transport, label in (("shm", "shm"), ("auto", "shm"), ("zmq-ipc", "zmq"), ("zmq-tcp", "zmq")):
        before = moved_bytes()
        async with InProcessCluster(
            model_dir, chunk_tokens=16, kv_pool_bytes=SMALL_POOL, transport=transport, capture_logits=True
        ) as cluster:
            arenas = [worker._transfer._receivers.arena(kind) for worker in cluster.workers for kind in ArenaKind]
            has_segments = {arena.segment is not None for arena in arenas if arena is not None}
            assert has_segments == {label == "shm"}, "only shm needs /dev/shm"
            results[transport] = await cluster.generate_many(requests, concurrency=4)
            await all_is_given_back(cluster)
        moved = {key for key, count in moved_bytes().items() if count > before[key]}
        assert moved == {("embedding", label), ("kv", label)}
    for other in ("auto", "zmq-ipc", "zmq-tcp"):
        assert [result.token_ids for result in results[other]] == [result.token_ids for result in results["shm"]]
        for ours, theirs in zip(results[other], results["shm"], strict=True):
            assert ours.logits == pytest.approx(theirs.logits, abs=1e-4)


@pytest.mark.parametrize("transport", ["shm", "zmq-tcp"])
async def test_kv_that_lands_in_a_mirror_reaches_the_pool_that_is_computed_with(
    model_dir: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a GPU: the arena is host memory, and committed pages are copied to where the engine reads them."""
    requests = [asked(f"q{n}", picture(n)) for n in range(4)]
    answers = []
    for is_host_memory in (True, False):
        monkeypatch.setattr("triptych.stages.worker._is_host_memory", lambda _, answer=is_host_memory: answer)
        async with InProcessCluster(model_dir, kv_pool_bytes=SMALL_POOL, transport=transport) as cluster:
            answers.append([result.token_ids for result in await cluster.generate_many(requests, concurrency=4)])
            await all_is_given_back(cluster)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("transport", ["shm", "zmq-tcp"])
async def test_a_commit_that_covers_less_than_the_prompt_is_refused(
    model_dir: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill hands over all pages but the last, and says truly how many bytes that were."""
    request, copied = (
        asked("a prompt of more than one page", picture(1)),
        MappedPages if transport == "shm" else ZmqPageWriter,
    )
    sound = copied.copy

    def all_but_the_last(writer: Any, pages: Sequence[int], first: int) -> int:
        return sound(writer, pages[:-1], first)

    async with InProcessCluster(model_dir, kv_pool_bytes=SMALL_POOL, transport=transport) as cluster:
        control = await cluster.generate(request)
        with monkeypatch.context() as patched:
            patched.setattr(copied, "copy", all_but_the_last)
            with pytest.raises(TriptychError):
                await cluster.generate(request)
        await all_is_given_back(cluster)
        assert (await cluster.generate(request)).token_ids == control.token_ids


async def test_bytes_that_the_network_damages_are_an_error_and_never_an_answer(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.transport.landings.STALLED_S", 0.2)
    sound = zmq_carrier.pack

    def damaged(header: DataHeader, payload: memoryview) -> bytes:
        raw = bytearray(sound(header, payload))
        raw[-1] ^= 1
        return bytes(raw)

    async with InProcessCluster(model_dir, chunk_tokens=48, kv_pool_bytes=SMALL_POOL, transport="zmq-tcp") as cluster:
        for request in (asked("what is it?", picture(1)), asked("only text")):  # embedding and KV; KV alone
            control = await cluster.generate(request)
            cluster.clear_caches()
            with monkeypatch.context() as patched:
                patched.setattr(zmq_carrier, "pack", damaged)
                with pytest.raises(TriptychError):
                    await cluster.generate(request)
            await all_is_given_back(cluster)
            assert (await cluster.generate(request)).token_ids == control.token_ids
            cluster.clear_caches()
