"""The router's pure pieces: order of tokens, choice of workers, the line of waiting requests, the text of an answer."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.app import Cluster
from services.router.placement import ClusterView, Path
from services.router.queue import AdmissionQueue
from services.router.tasks import first_of, most_telling, owned_task, unwrapped_group
from services.router.token_order import TokenOrder
from tests.unit.routing_house import candidates, encoder_shares, paths
from triptych.core.errors import (
    AttemptError,
    EmbeddingMissing,
    MediaInvalid,
    NoRoom,
    PeerLost,
    Saturated,
    Unavailable,
)
from triptych.core.kv_format import KvDtype
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
    return Item(Modality.IMAGE, hashlib.sha256(name.encode()).digest(), 4, (TokenRange(0, 0, 4),), Grid(1, 4, 4))


E0, E1, E2 = (worker(f"e-{number}", Role.ENCODER) for number in range(3))
P0, P1 = (worker(f"p-{number}", Role.PREFILL) for number in range(2))
D0, D1 = (worker(f"d-{number}", Role.DECODE) for number in range(2))
PD0 = worker("pd-0", Role.PREFILL, Role.DECODE)
EP0 = worker("ep-0", Role.ENCODER, Role.PREFILL)
MONO = worker("mono-0", *Role)


def test_only_ready_workers_with_the_same_weights_are_seen() -> None:
    others = replace(D0, worker_id="x", model_fingerprint=b"other")
    starting = worker("s", Role.DECODE, state=WorkerState.STARTING)
    view = ClusterView.of([D0, others, starting, replace(D1, model_fingerprint=b"mine")], b"mine")
    assert [found.worker_id for found in view.workers] == ["d-0", "d-1"]
    assert view.missing_roles() == (Role.ENCODER, Role.PREFILL)


def test_a_worker_with_other_weights_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    stranger = replace(D0, model_fingerprint=b"other")
    cluster = Cluster(
        SimpleNamespace(workers=lambda: (stranger,)),
        cast(Adapter, SimpleNamespace(fingerprint=b"mine", modalities=(Modality.IMAGE,))),
    )
    for _ in range(2):
        cluster.warn_of_strangers([stranger, D1, replace(P0, model_fingerprint=b"mine")])
    assert [record.__dict__["worker_id"] for record in caplog.records] == ["d-0"]
    assert Role.DECODE in cluster.missing_roles()


PICTURE = {0: item("a")}


def chosen(view: ClusterView, turn: int = 0, pictures: bool = True) -> Path:
    return paths(view, PICTURE if pictures else {}, turn)[0]


def route(path: Path) -> str:
    """The ids of its workers, against the stream."""
    return " ".join(found.worker_id for found in (path.decode, path.prefill, *path.encoders))


def routes(view: ClusterView, turns: int, pictures: bool = True) -> Counter[str]:
    """What is asked first, over so many turns."""
    return Counter(route(chosen(view, turn, pictures)) for turn in range(turns))


def test_decode_workers_take_turns() -> None:
    view = ClusterView((E0, D0, D1, P0))
    assert [path.decode for path in paths(view, {}, 0)] == [D0, D1]
    assert [path.decode for path in paths(view, {}, 1)] == [D1, D0]
    with pytest.raises(Unavailable, match="prefill"):
        paths(ClusterView((E0, D0)), {}, 0)
    with pytest.raises(Unavailable, match="decode"):
        paths(ClusterView((E0, P0)), {}, 0)


def test_every_pair_of_prefill_and_decode_workers_comes_up_equally_often() -> None:
    pairs = [f"{decode} {prefill} e-0" for decode in ("d-0", "d-1") for prefill in ("p-0", "p-1")]
    assert routes(ClusterView((E0, P0, P1, D0, D1)), 40) == dict.fromkeys(pairs, 10)


def test_roles_of_one_process_stay_together() -> None:
    assert chosen(ClusterView((E0, MONO))) == Path(MONO, MONO, (MONO,))
    assert chosen(ClusterView((E0, PD0))) == Path(PD0, PD0, (E0,))
    assert chosen(ClusterView((EP0, D0))) == Path(D0, EP0, (EP0,))
    assert chosen(ClusterView((E0, P0, D0))) == Path(D0, P0, (E0,))


def test_text_needs_no_encoder() -> None:
    view = ClusterView((P0, D0))
    assert chosen(view, pictures=False) == Path(D0, P0, ())
    assert view.missing_roles() == (Role.ENCODER,)
    with pytest.raises(Unavailable, match="encoder"):
        chosen(view)


def test_in_a_mixed_pool_all_take_turns_and_nobody_borrows() -> None:
    mixed = ClusterView((E0, P0, P1, D0, MONO))
    assert routes(mixed, 8) == {"d-0 p-0 e-0": 2, "d-0 p-1 e-0": 2, "mono-0 mono-0 mono-0": 4}


def test_a_path_that_would_borrow_a_tower_comes_after_those_that_need_not() -> None:
    """Two workers that do it alone share the load evenly; the bare pair is asked only when they are full."""
    view = ClusterView((P0, D0, MONO, worker("mono-1", *Role)))
    assert routes(view, 6) == {"mono-0 mono-0 mono-0": 3, "mono-1 mono-1 mono-1": 3}
    assert route(paths(view, PICTURE, 0)[-1]) == "d-0 p-0 mono-0 mono-1"
    assert set(routes(view, 3, pictures=False)) == {"d-0 p-0", "mono-0 mono-0", "mono-1 mono-1"}


def test_a_worker_that_can_do_more_helps_where_there_is_no_other() -> None:
    assert chosen(ClusterView((E0, D0, PD0)), 0).decode == PD0
    assert paths(ClusterView((E0, D0, PD0)), PICTURE, 0)[1] == Path(D0, PD0, (E0,))
    assert chosen(ClusterView((P0, D0, EP0)), 0) == Path(D0, EP0, (EP0,))


def test_avoided_workers_are_the_last_resort() -> None:
    avoid = frozenset({"p-0"})
    assert set(routes(ClusterView((E0, P0, P1, D0), avoid), 4)) == {"d-0 p-1 e-0"}
    assert chosen(ClusterView((E0, P0, D0), avoid)).prefill == P0
    assert chosen(ClusterView((E0, P0, D0, MONO), avoid)) == Path(MONO, MONO, (MONO,))
    assert chosen(ClusterView((E0, P0, D0, MONO), frozenset({"mono-0"})), 1).decode == D0
    assert chosen(ClusterView((E0, E1, P0, D0), frozenset({"e-0"}))).encoders == (E1,)


def test_only_workers_that_can_send_to_each_other_make_a_path() -> None:
    """Whatever differs, the workers of a kind serve each other; one that fits nobody is left out."""
    here: dict[str, Any] = {
        "transports": ("inproc", "shm"),
        "host_id": "here",
        "kv_layout": b"k" * 32,
        "embedding_layout": b"e" * 32,
    }
    differences: list[dict[str, Any]] = [
        {"kv_layout": b"K" * 32, "embedding_layout": b"E" * 32},
        {"transports": ("inproc", "zmq-tcp")},
        {"host_id": "there"},
    ]
    for difference in differences:
        ones = [replace(found, **here) for found in (E0, P0, D0)]
        others = [replace(found, **(here | difference)) for found in (E1, P1, D1)]
        assert set(routes(ClusterView((*ones, *others)), 8)) == {"d-0 p-0 e-0", "d-1 p-1 e-1"}
        assert set(routes(ClusterView((*ones, others[2])), 8)) == {"d-0 p-0 e-0"}
        for pool in ((*ones[:2], others[2]), (others[0], *ones[1:])):
            with pytest.raises(Unavailable, match="cannot send to each other"):
                paths(ClusterView(pool), PICTURE, 0)
        assert set(routes(ClusterView((others[0], *ones[1:])), 2, pictures=False)) == {"d-0 p-0"}


def with_pool(found: WorkerInfo, page_tokens: int, dtype: KvDtype, *, may_narrow: bool = False) -> WorkerInfo:
    return replace(found, kv_layout=b"k" * 32, page_tokens=page_tokens, kv_dtype=dtype, may_narrow_kv=may_narrow)


def test_pools_with_other_pages_are_joined_like_any() -> None:
    (p0, p1), (d0, d1) = (
        [with_pool(found, size, KvDtype.FLOAT32) for found, size in zip(pair, (16, 24), strict=True)]
        for pair in ((P0, P1), (D0, D1))
    )
    pairs = [f"{decode} {prefill}" for decode in ("d-0", "d-1") for prefill in ("p-0", "p-1")]
    assert routes(ClusterView((p0, p1, d0, d1)), 8, pictures=False) == dict.fromkeys(pairs, 2)


def test_those_who_compute_alike_are_joined_before_others() -> None:
    wide, narrow = with_pool(P0, 16, KvDtype.FLOAT32), with_pool(P1, 16, KvDtype.BFLOAT16)
    decode = with_pool(D0, 16, KvDtype.FLOAT32)
    assert routes(ClusterView((wide, narrow, decode)), 4, pictures=False) == {"d-0 p-0": 4}
    assert routes(ClusterView((wide, narrow, decode), frozenset({"p-0"})), 4, pictures=False) == {"d-0 p-1": 4}
    assert routes(ClusterView((narrow, decode)), 2, pictures=False) == {"d-0 p-1": 2}
    other = with_pool(D1, 16, KvDtype.BFLOAT16)
    assert set(routes(ClusterView((narrow, decode, other)), 4, pictures=False)) == {"d-1 p-1"}
    assert [path.decode for path in paths(ClusterView((narrow, decode, other)), {}, 0)] == [other, decode]


def test_nothing_is_rounded_that_both_do_not_allow() -> None:
    for ours, theirs in itertools.product((False, True), repeat=2):
        view = ClusterView(
            (
                with_pool(P0, 16, KvDtype.FLOAT32, may_narrow=ours),
                with_pool(D0, 16, KvDtype.BFLOAT16, may_narrow=theirs),
            )
        )
        if ours and theirs:
            assert route(chosen(view, pictures=False)) == "d-0 p-0"
        else:
            with pytest.raises(Unavailable, match="--allow-kv-narrowing"):
                paths(view, {}, 0)


def pools() -> st.SearchStrategy[list[WorkerInfo]]:
    some_roles = st.frozensets(st.sampled_from(list(Role)), min_size=1)
    return st.lists(some_roles, max_size=6).map(
        lambda pool: [worker(f"w-{number}", *roles) for number, roles in enumerate(pool)]
    )


def complete_paths(pool: Sequence[WorkerInfo], pictures: bool) -> set[tuple[str, ...]]:
    """Every choice of one worker a stage that could serve a request, by brute force over the rule itself: what a worker
    decodes it has prefilled if it can, and a worker with a tower embeds what it prefills."""
    found = set()
    for decode, prefill, encoder in itertools.product(pool, pool, pool):
        able = Role.DECODE in decode.roles and Role.PREFILL in prefill.roles
        together = prefill == decode or Role.PREFILL not in decode.roles
        sees = Role.ENCODER in encoder.roles and (encoder == prefill or Role.ENCODER not in prefill.roles)
        if able and together and (sees or not pictures):
            ids = (decode.worker_id, prefill.worker_id)
            found.add((*ids, encoder.worker_id) if pictures else ids)
    return found


@settings(deadline=None)
@given(pools(), st.booleans(), st.integers(0, 50), st.data())
def test_a_path_is_found_whenever_there_is_one_and_it_avoids_what_it_can(
    pool: list[WorkerInfo], pictures: bool, turn: int, data: st.DataObject
) -> None:
    avoided = data.draw(st.frozensets(st.sampled_from([w.worker_id for w in pool]))) if pool else frozenset()
    view, items = ClusterView(tuple(pool), avoided), PICTURE if pictures else {}
    possible = complete_paths(pool, pictures)
    assert bool(possible) >= (not view.missing_roles())
    assert not pictures or bool(possible) == (not view.missing_roles())
    if not possible:
        with pytest.raises(Unavailable):
            paths(view, items, turn)
        return
    fewest = min(len(set(ids) & avoided) for ids in possible)
    for candidate in candidates(view, items, turn):
        path, encoders = candidate.forecast.path, encoder_shares(candidate).values()
        ids = tuple(found.worker_id for found in (path.decode, path.prefill, *encoders))
        assert ids in possible
        # Where every tower is avoided, the one of a decode worker that is avoided too is not thought of.
        all_towers_avoided = all(w.worker_id in avoided for w in pool if Role.ENCODER in w.roles)
        assert len(set(ids) & avoided) <= fewest + (pictures and all_towers_avoided)


@settings(deadline=None)
@given(pools(), st.integers(0, 10_000))
def test_no_worker_sees_anothers_pictures_beside_a_dedicated_encoder(pool: list[WorkerInfo], turn: int) -> None:
    view = ClusterView((E0, P0, D0, *pool))
    for path in paths(view, PICTURE, turn):
        assert path.encoders == (path.prefill,) or {len(found.roles) for found in path.encoders} == {1}
        assert path.prefill == path.decode or Role.DECODE not in path.prefill.roles


@settings(deadline=None)
@given(pools(), st.booleans())
def test_those_first_asked_take_equal_turns(pool: list[WorkerInfo], pictures: bool) -> None:
    view = ClusterView((E0, P0, D0, *pool))
    able = [found.worker_id for found in view.workers if Role.DECODE in found.roles]
    first = Counter(chosen(view, turn, pictures).decode.worker_id for turn in range(3 * len(able)))
    assert first == dict.fromkeys(able, 3)


def test_few_identities_move_when_an_encoder_leaves() -> None:
    items = {index: item(f"picture {index}") for index in range(300)}

    def homes(*encoders: WorkerInfo) -> dict[int, str]:
        (found,) = candidates(ClusterView((P0, D0, *encoders)), items, 0)
        return {index: encoder.worker_id for index, encoder in encoder_shares(found).items()}

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


async def test_those_that_had_room_and_lost_it_go_first_in_their_own_order() -> None:
    queue, room, served = AdmissionQueue(2), Room(), []

    async def one(admit: Callable[[Callable[[], Awaitable[str | None]]], Awaitable[str]], name: str) -> None:
        served.append(await admit(lambda: room.ask(name)))

    async with asyncio.TaskGroup() as group:
        for name in "ab":
            group.create_task(one(queue.admit, name))
            await asyncio.sleep(0.005)
        for name in "yz":
            group.create_task(one(queue.admit_again, name))
            await asyncio.sleep(0.005)
        room.asked.clear()
        await asyncio.sleep(0.12)
        assert set(room.asked) == {"y"}, "who stood first asks no more"
        for _ in range(4):
            room.free += 1
            queue.room_may_be_free()
            await asyncio.sleep(0.08)
    assert served == list("yzab")
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
    with pytest.raises(Saturated):
        await queue.admit(lambda: room.ask("b"))
    first.cancel()
    none_may_wait = AdmissionQueue(0)
    with pytest.raises(Saturated):
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
