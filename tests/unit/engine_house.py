"""An engine that is turned by hand, over a language model that can be computed in the head."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch

from triptych.core.clock import Clock, SystemClock
from triptych.core.errors import (
    TriptychError,
)
from triptych.core.expansion import expand
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.plan import EmbeddingSource, FinishReason, Grid, Item, Modality, Plan, Sampling, Token, TokenRange
from triptych.core.timeline import Timeline
from triptych.engine.landing import LandingTable
from triptych.engine.loop import EngineLimits, LanguageEngine
from triptych.engine.sequence import Sequence
from triptych.kv.manager import CacheManager
from triptych.mm.mrope import mrope_positions
from triptych.mm.sentinels import item_sentinels
from triptych.sched.language import StepBudget
from triptych.stages.sequences import with_answer
from triptych.testing.fake_runner import FakeRunner, expected_answer
from triptych.transport.slots import SlotAllocator

PAGE = 4
ROW_BYTES = 64
ENCODER = WorkerRef("encoder-0", 1)
PLACEHOLDER = 7


@dataclass
class Listener:
    """A sink that remembers, also what it should not have heard: an engine takes no notice of what a sink raises."""

    story: list[str] = field(default_factory=list)
    tokens_seen: list[Token] = field(default_factory=list)
    error: TriptychError | None = None
    reason: FinishReason | None = None
    cached: int | None = None
    num_bytes: int | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    complaints: list[str] = field(default_factory=list)

    def admitted(self, cached_tokens: int) -> None:
        self._tell("admitted")
        self.cached = cached_tokens

    def tokens(self, tokens: SequenceOf[Token]) -> None:
        self._tell("tokens")
        self.tokens_seen += tokens

    def handed_off(self, token: Token, num_bytes: int) -> None:
        self._tell("handed_off")
        self.tokens_seen.append(token)
        self.num_bytes = num_bytes

    def decoding(self) -> None:
        self._tell("decoding")

    def finished(self, reason: FinishReason) -> None:
        self._tell("finished")
        self.reason = reason
        self.ended.set()

    def retracted(self) -> None:
        self._tell("retracted")
        self.ended.set()

    def failed(self, error: TriptychError) -> None:
        self._tell("failed")
        self.error = error
        self.ended.set()

    def _tell(self, what: str) -> None:
        if self.ended.is_set():
            self.complaints.append(f"heard {what!r} after the end")
        self.story.append(what)

    @property
    def ids(self) -> list[int]:
        assert [token.index for token in self.tokens_seen] == list(range(len(self.tokens_seen)))
        return [token.id for token in self.tokens_seen]


@dataclass
class PoolOfAnother:
    """A decode worker's pages: what the handoff wrote, by its place in the grant."""

    source: FakeRunner
    pages: dict[int, list[float | None]] = field(default_factory=dict)
    copies: int = 0

    is_congested = False

    def copy(self, pages: SequenceOf[int], first: int) -> int:
        self.copies += 1
        for place, page in enumerate(pages, first):
            self.pages[place] = [self.source.cells.get((page, offset)) for offset in range(PAGE)]
        return 100 * len(pages)

    def values(self, count: int) -> list[float | None]:
        return [value for place in sorted(self.pages) for value in self.pages[place]][:count]


