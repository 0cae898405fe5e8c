"""A storm over a cluster in this process: real stages, links and router, with trouble at every step of every engine.

Threads and sockets decide on the order of things here, so that a seed gives the same requests and the same trouble,
but not the same run.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from services.router.pipeline import Answer, Batch, Beside, Done
from tests.storm.poison import PoisonedPages, poison_pages
from tests.storm.reply import LogitsWitness, Reply, StormFailed
from tests.storm.trouble import Counts, Trouble
from tests.storm.wishes import Wish
from tests.storm.world import World
from tests.storm.yard import draw_chunk
from triptych.core.errors import Aborted
from triptych.core.ids import AttemptRef
from triptych.engine.loop import LanguageEngine
from triptych.model.runner import LanguageRunner
from triptych.stages import language
from triptych.stages.worker import Worker
from triptych.testing.async_runner import ThreadedRunner
from triptych.testing.cluster import InProcessCluster
from triptych.testing.holdings import until_idle

TOPOLOGIES = ("mono", "e-p-d", "e-pd", "p-d")
TURN_S = 0.004
"""How long a turn of the wishes' clock is here."""
PATIENCE_S = 30.0
IDLE_PATIENCE_S = 5.0


class Camp:
    """One storm over one cluster."""

    def __init__(self, seed: int, world: World, wishes: list[Wish]) -> None:
        self.dice = random.Random(f"camp/{seed}")
        self.world = world
        self._replies = {(wish.request_id, wish.choice): Reply(wish) for wish in wishes}
        self.counts = Counts()
        self.trouble = Trouble.draw(self.dice)
        self.witness = LogitsWitness(self._wish_of)
        self.topology = self.dice.choice(TOPOLOGIES)
        self._looks_ahead = self.dice.random() < 0.5
        self._runners: list[ThreadedRunner] = []
        self._free_pages: list[PoisonedPages] = []

    def run(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if self._looks_ahead:
                patch.setattr(language, "LanguageRunner", self._threaded)
            try:
                asyncio.run(self._run())
            finally:
                for runner in self._runners:
                    runner.close()

    @property
    def replies(self) -> list[Reply]:
        return list(self._replies.values())

    async def _run(self) -> None:
        cluster = InProcessCluster(
            self.world.model_dir, self.topology, chunk_tokens=draw_chunk(self.dice), kv_pool_bytes=0
        )
        cluster._tap = self.witness  # type: ignore[assignment]
        cluster._language |= self._settings()
        async with cluster:
            engines = [worker.language_engine for worker in cluster.workers if worker.language_engine is not None]
            for engine in engines:
                await asyncio.wrap_future(engine.call(lambda engine=engine: self._disturb(engine)))
            await self._ask_all(cluster)
            self.witness.check()
            await until_idle(cluster.workers, IDLE_PATIENCE_S)
            for engine in engines:
                await asyncio.wrap_future(engine.call(lambda engine=engine: _all_free(engine)))
            for pages in self._free_pages:
                pages.check()

    def _settings(self) -> dict[str, int]:
        kv, dice = self.world.adapter.kv_shape, self.dice
        page_tokens = dice.choice([4, 8, 16, 32])
        page_bytes = kv.num_layers * 2 * page_tokens * kv.num_kv_heads * kv.head_dim * 4
        wishes = [reply.wish for reply in self.replies]
        num_pages = 1 + max(-(-wish.plan.num_total_tokens // page_tokens) for wish in wishes)
        rows = max(sum(item.num_tokens for item in wish.plan.items) for wish in wishes)
        return {
            "page_tokens": page_tokens,
            "host_pool_bytes": dice.choice([0, num_pages // 3, 100 * num_pages]) * page_bytes,
            "kv_pool_bytes": (num_pages + dice.randint(0, 2 * num_pages)) * page_bytes,
            "landing_bytes": max(4096, (rows * self.world.row_bytes + 64 * 4) * dice.choice([1, 2, 4])),
            "min_partial_tokens": dice.choice([1, 8, 64]),
            "max_sequences": dice.choice([2, 4, 16]),
        }

    def _disturb(self, engine: LanguageEngine) -> None:
        """On the engine's thread, before the first request."""
        self._free_pages.append(poison_pages(engine.manager, engine._runner.pool))
        turn, dice = engine._turn, random.Random(self.dice.random())

        def disturbed() -> None:
            self.trouble.at_step(engine, dice, self.counts)
            turn()
            engine.manager.check_integrity()

        engine._turn = disturbed  # type: ignore[method-assign]

    def _threaded(self, *args: Any) -> ThreadedRunner:
        self._runners.append(ThreadedRunner(LanguageRunner(*args)))
        return self._runners[-1]

    # -- callers -----------------------------------------------------------------------------------------------------

    async def _ask_all(self, cluster: InProcessCluster) -> None:
        by_request: dict[str, list[Reply]] = {}
        for (request_id, _), reply in self._replies.items():
            by_request.setdefault(request_id, []).append(reply)
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
            group.create_task(self._evict_embeddings(cluster.workers))
            for replies in by_request.values():
                group.create_task(self._ask(cluster, replies))

    async def _ask(self, cluster: InProcessCluster, replies: list[Reply]) -> None:
        """One request with its choices, from its arrival to its end or until its caller leaves."""
        wish = replies[0].wish
        await asyncio.sleep(wish.arrives * TURN_S)
        stays = None if wish.is_left_after is None else wish.is_left_after * TURN_S
        try:
            async with (
                asyncio.timeout(stays),
                cluster.pipeline.answer(wish.plan, wish.prompt.media, wish.request_id) as first,
                asyncio.TaskGroup() as group,
            ):
                group.create_task(_listen(first, replies[0]))
                for reply in replies[1:]:
                    group.create_task(_ask_beside(cluster, reply, first))
        except TimeoutError:
            for reply in replies:
                if not reply.has_ended:
                    reply.failed(Aborted("the caller left"))

    async def _evict_embeddings(self, workers: list[Worker]) -> None:
        while not all(reply.has_ended for reply in self.replies):
            await asyncio.sleep(TURN_S)
            for worker in workers:
                if worker.supply is not None and self.dice.random() < 0.3:
                    worker.supply.clear()

    def _wish_of(self, ref: AttemptRef) -> Wish | None:
        reply = self._replies.get(ref.sequence_key)
        return reply.wish if reply is not None else None


async def _ask_beside(cluster: InProcessCluster, reply: Reply, first: Answer) -> None:
    wish = reply.wish
    beside = Beside(wish.choice, first)
    async with cluster.pipeline.answer(wish.plan, wish.prompt.media, wish.request_id, beside=beside) as answer:
        await _listen(answer, reply)


async def _listen(answer: Answer, reply: Reply) -> None:
    """An error is no answer that a caller who stays may get in a storm: nothing here is lost or overloaded."""
    async for event in answer.events():
        match event:
            case Batch(tokens):
                reply.heard(tokens)
            case Done(reason):
                reply.finished(reason)


def _all_free(engine: LanguageEngine) -> None:
    engine.manager.clear_cache()
    counts = engine.manager.counts()
    if counts["free"] != engine.manager.num_usable:
        raise StormFailed(f"pages that nobody holds cannot be evicted: {counts}")
