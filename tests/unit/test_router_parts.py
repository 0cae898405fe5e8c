"""The router's pure pieces: order of tokens, choice of workers, the line of waiting requests, the text of an answer."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.app import Cluster
from services.router.placement import ClusterView, decode_candidates, encoder_shares, prefill_worker
from services.router.queue import AdmissionQueue
from services.router.tasks import first_of, most_telling, owned_task, unwrapped_group
from services.router.token_order import TokenOrder
from triptych.core.errors import (
    AttemptError,
    EmbeddingMissing,
    MediaInvalid,
    NoRoom,
    Overloaded,
    PeerLost,
    Unavailable,
)
from triptych.core.plan import Grid, Item, Modality, Token, TokenRange
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.model.adapters.base import Adapter

# --- order ------------------------------------------------------------------------------------------------------------


@given(st.permutations(list(range(12))), st.integers(0, 2**32))
def test_any_arrival_becomes_the_one_order(arrival: list[int], seed: int) -> None:
    order, rng = TokenOrder(), random.Random(seed)
    emitted: list[int] = []
    for index in arrival:
        repeated = [Token(rng.randrange(12), 999)] if emitted and rng.random() < 0.3 else []
        again = [token for token in repeated if token.index < order.emitted]
        emitted += [token.index for token in order.offer(0, [*again, Token(index, index)])]
    assert emitted == list(range(12))
    assert not order.has_gap


def test_an_older_attempt_is_not_heard_and_what_it_sent_early_is_dropped() -> None:
    order = TokenOrder()
    assert order.offer(0, [Token(1, 11)]) == []
    assert order.has_gap
    order.begin(1)
    assert order.offer(0, [Token(0, 10)]) == []
    assert order.offer(1, [Token(0, 20)]) == [Token(0, 20)]
    assert not order.has_gap


# --- choice of workers ------------------------------------------------------------------------------------------------


def worker(worker_id: str, *roles: Role, state: WorkerState = WorkerState.READY, tokens: int = 0) -> WorkerInfo:
    return WorkerInfo(worker_id, 1, frozenset(roles), state, "127.0.0.1:1", max_sequence_tokens=tokens)


def item(name: str) -> Item:
    return Item(Modality.IMAGE, name.encode().ljust(32), 4, (TokenRange(0, 0, 4),), Grid(1, 4, 4))


E0, E1, E2 = (worker(f"e-{number}", Role.ENCODER) for number in range(3))
P0, P1 = (worker(f"p-{number}", Role.PREFILL) for number in range(2))
D0, D1 = (worker(f"d-{number}", Role.DECODE) for number in range(2))
MONO = worker("mono-0", *Role)


def test_only_ready_workers_with_the_same_weights_are_seen() -> None:
    others = replace(D0, worker_id="x", model_fingerprint=b"other")
    starting = worker("s", Role.DECODE, state=WorkerState.STARTING)
    view = ClusterView.of([D0, others, starting, replace(D1, model_fingerprint=b"mine")], b"mine")
    assert [found.worker_id for found in view.workers] == ["d-0", "d-1"]
    assert view.missing_roles() == (Role.ENCODER, Role.PREFILL)


def test_a_worker_with_other_weights_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    stranger = replace(D0, model_fingerprint=b"other")
    cluster = Cluster(SimpleNamespace(workers=lambda: (stranger,)), cast(Adapter, SimpleNamespace(fingerprint=b"mine")))
    for _ in range(2):
        cluster.warn_of_strangers([stranger, D1, replace(P0, model_fingerprint=b"mine")])
    assert [record.__dict__["worker_id"] for record in caplog.records] == ["d-0"]
    assert Role.DECODE in cluster.missing_roles()


def test_decode_workers_take_turns() -> None:
    view = ClusterView((E0, D0, D1, P0))
    assert decode_candidates(view, 0) == (D0, D1)
    assert decode_candidates(view, 1) == (D1, D0)
    with pytest.raises(Unavailable, match="decode"):
        decode_candidates(ClusterView((E0,)), 0)


def test_roles_of_one_process_stay_together() -> None:
    view = ClusterView((E0, P0, D0, MONO))
    assert prefill_worker(view, MONO, 0) == MONO
    assert encoder_shares(view, MONO, {0: item("a")}) == [(MONO, {0: item("a")})]
    assert prefill_worker(view, D0, 0) == P0
    assert {found.worker_id for found, _ in encoder_shares(view, P0, {0: item("a")})} <= {"e-0", "mono-0"}


def test_a_worker_that_can_do_more_helps_where_there_is_no_other() -> None:
    assert prefill_worker(ClusterView((D0, MONO)), D0, 0) == MONO


def test_avoided_workers_are_the_last_resort() -> None:
    assert ClusterView((P0, P1), frozenset({"p-0"})).with_role(Role.PREFILL) == (P1,)
    assert ClusterView((P0,), frozenset({"p-0"})).with_role(Role.PREFILL) == (P0,)


def test_few_identities_move_when_an_encoder_leaves() -> None:
    items = {index: item(f"picture {index}") for index in range(300)}

    def homes(*encoders: WorkerInfo) -> dict[int, str]:
        shares = encoder_shares(ClusterView(encoders), P0, items)
        return {index: found.worker_id for found, share in shares for index in share}

    before, after = homes(E0, E1, E2), homes(E0, E2)
    assert set(before) == set(items)
    assert all(before[index] == after[index] for index in items if before[index] != "e-1")
    assert 60 < sum(home == "e-1" for home in before.values()) < 140


def test_the_smallest_worker_bounds_the_context() -> None:
    view = ClusterView((worker("p", Role.PREFILL, tokens=900), worker("d", Role.DECODE, tokens=700), E0))
    assert view.context_tokens(4096) == 700
    assert view.context_tokens(512) == 512
    assert ClusterView(()).context_tokens(512) == 512


# --- the line ---------------------------------------------------------------------------------------------------------


class Room:
    """Answers requests for room, and remembers who asked."""

    def __init__(self) -> None:
        self.free = 0
        self.asked: list[str] = []

    async def ask(self, name: str) -> str | None:
        self.asked.append(name)
        await asyncio.sleep(0)
        if not self.free:
            return None
        self.free -= 1
        return name


async def test_first_come_first_served() -> None:
    queue, room, served = AdmissionQueue(10), Room(), []

    async def one(name: str) -> None:
        served.append(await queue.admit(lambda: room.ask(name)))

    async with asyncio.TaskGroup() as group:
        for name in "abcd":
            group.create_task(one(name))
            await asyncio.sleep(0.005)
        assert queue.waiting == 4
        assert set(room.asked[1:]) == {"a"}, "only the first in line asks"
        room.free = 4
        queue.room_may_be_free()
    assert served == list("abcd")
    assert queue.waiting == 0


async def test_one_that_gives_up_leaves_the_line() -> None:
    queue, room = AdmissionQueue(10), Room()
    first = asyncio.create_task(queue.admit(lambda: room.ask("a")))
    await asyncio.sleep(0.01)
    second = asyncio.create_task(queue.admit(lambda: room.ask("b")))
    await asyncio.sleep(0.01)
    first.cancel()
    room.free = 1
    async with asyncio.timeout(1):
        assert await second == "b"


async def test_the_line_is_bounded() -> None:
    queue, room = AdmissionQueue(1), Room()
    first = asyncio.create_task(queue.admit(lambda: room.ask("a")))
    await asyncio.sleep(0.01)
    with pytest.raises(Overloaded):
        await queue.admit(lambda: room.ask("b"))
    first.cancel()
    none_may_wait = AdmissionQueue(0)
    with pytest.raises(Overloaded):
        await none_may_wait.admit(lambda: room.ask("c"))


async def test_an_error_of_the_first_does_not_stop_the_line() -> None:
    queue, room = AdmissionQueue(10), Room()

    async def fail() -> str | None:
        if room.free:
            raise PeerLost("gone")
        return None

    first = asyncio.create_task(queue.admit(fail))
    await asyncio.sleep(0.01)
    second = asyncio.create_task(queue.admit(lambda: room.ask("b")))
    await asyncio.sleep(0.01)
    room.free = 1
    with pytest.raises(PeerLost):
        await first
    assert await second == "b"


# --- tasks ------------------------------------------------------------------------------------------------------------


def test_the_cause_is_told_rather_than_what_it_led_to() -> None:
    media, missing, room = MediaInvalid("m"), EmbeddingMissing("e"), NoRoom("n")
    assert most_telling([missing, room, media]) is media
    assert most_telling([missing, room]) is room
    assert most_telling([missing]) is missing
    bug = KeyError("bug")
    assert most_telling([media, bug]) is bug


async def test_a_group_fails_like_a_call() -> None:
    async def fail() -> None:
        raise AttemptError("x")

    with pytest.raises(AttemptError), unwrapped_group():
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())


async def test_an_owned_task_ends_with_its_block() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def leave() -> None:
        async with owned_task(work()):
            await asyncio.sleep(0)
            raise KeyError

    with pytest.raises(KeyError):
        await leave()
    assert ended.is_set()


async def test_first_of() -> None:
    async def value() -> int:
        return 3

    async def for_ever() -> None:
        await asyncio.Event().wait()

    async def fail() -> int:
        raise MediaInvalid("x")

    async def at_once() -> None:
        return

    assert await first_of(value(), for_ever) == 3
    assert await first_of(for_ever(), at_once) is None
    with pytest.raises(MediaInvalid):
        await first_of(fail(), for_ever)
