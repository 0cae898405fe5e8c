"""The small parts of the stages: fences, event streams, the table of requests whose plan has not come."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from tests.unit.engine_house import ROW_BYTES, House
from triptych.core.clock import SystemClock
from triptych.core.errors import DeadlineExceeded, Overloaded, PeerLost, StaleAttempt, TriptychError
from triptych.core.grant import Grant
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.plan import FinishReason, Plan, Sampling, Token, TokenLogprobs
from triptych.core.timeline import Timeline
from triptych.rpc import convert
from triptych.stages import attempts, decode, landing
from triptych.stages.attempts import AttemptFence
from triptych.stages.decode import Answer
from triptych.stages.events import Admitted, Decoding, Event, EventStream, Finished, HandedOff, Sampled, SplitStream
from triptych.stages.landing import EmbeddingLanding
from triptych.stages.tasks import on_engine

ENCODER = WorkerRef("encoder-0", 1)


def ref(attempt: int = 0, request: str = "req-1", choice: int = 0) -> AttemptRef:
    return AttemptRef(request, choice, attempt)


# --- fence ------------------------------------------------------------------------------------------------------------


def test_an_older_attempt_is_refused_after_a_newer_one() -> None:
    fence = AttemptFence()
    fence.enter(ref(1))
    fence.enter(ref(1))
    fence.enter(ref(3))
    for older in (0, 1, 2):
        with pytest.raises(StaleAttempt):
            fence.enter(ref(older))
    fence.enter(ref(0, choice=1))
    fence.enter(ref(0, request="req-2"))


def test_a_call_that_is_made_once_is_refused_the_second_time() -> None:
    fence = AttemptFence()
    fence.enter_once(ref(1))
    for again in (0, 1):
        with pytest.raises(StaleAttempt):
            fence.enter_once(ref(again))
    fence.enter_once(ref(2))


def test_a_fence_forgets_the_oldest_and_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "MAX_REMEMBERED", 10)
    fence = AttemptFence()
    for number in range(50):
        fence.enter(ref(1, request=f"req-{number}"))
        fence.enter(ref(1, request="often"))
    with pytest.raises(StaleAttempt):
        fence.enter(ref(0, request="often"))
    assert len(fence._newest) == 10


# --- events -----------------------------------------------------------------------------------------------------------


def token(index: int) -> Token:
    return Token(index, 100 + index)


async def test_events_from_another_thread_come_in_order() -> None:
    stream = EventStream(asyncio.get_running_loop())

    def tell() -> None:
        stream.admitted(5)
        for index in range(100):
            stream.tokens([token(index)])
        stream.finished(FinishReason.STOP)

    threading.Thread(target=tell).start()
    seen: list[Event] = []
    while not seen or not isinstance(seen[-1], Finished):
        seen += [await stream.next(), *stream.ready()]
    assert seen == [Admitted(5), *(Sampled((token(index),)) for index in range(100)), Finished(FinishReason.STOP)]


async def test_an_error_comes_after_what_was_told_before_it() -> None:
    stream = EventStream(asyncio.get_running_loop())
    stream.tokens([token(0)])
    stream.tokens([token(1)])
    stream.failed(PeerLost("gone"))
    await asyncio.sleep(0)
    assert [await stream.next(), *stream.ready()] == [Sampled((token(0),)), Sampled((token(1),))]
    with pytest.raises(PeerLost):
        await stream.next()


async def test_a_wait_that_was_cancelled_loses_no_event() -> None:
    stream = EventStream(asyncio.get_running_loop())
    waiting = asyncio.ensure_future(stream.next())
    await asyncio.sleep(0)
    waiting.cancel()
    stream.admitted(1)
    await asyncio.gather(waiting, return_exceptions=True)
    assert await stream.next() == Admitted(1)


def test_telling_a_closed_loop_is_no_error() -> None:
    loop = asyncio.new_event_loop()
    stream = EventStream(loop)
    loop.close()
    stream.finished(FinishReason.STOP)


async def drained(stream: EventStream) -> list[Event]:
    await asyncio.sleep(0)
    return stream.ready()


async def test_a_split_story_changes_its_listener_after_the_first_token() -> None:
    loop = asyncio.get_running_loop()
    prefill, decode = EventStream(loop), EventStream(loop)
    split = SplitStream(prefill, decode)
    split.admitted(3)
    split.tokens([token(0)])
    split.decoding()
    split.tokens([token(1)])
    split.finished(FinishReason.LENGTH)
    assert await drained(prefill) == [Admitted(3), Sampled((token(0),)), Decoding()]
    assert await drained(decode) == [Sampled((token(1),)), Finished(FinishReason.LENGTH)]


async def test_a_split_story_that_ends_with_its_first_token_ends_where_it_began() -> None:
    loop = asyncio.get_running_loop()
    prefill, decode = EventStream(loop), EventStream(loop)
    split = SplitStream(prefill, decode)
    split.tokens([token(0)])
    split.finished(FinishReason.STOP)
    assert await drained(prefill) == [Sampled((token(0),)), Finished(FinishReason.STOP)]
    assert await drained(decode) == []


async def test_both_listeners_hear_of_a_failure() -> None:
    loop = asyncio.get_running_loop()
    streams = EventStream(loop), EventStream(loop)
    SplitStream(*streams).failed(PeerLost("gone"))
    for stream in streams:
        with pytest.raises(PeerLost):
            await stream.next()


async def test_a_hand_over_is_told_with_its_token_and_its_bytes() -> None:
    stream, token = EventStream(asyncio.get_running_loop()), Token(0, 5)
    stream.handed_off(token, 7)
    assert await stream.next() == HandedOff(token, 7)


# --- slot requests that precede their plan ----------------------------------------------------------------------------


class NoEngine:
    """Answers every call with the name of what was called."""

    landing = None

    def call(self, action: Any) -> Any:
        future: Future[str] = Future()
        future.set_result("handed")
        return future


def table() -> EmbeddingLanding:
    made: Any = EmbeddingLanding(NoEngine(), None, None)  # type: ignore[arg-type]
    return made  # type: ignore[no-any-return]


def request(made: EmbeddingLanding, name: AttemptRef, index: int = 0) -> asyncio.Task[Any]:
    return asyncio.ensure_future(made.request_slot(ENCODER, name, index, bytes(32), 1, 4))


def held(made: EmbeddingLanding) -> int:
    return len(made._admissions) + len(made._waiters) + len(made._expected)


@pytest.mark.parametrize("plan_first", [True, False])
async def test_a_slot_request_waits_for_the_plans_reservation(plan_first: bool) -> None:
    made = table()
    if plan_first:
        made.expect(ref())
    waiting = [request(made, ref(), index) for index in range(3)]
    await asyncio.sleep(0)
    made.expect(ref())
    await asyncio.sleep(0.01)
    assert not any(each.done() for each in waiting)
    made.admitted(ref())
    assert await asyncio.gather(*waiting) == ["handed"] * 3
    assert await request(made, ref(), 4) == "handed"
    made.forget(ref())
    assert held(made) == 0


async def test_an_ended_attempt_refuses_who_waits_and_who_comes_later() -> None:
    made = table()
    made.expect(ref())
    waiting = request(made, ref())
    await asyncio.sleep(0)
    made.forget(ref())
    outcomes = await asyncio.gather(waiting, request(made, ref()), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [StaleAttempt, StaleAttempt]
    assert held(made) == 0


async def test_a_plan_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landing, "PLAN_WAIT_S", 0.02)
    made = table()
    outcomes = await asyncio.gather(request(made, ref()), request(made, ref(), 1), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [DeadlineExceeded, DeadlineExceeded]
    assert held(made) == 0


async def test_a_plan_that_waits_long_for_its_reservation_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landing, "PLAN_WAIT_S", 0.01)
    made = table()
    made.expect(ref())
    waiting = request(made, ref())
    await asyncio.sleep(0.05)
    made.admitted(ref())
    assert await waiting == "handed"


async def test_requests_given_up_before_their_plan_came_leave_nothing_behind() -> None:
    made = table()
    for number in range(200):
        waiting = [request(made, ref(request=f"req-{number}"), index) for index in range(2)]
        await asyncio.sleep(0)
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    assert held(made) == 0


async def test_one_who_leaves_takes_nothing_from_another_who_waits() -> None:
    made = table()
    leaving, staying = request(made, ref()), request(made, ref(), 1)
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    made.expect(ref())
    made.admitted(ref())
    assert await staying == "handed"


async def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landing, "MAX_EXPECTED", 5)
    made = table()
    waiting = [request(made, ref(request=f"req-{number}")) for number in range(5)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as caught:
        await request(made, ref(request="one more"))
    assert isinstance(caught.value, TriptychError)
    for number in range(5):
        made.forget(ref(request=f"req-{number}"))
    await asyncio.gather(*waiting, return_exceptions=True)
    assert held(made) == 0
    for number in range(20):
        made.forget(ref(request=f"later-{number}"))
    assert len(made._ended) <= 5


# --- tasks ------------------------------------------------------------------------------------------------------------


async def test_a_failure_that_comes_after_its_caller_left_is_no_news_for_the_log() -> None:
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
    work: Future[None] = Future()
    waiting = asyncio.create_task(on_engine(work))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    work.set_exception(StaleAttempt("this grant has ended"))
    await asyncio.sleep(0.01)
    del waiting, work
    gc.collect()
    assert reports == []


# --- messages ---------------------------------------------------------------------------------------------------------


async def test_however_many_tokens_wait_no_message_comes_near_grpcs_limit() -> None:
    """A reader that slept while an answer with all its log probabilities was made."""
    top = tuple((999_999, -1.0 / 3) for _ in range(20))
    made = [Token(index, 999_999, TokenLogprobs(-1.0 / 3, top)) for index in range(1, 20_000)]
    stream = EventStream(asyncio.get_running_loop())
    stream.tokens(made)
    stream.finished(FinishReason.LENGTH)
    await asyncio.sleep(0)
    plan = Plan((1,), (), Sampling(20_000, num_logprobs=20), 1.0)
    clock = SystemClock()
    answer = Answer(plan, Grant("g", "d", 1, bytes(16), 1, 1), stream, Timeline("decode", "d", clock), 0)
    messages = [message async for message in decode._responses(answer)]
    assert max(message.ByteSize() for message in messages) < 2**20
    *batches, done = messages
    sent = [convert.token_from_proto(token) for batch in batches for token in batch.tokens.tokens]
    assert sent == made
    assert done.generate_done.usage.completion_tokens == 20_000


async def test_a_slot_that_the_engine_hands_out_late_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long step lies between the request and its answer: the time for which it may wait for others is over by then,
    and yet the slot is the one that it was given."""
    monkeypatch.setattr(landing, "SHARED_WAIT_S", 0.05)
    house = House()
    sequence = house.submit([1, (1, 5), 2])
    house.turn()
    made: Any = EmbeddingLanding(house.engine, None, torch.float32)  # type: ignore[arg-type]
    made.admitted(sequence.ref)
    gate = threading.Event()
    house.engine.post(lambda: gate.wait(5) and None)
    house.engine.start()
    try:
        item = sequence.plan.items[0]
        asked = made.request_slot(ENCODER, sequence.ref, 0, item.identity, item.num_tokens, item.num_tokens * ROW_BYTES)
        waiting = asyncio.ensure_future(asked)
        await asyncio.sleep(0.2)
        gate.set()
        assert (await waiting).num_bytes == item.num_tokens * ROW_BYTES
    finally:
        gate.set()
        house.engine.stop()
