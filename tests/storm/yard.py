"""A storm over one engine that is turned by hand: the real model, real pages and slots, everything else by dice.

The encoder is a cache of embeddings in front of the tower, and writers that write into landing slots when the dice say
so: also late, when the attempt that the slot was for has ended. All of it is a function of the seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from tests.storm.device import DicedRunner
from tests.storm.poison import PoisonedSlots, poison_pages
from tests.storm.reply import LogitsWitness, Reply, StormFailed
from tests.storm.strangers import Strangers
from tests.storm.trouble import Counts, Trouble
from tests.storm.wishes import Wish
from tests.storm.world import World
from triptych.core.clock import ManualClock
from triptych.core.errors import Aborted, TriptychError
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.lifecycle import Phase
from triptych.core.plan import EmbeddingSource, FinishReason, Token
from triptych.core.timeline import Timeline
from triptych.engine.landing import LandingTable
from triptych.engine.loop import EngineLimits, LanguageEngine, missing_items
from triptych.kv.manager import CacheManager
from triptych.kv.pool import PoolShape
from triptych.mm.embedding_cache import CacheKey, EmbeddingCache
from triptych.model.runner import LanguageRunner
from triptych.sched.language import StepBudget
from triptych.stages.sequences import new_sequence, rows_view
from triptych.transport.slots import Slot

WRITERS = tuple(WorkerRef(f"encoder-{i}", 1) for i in range(2))
MOST_TURNS = 4000
SLOT_BYTES = 64
SCRIBBLE = 1e6
"""What a writer leaves that writes too late."""


@dataclass
class Job:
    """One wish on its way: the attempt under way, whether it has to be replayed, and what it heard that was wrong (an
    engine takes no notice of what those raise who listen to it)."""

    wish: Wish
    reply: Reply
    ref: AttemptRef
    num_replays: int = 0
    is_to_repeat: bool = False
    complaints: list[StormFailed] = field(default_factory=list)

    # -- a SequenceSink ----------------------------------------------------------------------------------------------

    def admitted(self, cached_tokens: int) -> None: ...
    def decoding(self) -> None: ...

    def tokens(self, tokens: SequenceOf[Token]) -> None:
        with self._noting():
            self.reply.heard(tokens)

    def handed_off(self, token: Token, num_bytes: int) -> None:
        self.tokens([token])

    def finished(self, reason: FinishReason) -> None:
        with self._noting():
            self.reply.finished(reason)

    def retracted(self) -> None:
        self.is_to_repeat = True

    def failed(self, error: TriptychError) -> None:
        with self._noting():
            self.reply.failed(error)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except StormFailed as complaint:
            self.complaints.append(complaint)


@dataclass(frozen=True, slots=True)
class Errand:
    """A slot that was handed to a writer, who has not written yet."""

    job: Job
    ref: AttemptRef
    item_index: int
    writer: WorkerRef
    slot: Slot


class Yard:
    """One storm over one engine. `run` raises StormFailed, or an AssertionError of the engine's own."""

    def __init__(self, seed: int, world: World, wishes: list[Wish]) -> None:
        self.dice = random.Random(f"yard/{seed}")
        self.world = world
        self.jobs = [Job(wish, Reply(wish), AttemptRef(wish.request_id, wish.choice)) for wish in wishes]
        self.counts = Counts()
        self.trouble = Trouble.draw(self.dice)
        self.witness = LogitsWitness(self._wish_of)
        self.clock = ManualClock()
        self._errands: list[Errand] = []
        self._haste = self.dice.choice([0.1, 0.3, 0.8])
        self._build()

    def _build(self) -> None:
        dice, kv = self.dice, self.world.adapter.kv_shape
        page_tokens, chunk = dice.choice([4, 8, 16, 32]), draw_chunk(dice)
        num_pages = 1 + max(-(-job.wish.plan.num_total_tokens // page_tokens) for job in self.jobs)
        num_pages += dice.randint(0, 2 * num_pages)
        arena_bytes = max(self._landing_bytes(job.wish) for job in self.jobs) * dice.choice([1, 2, 4]) + SLOT_BYTES
        shape = PoolShape(kv.num_layers, num_pages, page_tokens, kv.num_kv_heads, kv.head_dim)
        pool = torch.zeros(shape.dims)
        runner = LanguageRunner(self.world.language, pool, page_tokens, self.world.adapter.lookup_id)
        self.manager = CacheManager(num_pages, page_tokens)
        self.free_pages = poison_pages(self.manager, pool)
        self.strangers = Strangers(dice, self.manager, pool)
        self.book = PoisonedSlots(memoryview(bytearray(arena_bytes)))
        self.cache: EmbeddingCache[torch.Tensor] = EmbeddingCache(dice.choice([1, 8, 64]) * 4096)
        budget = StepBudget(chunk + dice.randint(0, 64), chunk, dice.choice([1, 8, 64]))
        host_pool_bytes = dice.choice([0, num_pages // 3, 100 * num_pages]) * runner.page_bytes
        max_sequences = dice.choice([2, 4, 16])
        limits = EngineLimits(budget, max_sequences, len(self.jobs), self.world.row_bytes, host_pool_bytes)
        device = DicedRunner(runner, dice) if dice.random() < 0.5 else runner
        self.engine = LanguageEngine(
            device,  # type: ignore[arg-type]
            self.manager,
            LandingTable(self.book, dice.choice([0, 0, arena_bytes])),
            limits,
            self.clock,
            "prefill",
            self.witness,
        )

    def run(self) -> None:
        for turn in range(MOST_TURNS):
            self._arrivals(turn)
            self._writers()
            self.strangers.at_step()
            self.trouble.at_step(self.engine, self.dice, self.counts)
            self.engine.post(lambda: None)  # so that an idle turn does not wait for news
            self.engine._turn()
            self.clock.advance_s(self.dice.choice([0.001, 0.001, 0.02, 1.0]))
            self.manager.check_integrity()
            self.witness.check()
            self.book.check()
            self._check_replies()
            if all(job.reply.has_ended for job in self.jobs):
                return self._quiet()
        raise StormFailed(f"never ended: {[str(job.wish) for job in self.jobs if not job.reply.has_ended]}")

    def _check_replies(self) -> None:
        for job in self.jobs:
            if job.complaints:
                raise job.complaints[0]
            if type(job.reply.error) is TriptychError:
                raise StormFailed(f"{job.wish}: the engine met a bug")

    # -- callers -----------------------------------------------------------------------------------------------------

    def _arrivals(self, turn: int) -> None:
        for job in self.jobs:
            wish = job.wish
            if turn == wish.arrives:
                self._submit(job)
            if job.is_to_repeat:
                self._replay(job)
            if wish.is_left_after is not None and self._leaves(job, turn - wish.arrives):
                self.engine.abort(job.ref, Aborted("the caller left"))

    def _leaves(self, job: Job, num_turns: int) -> bool:
        """Callers that leave like to do so while an embedding is on its way."""
        is_awaited = any(errand.job is job for errand in self._errands) and self.dice.random() < 0.3
        return is_awaited or num_turns == job.wish.is_left_after

    def _replay(self, job: Job) -> None:
        """As the router does: another attempt, with what was answered so far."""
        job.is_to_repeat, job.num_replays = False, job.num_replays + 1
        job.ref = AttemptRef(job.ref.request_id, job.ref.choice, job.ref.attempt + 1)
        self._submit(job)

    def _submit(self, job: Job) -> None:
        plan = replace(job.wish.plan, answer_ids=job.reply.ids, num_retractions=job.num_replays)
        timelines = Timeline("prefill", "yard", self.clock), Timeline("decode", "yard", self.clock)
        self.engine.submit(new_sequence(job.ref, plan, self.world.adapter, job, *timelines))

    # -- encoders ----------------------------------------------------------------------------------------------------

    def _writers(self) -> None:
        """Some items are handed to a writer, some writers write; any of them may find that its attempt has ended."""
        for job in self.jobs:
            sequence = self.engine.find(job.ref)
            if sequence is None or sequence.phase is not Phase.RUNNING:
                continue
            for index in missing_items(sequence):
                is_given = any((errand.ref, errand.item_index) == (job.ref, index) for errand in self._errands)
                if not is_given and self.dice.random() < 0.5:
                    writer = self.dice.choice(WRITERS)
                    slot = self.engine.landing.hand(job.ref, index, writer)
                    self._errands.append(Errand(job, job.ref, index, writer, slot))
        if self.dice.random() < 0.3:
            self.cache.evict(self.dice.choice([0, self.cache.num_bytes // 2]))
        due = [errand for errand in self._errands if self.dice.random() < self._haste]
        self._errands = [errand for errand in self._errands if errand not in due]
        for errand in due:
            self._write(errand)

    def _write(self, errand: Errand) -> None:
        landing, slot = self.engine.landing, errand.slot
        view = self.book.arena[slot.offset : slot.offset + slot.num_bytes]
        sequence = self.engine.find(errand.ref)
        if sequence is None or errand.item_index not in missing_items(sequence):
            np.frombuffer(view, np.float32)[:] = SCRIBBLE
            landing.writer_done_with(errand.writer, slot.slot_id)
            return
        rows = self._embedding(errand)
        view[:] = rows.view(torch.uint8).numpy().data.cast("B")
        landing.check(errand.ref, errand.item_index, errand.writer, slot.slot_id, slot.generation, slot.capability)
        landed = rows_view(view, rows.shape[0], torch.float32)
        self.engine.land(errand.ref, errand.item_index, landed, EmbeddingSource.REMOTE)

    def _embedding(self, errand: Errand) -> torch.Tensor:
        """As an encoder has it: from its cache, or from the tower."""
        item = errand.job.wish.plan.items[errand.item_index]
        key = CacheKey.of(item, "float32")
        rows = self.cache.get(key)
        if rows is None:
            rows = self.world.rows(errand.job.wish.prompt.media[errand.item_index])
            self.cache.put(key, rows, rows.numel() * rows.element_size())
        return rows

    # -- afterwards --------------------------------------------------------------------------------------------------

    def _quiet(self) -> None:
        """Everything is given back, but for what is cached."""
        for errand in self._errands:
            self._write(errand)
        self._errands.clear()
        self.strangers.end()
        for _ in range(2):  # the step under way, and what waits for it
            self.engine.post(lambda: None)
            self.engine._turn()
        self._check_replies()
        self.manager.check_integrity()
        left = held_by(self.engine)
        self.engine.landing.check_integrity()
        self.engine.landing.clear_cache()
        if self.book.free_bytes != self.book.capacity_bytes:
            left["slots"] = self.engine.landing.counts_bytes()
        if left:
            raise StormFailed(f"still held after the end: {left}")
        self.manager.clear_cache()
        self.free_pages.check()
        if self.manager.counts()["free"] != self.manager.num_usable:
            raise StormFailed(f"pages that nobody holds cannot be evicted: {self.manager.counts()}")

    @property
    def replies(self) -> list[Reply]:
        return [job.reply for job in self.jobs]

    def _wish_of(self, ref: AttemptRef) -> Wish | None:
        return next(job.wish for job in self.jobs if job.ref.sequence_key == ref.sequence_key)

    def _landing_bytes(self, wish: Wish) -> int:
        sizes = [item.num_tokens * self.world.row_bytes for item in wish.plan.items]
        return sum(-(-size // SLOT_BYTES) * SLOT_BYTES for size in sizes)


def draw_chunk(dice: random.Random) -> int:
    """Tokens: 16 to 512, the small ones more often, since they cut more."""
    return dice.randint(16, dice.choice([24, 64, 512]))


def held_by(engine: LanguageEngine) -> dict[str, object]:
    """What an engine has that no request of its own should have any more."""
    pages = {state: count for state, count in engine.manager.counts().items() if state not in ("free", "cached")}
    found: dict[str, object] = {state: count for state, count in pages.items() if count}
    found["credited"] = engine.manager._num_credited
    found["locks"] = sum(node.locks for node in engine.manager.tree.nodes())
    found["slots"] = len(engine.landing)
    found["sequences"] = len(engine._living) + len(engine._running) + engine.num_waiting
    found["host_pool_bytes"] = engine.host_pool_bytes
    return {name: held for name, held in found.items() if held}
