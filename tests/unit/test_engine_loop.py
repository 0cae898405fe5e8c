"""The step loop over a language model that can be computed in the head: what is admitted, run, freed and told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import pytest
import torch

from triptych.core.clock import Clock, ManualClock, SystemClock
from triptych.core.errors import (
    Aborted,
    EmbeddingMissing,
    NoRoom,
    RequestTooLarge,
    StaleAttempt,
    TriptychError,
)
from triptych.core.expansion import expand
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.lifecycle import Phase
from triptych.core.plan import EmbeddingSource, FinishReason, Grid, Item, Modality, Plan, Sampling, Token, TokenRange
from triptych.core.timeline import Timeline
from triptych.engine.landing import LandingTable
from triptych.engine.loop import EngineLimits, LanguageEngine, missing_items
from triptych.engine.sequence import Sequence
from triptych.kv.manager import CacheManager, SequencePages
from triptych.mm.mrope import mrope_positions
from triptych.mm.sentinels import item_sentinels
from triptych.sched.language import StepBudget
from triptych.testing.fake_runner import FakeRunner, expected_answer
from triptych.transport.slots import SlotAllocator

PAGE = 4
ROW_BYTES = 64
ENCODER = WorkerRef("encoder-0", 1)
PLACEHOLDER = 7


@dataclass
class Listener:
    """A sink that remembers."""

    story: list[str] = field(default_factory=list)
    tokens_seen: list[Token] = field(default_factory=list)
    error: TriptychError | None = None
    reason: FinishReason | None = None
    cached: int | None = None
    num_bytes: int | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def admitted(self, cached_tokens: int) -> None:
        self._tell("admitted")
        self.cached = cached_tokens

    def tokens(self, tokens: SequenceOf[Token]) -> None:
        self._tell("tokens")
        self.tokens_seen += tokens

    def handed_off(self, num_bytes: int) -> None:
        self._tell("handed_off")
        self.num_bytes = num_bytes

    def decoding(self) -> None:
        self._tell("decoding")

    def finished(self, reason: FinishReason) -> None:
        self._tell("finished")
        self.reason = reason
        self.ended.set()

    def failed(self, error: TriptychError) -> None:
        self._tell("failed")
        self.error = error
        self.ended.set()

    def _tell(self, what: str) -> None:
        assert not self.ended.is_set(), f"heard {what!r} after the end"
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
    ) -> None:
        self.runner = runner or FakeRunner(PAGE)
        self.manager = CacheManager(num_pages, PAGE)
        self.book = SlotAllocator(arena_bytes)
        self.landing = LandingTable(self.book)
        budget = StepBudget(max_tokens, max_chunk, min_partial)
        limits = EngineLimits(budget, max_sequences, max_waiting, row_bytes)
        clock = clock or SystemClock()
        self.engine = LanguageEngine(self.runner, self.manager, self.landing, limits, clock, "prefill")
        self.serial = 0

    def new(
        self,
        prompt: SequenceOf[int | tuple[int, int]],
        max_tokens: int = 3,
        stop: frozenset[int] = frozenset(),
        needs_handoff: bool = False,
        salt: bytes = b"",
    ) -> Sequence:
        """`prompt`: text ids, and (item number, rows) for a picture."""
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
        plan = Plan(tuple(compact), tuple(items), Sampling(max_tokens, stop_token_ids=stop), 60.0, salt)
        ids = expand(compact, items, [item_sentinels(item.identity, item.num_tokens) for item in items])
        positions, delta = mrope_positions(len(ids), items, 1)
        clock = SystemClock()
        ref = AttemptRef(f"req-{self.serial}")
        timelines = Timeline("prefill", "p", clock), Timeline("decode", "p", clock)
        made = Sequence(ref, plan, ids.tolist(), positions, delta, Listener(), *timelines)
        made.num_prompt, made.needs_handoff = len(ids), needs_handoff
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

    def turn_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(200):
            if condition():
                return
            self.turn()
        raise AssertionError("it never happened")

    def finish(self, *sequences: Sequence) -> None:
        self.turn_until(lambda: all(heard(each).ended.is_set() for each in sequences))

    def land(self, sequence: Sequence, index: int) -> None:
        """The embedding arrives: row k of item n has the value 1000 n + k + 0.5."""
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
        return idle and unlocked and arena and not self.engine._living and not self.engine._running


def heard(sequence: Sequence) -> Listener:
    assert isinstance(sequence.sink, Listener)
    return sequence.sink


def embedding_values(number: int, rows: int) -> list[float]:
    return [1000.0 * number + row + 0.5 for row in range(rows)]


def answer_of(sequence: Sequence) -> list[int]:
    """What the answer must be, by the plan alone."""
    values: list[float] = [float(token) for token in sequence.ids[: sequence.num_prompt]]
    for item in sequence.plan.items:
        values[item.offset : item.end] = embedding_values(item.identity[0], item.num_tokens)
    return expected_answer(values, sequence.plan.sampling.max_tokens)


# --- running ----------------------------------------------------------------------------------------------------------


def test_a_prompt_is_admitted_run_and_answered() -> None:
    house = House()
    sequence = house.submit([1, 2, 3, 4, 5, 6], max_tokens=4)
    house.finish(sequence)
    assert heard(sequence).story == ["admitted", "tokens", "decoding", "tokens", "tokens", "tokens", "finished"]
    assert heard(sequence).ids == answer_of(sequence)
    assert heard(sequence).reason is FinishReason.LENGTH
    assert sequence.phase is Phase.DONE
    assert house.is_clean


def test_a_stop_token_ends_the_answer_and_is_its_last() -> None:
    house = House()
    probe = house.new([1, 2, 3], max_tokens=5)
    stop = answer_of(probe)[2]
    sequence = house.submit([1, 2, 3], max_tokens=5, stop=frozenset({stop}))
    house.finish(sequence)
    assert heard(sequence).ids == answer_of(probe)[:3]
    assert heard(sequence).reason is FinishReason.STOP
    assert house.is_clean


def test_a_long_prompt_is_run_in_chunks() -> None:
    house = House(max_chunk=8)
    sequence = house.submit(list(range(1, 22)))
    house.finish(sequence)
    assert [len(step[0].ids) for step in house.runner.steps] == [8, 8, 5, 1, 1]
    assert [event.num_tokens for event in sequence.timeline.events if event.event == "chunk"] == [8, 8, 5]
    assert heard(sequence).ids == answer_of(sequence)


@pytest.mark.parametrize(("max_tokens", "max_chunk"), [(100, 50), (7, 3), (3, 2)])
def test_many_at_once_are_answered_as_if_alone(max_tokens: int, max_chunk: int) -> None:
    house = House(max_tokens=max_tokens, max_chunk=max_chunk, max_sequences=3)
    prompts = [[1, 2, 3], list(range(1, 14)), [(1, 5), 4, 4], [9] * 17, [1, 2, (2, 3), 5, (3, 6), 6], [1, 2, 3, 4, 5]]
    sequences = [house.submit(prompt, max_tokens=4 + index) for index, prompt in enumerate(prompts)]
    while not all(heard(each).ended.is_set() for each in sequences):
        house.turn()
        for each in sequences:
            for index in missing_items(each) if each.phase is Phase.RUNNING else ():
                house.land(each, index)
    for each in sequences:
        assert heard(each).ids == answer_of(each)
    assert house.is_clean


def test_a_prompt_seen_before_is_taken_from_the_cache() -> None:
    house = House()
    prompt = list(range(1, 15))
    first = house.submit(prompt)
    house.finish(first)
    again = house.submit(prompt)
    house.finish(again)
    assert heard(first).cached == 0
    assert heard(again).cached == 12
    assert heard(again).ids == heard(first).ids == answer_of(again)


def test_an_answer_can_be_continued_from_the_cache() -> None:
    house = House()
    first = house.submit([1, 2, 3, 4, 5], max_tokens=8)
    house.finish(first)
    longer = house.submit([1, 2, 3, 4, 5, *heard(first).ids, 6, 7])
    house.finish(longer)
    assert heard(longer).cached == 12  # 5 + 8 tokens, of which the last was never computed
    assert heard(longer).ids == answer_of(longer)


def test_another_tenant_shares_nothing() -> None:
    house = House()
    house.finish(house.submit(list(range(1, 15)), salt=b"a"))
    other = house.submit(list(range(1, 15)), salt=b"b")
    house.finish(other)
    assert heard(other).cached == 0


def test_another_picture_is_another_prompt() -> None:
    house = House()
    for number in (1, 2):
        sequence = house.submit([5, (number, 8), 6])
        house.turn()
        assert heard(sequence).cached == 0
        house.land(sequence, 0)
        house.finish(sequence)
        assert heard(sequence).ids == answer_of(sequence)


def test_a_picture_in_the_cache_needs_no_slot_and_no_embedding() -> None:
    house = House()
    first = house.submit([5, (1, 8), 6, 7, 8, 9])
    house.turn()
    house.land(first, 0)
    house.finish(first)
    again = house.submit([5, (1, 8), 6, 7, 8, 9])
    house.turn()
    assert again.items[0].source is EmbeddingSource.RADIX
    assert len(house.landing) == 0
    house.finish(again)
    assert heard(again).ids == heard(first).ids


def test_a_picture_cached_in_part_still_needs_its_embedding() -> None:
    house = House()
    first = house.submit([5, (1, 8)])  # nine tokens: two whole pages end inside the picture
    house.turn()
    house.land(first, 0)
    house.finish(first)
    again = house.submit([5, (1, 8)])
    house.turn()
    assert heard(again).cached == 8
    assert again.items[0].source is None
    assert len(house.landing) == 1
    house.land(again, 0)
    house.finish(again)
    assert heard(again).ids == answer_of(again)
    assert house.is_clean


# --- embeddings -------------------------------------------------------------------------------------------------------


def test_text_runs_up_to_the_first_missing_embedding_whatever_order_they_come_in() -> None:
    house = House()
    sequence = house.submit([1, 2, 3, (1, 5), 4, 4, (2, 6), 9])
    house.turn(3)
    assert sequence.num_computed == 3
    house.land(sequence, 1)
    house.turn(3)
    assert sequence.num_computed == 3
    house.land(sequence, 0)
    house.finish(sequence)
    assert heard(sequence).ids == answer_of(sequence)
    assert house.is_clean


def test_a_prompt_goes_on_to_the_next_missing_embedding() -> None:
    house = House()
    sequence = house.submit([1, 2, 3, (1, 5), 4, 4, (2, 6), 9])
    house.turn(2)
    house.land(sequence, 0)
    house.turn(2)
    assert sequence.num_computed == 10
    assert list(missing_items(sequence)) == [1]
    assert house.book.owned_bytes == 6 * ROW_BYTES, "the first embedding's slot is free again"


def test_a_waiting_prompt_does_not_hold_up_others() -> None:
    house = House()
    waiting = house.submit([1, (1, 5), 2])
    other = house.submit([1, 2, 3])
    house.finish(other)
    assert waiting.num_computed == 1
    house.land(waiting, 0)
    house.finish(waiting)
    assert heard(waiting).ids == answer_of(waiting)


# --- admission --------------------------------------------------------------------------------------------------------


def test_admission_is_pages_and_landing_room_or_nothing() -> None:
    house = House(arena_bytes=8 * ROW_BYTES)
    first = house.submit([1, (1, 6), 2])
    second = house.submit([3, (2, 6), 4])
    house.turn(5)
    assert heard(second).story == []
    assert house.manager.counts()["owned"] + house.manager.counts()["cached"] == len(first.pages.pages)  # type: ignore[union-attr]
    house.land(first, 0)
    house.turn_until(lambda: heard(second).story != [])
    house.land(second, 0)
    house.finish(first, second)
    assert heard(second).ids == answer_of(second)
    assert house.is_clean


def test_a_reservation_that_finds_no_landing_room_evicts_nothing_and_one_without_pages_holds_none() -> None:
    house = House(num_pages=9, arena_bytes=8 * ROW_BYTES)
    house.finish(house.submit(list(range(1, 17)), max_tokens=1))
    cached = house.manager.counts()["cached"]
    first = house.submit([100, (1, 6), 102], max_tokens=2)
    house.turn()
    held = house.manager.counts()
    second = house.submit([103, (2, 6), *range(104, 115)], max_tokens=2)  # its pages are there, if cached ones go
    house.turn(3)
    assert house.manager.counts() == held
    assert held["cached"] >= cached > 0
    house.land(first, 0)
    house.finish(first)
    house.turn_until(lambda: heard(second).story != [])
    house.land(second, 0)
    house.finish(second)
    assert heard(second).ids == answer_of(second)
    blocking = house.submit([1] * 20, max_tokens=9)
    house.turn()
    house.submit([115, (3, 6), *range(116, 126)], max_tokens=2)  # room to land, no pages
    house.turn(2)
    assert len(house.landing) == 0
    house.finish(blocking)


def test_a_prompt_waits_for_pages_and_the_next_may_pass() -> None:
    house = House(num_pages=9)
    first = house.submit(list(range(1, 17)), max_tokens=9)  # 6 of 8 pages
    house.turn()
    large = house.submit(list(range(101, 113)), max_tokens=5)
    small = house.submit([1, 2, 3], max_tokens=2)
    house.finish(small)
    assert heard(large).story == []
    house.finish(first, large)
    assert [heard(each).ids for each in (first, large, small)] == [answer_of(each) for each in (first, large, small)]
    assert house.is_clean


def test_the_more_urgent_prompt_is_admitted_and_run_first() -> None:
    house = House(max_sequences=1)
    prompts = [house.new([number, 2, 3], max_tokens=2) for number in (1, 2, 3)]
    for made, priority in zip(prompts, (0, 5, -5), strict=True):
        made.plan = replace(made.plan, priority=priority)
        house.engine.submit(made)
    order: list[Sequence] = []
    while len(order) < 3:
        house.turn()
        order += [made for made in prompts if heard(made).ended.is_set() and made not in order]
    assert [made.plan.priority for made in order] == [-5, 0, 5]
    together = House(max_tokens=4, max_chunk=4)
    late, urgent = (together.new([number, 2, 3], max_tokens=2) for number in (1, 2))
    urgent.plan = replace(urgent.plan, priority=-1)
    for made in (late, urgent):
        together.engine.submit(made)
    together.turn()
    assert (urgent.num_computed, late.num_computed) == (3, 1)
    together.finish(late, urgent)
    assert [heard(made).ids for made in (late, urgent)] == [answer_of(made) for made in (late, urgent)]


def test_a_waiting_time_is_what_the_clock_says_since_it_was_queued() -> None:
    """A long prompt that waits is overdue at last, and then goes on beside urgent ones."""
    clock = ManualClock()
    house = House(num_pages=200, max_tokens=8, max_chunk=8, clock=clock)
    long = house.submit(list(range(1, 101)), max_tokens=1)

    def urgent_step() -> int:
        before = long.num_computed
        made = house.new([house.serial + 1000] * 8, max_tokens=1)
        made.plan = replace(made.plan, priority=-1)
        house.engine.submit(made)
        house.turn()
        return long.num_computed - before

    assert [urgent_step() for _ in range(3)] == [0, 0, 0]
    clock.advance_s(3.0)
    assert urgent_step() == 2
    house.finish(long)
    assert heard(long).ids == answer_of(long)


def test_no_more_sequences_run_than_allowed() -> None:
    house = House(max_sequences=2)
    sequences = [house.submit([number], max_tokens=5) for number in range(1, 6)]
    while not all(heard(each).ended.is_set() for each in sequences):
        house.turn()
        assert len(house.engine._running) <= 2
    assert all(heard(each).ids == answer_of(each) for each in sequences)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "needs_handoff", "fits"),
    [
        (list(range(30)), 3, False, True),  # 8 pages hold 32 tokens; the last one's KV is never needed
        (list(range(30)), 4, False, False),
        (list(range(32)), 900, True, True),  # the answer's room is elsewhere
        (list(range(33)), 1, True, False),
        ([(1, 5)], 1, False, False),  # five rows, and the arena holds four
        ([(1, 2), (2, 2)], 1, False, True),
        ([(1, 2), (2, 3)], 1, False, False),
    ],
)
def test_what_no_empty_worker_could_hold_fails_at_once(
    prompt: list[int | tuple[int, int]], max_tokens: int, needs_handoff: bool, fits: bool
) -> None:
    house = House(num_pages=9, arena_bytes=4 * ROW_BYTES)
    sequence = house.submit(prompt, max_tokens=max_tokens, needs_handoff=needs_handoff)
    if fits:
        assert heard(sequence).story == []
        house.turn()
        assert heard(sequence).story[0] == "admitted"
    else:
        assert isinstance(heard(sequence).error, RequestTooLarge)
        assert house.is_clean


def test_pictures_that_only_their_alignment_keeps_out_of_an_empty_arena_fail_at_once() -> None:
    """Slots begin at multiples of 64 bytes: three of 96 take 128 each, and 288 bytes are not enough."""
    house = House(arena_bytes=288, row_bytes=96)
    large = house.submit([(1, 1), (2, 1), (3, 1)])
    small = house.submit([(1, 1), (2, 1)])
    house.turn()
    assert isinstance(heard(large).error, RequestTooLarge), "it would wait for ever, and in the end all behind it too"
    assert heard(small).story[0] == "admitted"


def test_a_full_queue_refuses_at_once() -> None:
    house = House(max_waiting=2)
    sequences = [house.submit([1, 2]) for _ in range(3)]
    assert isinstance(heard(sequences[2]).error, NoRoom)
    house.finish(*sequences[:2])
    assert house.is_clean


def test_an_attempt_submitted_twice_leaves_the_first_unharmed() -> None:
    house = House()
    first = house.submit([1, 2, 3])
    twin = house.new([1, 2, 3])
    twin.ref = first.ref
    house.turn()
    house.engine.submit(twin)
    assert isinstance(heard(twin).error, StaleAttempt)
    house.finish(first)
    assert heard(first).ids == answer_of(first)
    assert house.is_clean


# --- handing off ------------------------------------------------------------------------------------------------------


def test_nothing_runs_before_the_pages_at_the_other_end_are_bound() -> None:
    house = House(max_chunk=5)
    sequence = house.submit(list(range(1, 11)), needs_handoff=True)
    house.turn(3)
    assert heard(sequence).story == ["admitted"]
    assert house.runner.steps == []


def test_kv_is_pushed_as_it_is_computed_and_the_partial_page_last() -> None:
    house = House(max_chunk=5)
    sequence, target = house.submit(list(range(1, 11)), needs_handoff=True), PoolOfAnother(house.runner)
    house.turn()
    house.engine.bound(sequence.ref, target)
    house.turn()
    assert sorted(target.pages) == [0]
    house.turn()
    assert target.values(10) == list(range(1, 11))
    assert target.copies == 2
    assert heard(sequence).story == ["admitted", "tokens", "handed_off"]
    assert heard(sequence).num_bytes == 300
    assert heard(sequence).ids == answer_of(sequence)[:1]
    house.turn(3)
    assert len(house.runner.steps) == 2, "it decodes elsewhere"
    house.engine.handed_over(sequence.ref)
    assert heard(sequence).story[-1] == "decoding"
    assert house.is_clean


def test_cached_pages_are_pushed_too() -> None:
    house = House()
    prompt = list(range(1, 15))
    house.finish(house.submit(prompt))
    sequence, target = house.submit(prompt, needs_handoff=True), PoolOfAnother(house.runner)
    house.turn()
    assert heard(sequence).cached == 12
    house.engine.bound(sequence.ref, target)
    house.turn()
    assert target.values(14) == prompt


def test_an_answer_that_ends_with_its_first_token_is_not_handed_off() -> None:
    house = House()
    sequence = house.submit([1, 2, 3], max_tokens=1, needs_handoff=True)
    house.turn()
    house.engine.bound(sequence.ref, PoolOfAnother(house.runner))
    house.finish(sequence)
    assert heard(sequence).story == ["admitted", "tokens", "finished"]
    house.engine.handed_over(sequence.ref)
    assert house.is_clean


def test_a_sequence_is_taken_over_after_its_first_token() -> None:
    house = House()
    sequence = house.new([1, 2, 3, 4, 5, 6], max_tokens=5)
    answer = answer_of(sequence)
    pages = [11, 5]  # a grant's: 10 tokens
    for index, value in enumerate([1, 2, 3, 4, 5, 6]):
        house.runner.cells[pages[index // PAGE], index % PAGE] = value
    pages.append(7)
    sequence.pages = SequencePages(b"", pages, [], set(), 0)
    house.engine.adopt(sequence, Token(0, answer[0]))
    house.finish(sequence)
    assert [token.index for token in heard(sequence).tokens_seen] == [1, 2, 3, 4]
    assert [token.id for token in heard(sequence).tokens_seen] == answer[1:]
    assert house.manager.counts()["cached"] == 0, "a grant's pages are not shared"
    assert house.is_clean


# --- aborts and failures ----------------------------------------------------------------------------------------------


def queued(house: House) -> Sequence:
    blocker = house.submit([1] * 200, max_tokens=36)
    sequence = house.submit([2, (1, 5), 3])
    house.turn()
    house.engine.abort(blocker.ref, Aborted("not needed"))
    return sequence


def waiting_for_the_grant(house: House) -> Sequence:
    sequence = house.submit([2, (1, 5), 3], needs_handoff=True)
    house.turn()
    return sequence


def waiting_for_an_embedding(house: House) -> Sequence:
    sequence = house.submit([2, 2, 2, 2, 2, (1, 5), 3, (2, 5)])
    house.turn(2)
    return sequence


def with_an_embedding_landed(house: House) -> Sequence:
    sequence = waiting_for_an_embedding(house)
    house.land(sequence, 1)
    return sequence


def in_the_middle_of_its_prompt(house: House) -> Sequence:
    sequence = house.submit(list(range(1, 130)))
    house.turn()
    assert 0 < sequence.num_computed < 129
    return sequence


def handing_off(house: House) -> Sequence:
    sequence = house.submit(list(range(1, 10)), needs_handoff=True)
    house.turn()
    house.engine.bound(sequence.ref, PoolOfAnother(house.runner))
    house.turn()
    assert sequence.phase is Phase.HANDING_OFF
    return sequence


def decoding(house: House) -> Sequence:
    sequence = house.submit(list(range(1, 10)), max_tokens=20)
    house.turn(5)
    assert sequence.phase is Phase.DECODING
    return sequence


PHASES = [
    queued,
    waiting_for_the_grant,
    waiting_for_an_embedding,
    with_an_embedding_landed,
    in_the_middle_of_its_prompt,
    handing_off,
    decoding,
]


@pytest.mark.parametrize("reach", PHASES)
def test_an_abort_frees_everything_in_every_phase(reach: Callable[[House], Sequence]) -> None:
    house = House()
    sequence = reach(house)
    house.engine.abort(sequence.ref, Aborted("enough"))
    assert isinstance(heard(sequence).error, Aborted)
    assert sequence.phase is Phase.ABORTED
    assert house.is_clean
    house.engine.abort(sequence.ref, Aborted("again"))
    house.engine.handed_over(sequence.ref)
    house.engine.bound(sequence.ref, PoolOfAnother(house.runner))
    after = house.submit([1, 2, 3, 4, 5])
    house.finish(after)
    assert heard(after).ids == answer_of(after)
    assert house.is_clean


def test_a_slot_that_an_encoder_still_writes_to_outlives_the_abort() -> None:
    house = House()
    sequence = waiting_for_an_embedding(house)
    house.landing.hand(sequence.ref, 0, ENCODER)
    house.engine.abort(sequence.ref, Aborted("enough"))
    assert house.book.quarantined_bytes == 5 * ROW_BYTES
    house.landing.writer_finished(ENCODER, sequence.ref)
    assert house.is_clean


def test_a_prompt_whose_embedding_does_not_fit_fails_alone() -> None:
    house = House()
    broken = house.submit([1, (1, 5), 2])
    house.turn(2)
    sound = house.submit([7, 8, 9])
    house.land(broken, 0)
    rows = broken.items[0].rows
    assert rows is not None
    broken.items[0].rows = rows[:3]
    house.finish(sound)
    assert isinstance(heard(broken).error, EmbeddingMissing)
    assert heard(sound).ids == answer_of(sound)
    assert house.is_clean


@pytest.mark.parametrize("error", [RuntimeError("a bug"), EmbeddingMissing("it did not come")])
def test_a_failed_step_fails_those_in_it_and_the_loop_goes_on(running: House, error: Exception) -> None:
    house = running
    waiting = house.new([1, (1, 5), 2])  # in no step for want of its embedding
    house.engine.call(lambda: house.engine.submit(waiting)).result(5)
    settle(house, lambda: waiting.num_computed == 1)
    victims = [house.new([number] * 6, max_tokens=50) for number in (3, 4)]

    def start() -> None:
        for victim in victims:
            house.engine.submit(victim)
        house.runner.fail_next(error)

    house.engine.call(start).result(5)
    for victim in victims:
        assert heard(victim).ended.wait(5)
        assert type(heard(victim).error) is (TriptychError if isinstance(error, RuntimeError) else EmbeddingMissing)
        assert "bug" not in str(heard(victim).error)
    house.engine.call(lambda: house.land(waiting, 0)).result(5)
    assert heard(waiting).ended.wait(5)
    assert heard(waiting).ids == answer_of(waiting)
    assert house.engine.is_progressing()
    assert house.engine.call(lambda: house.is_clean).result(5)


def test_a_worker_whose_every_step_fails_is_not_healthy(running: House) -> None:
    house = running
    for _ in range(3):
        victim = house.new([1, 2, 3])
        house.runner.fail_next(RuntimeError("a bug"))
        house.engine.post(lambda victim=victim: house.engine.submit(victim))  # type: ignore[misc]
        assert heard(victim).ended.wait(5)
    settle(house, lambda: house.engine._num_failed_turns == 0)  # an idle turn is a good turn


# --- the thread -------------------------------------------------------------------------------------------------------


@pytest.fixture
def running() -> Iterator[House]:
    house = House()
    house.engine.start()
    yield house
    house.engine.stop()


def settle(house: House, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not house.engine.call(condition).result(5):
        assert time.monotonic() < deadline, "it never happened"


def test_a_call_brings_back_its_result_or_its_error(running: House) -> None:
    assert running.engine.call(lambda: threading.current_thread().name).result(5) == "prefill-engine"

    def broken() -> None:
        raise StaleAttempt("gone")

    with pytest.raises(StaleAttempt):
        running.engine.call(broken).result(5)
    assert running.engine.is_progressing()


def test_a_call_cancelled_before_its_turn_does_not_run(running: House) -> None:
    gate, ran = threading.Event(), []
    running.engine.post(lambda: gate.wait(5) and None)
    future: Future[None] = running.engine.call(lambda: ran.append(1))
    assert future.cancel()
    gate.set()
    running.engine.call(lambda: None).result(5)
    assert ran == []


def test_stopping_fails_what_is_left_and_what_comes_too_late() -> None:
    house = House()
    house.engine.start()
    sequences = [house.new([number, (1, 5)]) for number in (1, 2, 3)]
    for sequence in sequences[:2]:
        house.engine.call(lambda each=sequence: house.engine.submit(each)).result(5)  # type: ignore[misc]
    gate = threading.Event()
    house.engine.post(lambda: gate.wait(5) and None)
    house.engine.post(house.engine._stop)
    house.engine.post(lambda: house.engine.submit(sequences[2]))  # already in the inbox, behind the stop
    gate.set()
    house.engine.stop()
    for sequence in sequences:
        assert heard(sequence).ended.wait(5)
        assert isinstance(heard(sequence).error, Aborted)
    assert not house.engine.is_progressing()
    assert house.is_clean


def test_a_call_to_a_stopped_engine_fails_and_does_not_hang() -> None:
    house = House()
    house.engine.start()
    house.engine.stop()
    with pytest.raises(Aborted):
        house.engine.call(lambda: None).result(5)
    assert not house.engine.post(lambda: None)


def test_no_call_is_lost_while_the_engine_stops() -> None:
    for _ in range(20):
        house = House()
        house.engine.start()
        futures: list[Future[int]] = []
        posting = threading.Thread(target=lambda: futures.extend(house.engine.call(lambda: 1) for _ in range(500)))  # noqa: B023
        posting.start()
        house.engine.stop()
        posting.join()
        for future in futures:
            error = future.exception(5)
            assert error is None or isinstance(error, Aborted)