class House:
    """An engine that is turned by hand (its thread is not started), with everything it owns in reach."""

    def __init__(
        self,
        num_pages: int = 60,
        arena_bytes: int = 64 * ROW_BYTES,
        max_tokens: int = 100,
        max_chunk: int = 50,
        min_partial: int = 1,
        max_sequences: int = 16,
        max_waiting: int = 16,
        clock: Clock | None = None,
        row_bytes: int = ROW_BYTES,
        runner: FakeRunner | None = None,
        host_pages: int = 0,
        landed_cache_bytes: int = 0,
    ) -> None:
        self.runner = runner or FakeRunner(PAGE)
        self.manager = CacheManager(num_pages, PAGE)
        self.book = SlotAllocator(arena_bytes)
        self.landing = LandingTable(self.book, landed_cache_bytes)
        budget = StepBudget(max_tokens, max_chunk, min_partial)
        host_pool_bytes = host_pages * self.runner.page_bytes
        limits = EngineLimits(budget, max_sequences, max_waiting, row_bytes, host_pool_bytes)
        clock = clock or SystemClock()
        self.engine = LanguageEngine(self.runner, self.manager, self.landing, limits, clock, "prefill")
        self.serial = 0
        self.position_delta: int | None = None  # None: that of the prompt

    def new(
        self,
        prompt: SequenceOf[int | tuple[int, int]],
        max_tokens: int = 3,
        stop: frozenset[int] = frozenset(),
        needs_handoff: bool = False,
        salt: bytes = b"",
        repetition_penalty: float = 1.0,
        answer: SequenceOf[int] = (),
        num_retractions: int = 0,
    ) -> Sequence:
        """`prompt`: text ids, and (item number, rows) for a picture. `answer`: of a replay, what is out already."""
        self.serial += 1
        compact: list[int] = []
        items: list[Item] = []
        offset = 0
        for piece in prompt:
            if isinstance(piece, tuple):
                number, rows = piece
                run = TokenRange(len(compact), offset, rows)
                items.append(Item(Modality.IMAGE, bytes([number]) * 32, rows, (run,), Grid(1, 1, rows)))
                compact.append(PLACEHOLDER)
                offset += rows
            else:
                compact.append(piece)
                offset += 1
        plan = Plan(
            tuple(compact),
            tuple(items),
            Sampling(max_tokens, stop_token_ids=stop, repetition_penalty=repetition_penalty),
            60.0,
            salt,
            answer_ids=tuple(answer),
            num_retractions=num_retractions,
        )
        ids = expand(compact, items, [item_sentinels(item.identity, item.num_tokens) for item in items])
        positions, delta = mrope_positions(len(ids), items, 1)
        clock = SystemClock()
        ref = AttemptRef(f"req-{self.serial}")
        timelines = Timeline("prefill", "p", clock), Timeline("decode", "p", clock)
        delta = delta if self.position_delta is None else self.position_delta
        positions = with_answer(positions, delta, len(answer))
        made = Sequence(ref, plan, [*ids.tolist(), *answer], positions, delta, Listener(), *timelines)
        made.num_prompt, made.num_sampled, made.needs_handoff = len(ids), len(answer), needs_handoff
        return made

    def submit(self, *args: object, **how: object) -> Sequence:
        made = self.new(*args, **how)  # type: ignore[arg-type]
        self.engine.submit(made)
        return made

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.engine.post(lambda: None)  # so that an idle turn does not wait for news
            self.engine._turn()
            self.manager.check_integrity()
            self.landing.check_integrity()

    def turn_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(200):
            if condition():
                return
            self.turn()
        raise AssertionError("it never happened")

    def finish(self, *sequences: Sequence) -> None:
        self.turn_until(lambda: all(heard(each).ended.is_set() for each in sequences))

    def land(self, sequence: Sequence, index: int) -> None:
        """The embedding arrives: row k of item n has the value 1000 n + k + 0.5. It may have come with another's."""
        if self.landing.rows(sequence.ref, index) is not None:
            return
        self.landing.hand(sequence.ref, index, ENCODER)
        item = sequence.plan.items[index]
        rows = torch.tensor(embedding_values(item.identity[0], item.num_tokens))[:, None].expand(-1, 16)
        self.engine.land(sequence.ref, index, rows, EmbeddingSource.REMOTE)

    @property
    def is_clean(self) -> bool:
        """Nothing is held: pages free or cached, no slot, no sequence."""
        self.manager.check_integrity()
        counts = self.manager.counts()
        idle = counts["owned"] == counts["leased"] == counts["quarantined"] == 0
        unlocked = all(node.locks == 0 for node in self.manager.tree.nodes())
        arena = len(self.landing) == 0 and self.book.free_bytes == self.book.capacity_bytes
        arena = arena and self.engine.host_pool_bytes == 0
        return idle and unlocked and arena and not self.engine._living and not self.engine._running


def heard(sequence: Sequence) -> Listener:
    assert isinstance(sequence.sink, Listener)
    assert not sequence.sink.complaints, sequence.sink.complaints
    return sequence.sink


def embedding_values(number: int, rows: int) -> list[float]:
    return [1000.0 * number + row + 0.5 for row in range(rows)]


def answer_of(sequence: Sequence) -> list[int]:
    """What the answer must be, by the plan alone."""
    values: list[float] = [float(token) for token in sequence.ids[: sequence.num_prompt]]
    for item in sequence.plan.items:
        values[item.offset : item.end] = embedding_values(item.identity[0], item.num_tokens)
    return expected_answer(values, sequence.plan.sampling.max_tokens)


def settle(house: House, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not house.engine.call(condition).result(5):
        assert time.monotonic() < deadline, "it never happened"
