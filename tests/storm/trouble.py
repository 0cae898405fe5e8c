"""What a storm does to an engine at every step: evicts what nobody holds, and takes pages from who decodes."""

from __future__ import annotations

import random
from dataclasses import dataclass

from triptych.core.lifecycle import Phase
from triptych.core.plan import MAX_RETRACTIONS
from triptych.engine.loop import LanguageEngine
from triptych.engine.sequence import Sequence


@dataclass
class Counts:
    """What was done, over all steps."""

    turns: int = 0
    evicted_pages: int = 0
    retractions: int = 0
    replays: int = 0

    def add(self, other: Counts) -> None:
        self.turns += other.turns
        self.evicted_pages += other.evicted_pages
        self.retractions += other.retractions
        self.replays += other.replays


@dataclass(frozen=True, slots=True)
class Trouble:
    """How likely each is at a step."""

    evict: float
    retract: float
    replay: float

    @classmethod
    def draw(cls, dice: random.Random) -> Trouble:
        """At every step in three storms of four. In the fourth less often, so that caches fill and answers run beside
        one another for longer."""
        often = 1.0 if dice.random() < 0.75 else 0.25
        return cls(often, often, dice.choice([0.0, 0.02, 0.05]))

    def at_step(self, engine: LanguageEngine, dice: random.Random, counts: Counts) -> None:
        """On the engine's thread, between two steps."""
        counts.turns += 1
        if dice.random() < self.evict:
            counts.evicted_pages += shed(engine, dice.choice([1, 2, engine.manager.num_usable]))
        decoding = [each for each in engine._running if each.phase is Phase.DECODING and _may_lose_its_place(each)]
        if decoding and dice.random() < self.retract:
            counts.retractions += engine.retract(_chosen(decoding, dice).ref)
        if decoding and dice.random() < self.replay:
            counts.replays += engine.retract_for_replay(_chosen(decoding, dice).ref)


def shed(engine: LanguageEngine, count: int) -> int:
    """Evicts up to `count` pages that nobody holds, the longest unused first; returns how many."""
    pages = engine.manager.tree.evict(count)
    engine.manager._allocator.free(pages)
    return len(pages)


def _may_lose_its_place(sequence: Sequence) -> bool:
    """A full host pool turns a retraction into a replay, and of those the router allows so many."""
    return sequence.plan.num_retractions < MAX_RETRACTIONS


def _chosen(decoding: list[Sequence], dice: random.Random) -> Sequence:
    return decoding[dice.randrange(len(decoding))]
