"""The next turn of a conversation goes to the workers that hold it, if they have room, and nobody else's does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.placement import ClusterView, Path
from services.router.routing.homes import Home, Homes
from services.router.routing.prompt import Prompt
from tests.unit.routing_house import paths
from tests.unit.test_router_parts import D0, D1, E0, MONO, P0, P1, PICTURE, pools
from triptych.core.errors import Unavailable
from triptych.core.plan import Grid, Item, Modality, Plan, Sampling, TokenRange
from triptych.core.worker import Role, WorkerInfo

HOME = Home(D1.ref, P1.ref)
QUESTION, ANSWER, NEXT = (5, *range(100, 140)), tuple(range(200, 210)), tuple(range(300, 330))


def plan(*ids: int, salt: bytes = b"", picture: bytes | None = None) -> Plan:
    """`picture`: what stands at the first place is one of that identity."""
    items: tuple[Item, ...] = ()
    if picture is not None:
        items = (Item(Modality.IMAGE, picture.ljust(32), 4, (TokenRange(0, 0, 4),), Grid(1, 4, 4)),)
    return Plan(tuple(ids), items, Sampling(8), 60.0, salt)


def prompt(asked: Plan, session: str | None = None) -> Prompt:
    return Prompt.of(asked, {16}, session)


def remembering(asked: Plan, session: str | None = None) -> Homes:
    homes = Homes()
    homes.remember(prompt(asked, session), HOME)
    return homes


def found(homes: Homes, asked: Plan) -> tuple[Home, int] | None:
    known = homes.find(prompt(asked))
    return None if known is None else (known.home, known.num_tokens)


def test_the_next_turn_is_known_and_so_are_those_after_it() -> None:
    """By the last full page of the question, 32 of its 41 tokens."""
    homes = remembering(plan(*QUESTION))
    assert found(homes, plan(*QUESTION, *ANSWER, *NEXT)) == (HOME, 32)
    assert found(homes, plan(*QUESTION, *ANSWER, *NEXT, *ANSWER, *NEXT)) == (HOME, 32)
    assert found(homes, plan(*QUESTION)) == (HOME, 32)


def test_the_longest_beginning_is_the_one_that_counts() -> None:
    homes, elsewhere = remembering(plan(*QUESTION)), Home(D0.ref, P0.ref)
    homes.remember(prompt(plan(*QUESTION, *ANSWER)), elsewhere)
    assert found(homes, plan(*QUESTION, *ANSWER, *NEXT)) == (elsewhere, 48)
    assert found(homes, plan(*QUESTION, *NEXT)) == (HOME, 32)


@pytest.mark.parametrize(
    "asked",
    [
        plan(*QUESTION[:20]),
        plan(*QUESTION[:20], *NEXT),
        plan(),
        plan(*QUESTION, *ANSWER, salt=b"tenant"),
        plan(*QUESTION, *ANSWER, picture=b"a"),
    ],
    ids=["less", "another question", "nothing", "another tenant", "a picture"],
)
def test_what_is_no_next_turn_has_no_home(asked: Plan) -> None:
    assert found(remembering(plan(*QUESTION)), asked) is None


def test_another_picture_is_another_conversation() -> None:
    homes = remembering(plan(*QUESTION, picture=b"a"))
    assert found(homes, plan(*QUESTION, *ANSWER, picture=b"a")) == (HOME, 32)
    assert found(homes, plan(*QUESTION, *ANSWER, picture=b"b")) is None


def test_a_session_has_a_home_of_its_tenants() -> None:
    homes = remembering(plan(*QUESTION), "s-1")
    assert homes.of_session(prompt(plan(*NEXT), "s-1")) == HOME
    assert homes.of_session(prompt(plan(*NEXT), "s-2")) is None
    assert homes.of_session(prompt(plan(*NEXT, salt=b"tenant"), "s-1")) is None
    assert homes.of_session(prompt(plan(*NEXT))) is None


def test_what_a_worker_has_dropped_is_not_believed_of_it() -> None:
    homes, asked = remembering(plan(*QUESTION)), prompt(plan(*QUESTION, *NEXT))
    homes.dropped_pages(P0.ref, asked.pages[16])
    assert homes.find(asked) is not None, "another worker's loss is not this one's"
    homes.dropped_pages(P1.ref, asked.pages[16][1:2])
    assert homes.find(asked) is None


def test_the_memory_is_bounded_and_what_is_used_stays() -> None:
    homes = Homes(max_conversations=2)
    asked = [prompt(plan(*[first] * 20)) for first in (1, 2, 3)]
    for each in asked[:2]:
        homes.remember(each, HOME)
    assert homes.find(asked[0])
    homes.remember(asked[2], HOME)
    assert [homes.find(each) is not None for each in asked] == [True, False, True]


# --- the choice -------------------------------------------------------------------------------------------------------

VIEW = ClusterView((E0, P0, P1, D0, D1))


@pytest.mark.parametrize("turn", range(4))
def test_the_workers_that_hold_the_conversation_are_asked_first_and_then_the_others(turn: int) -> None:
    asked = paths(VIEW, {}, turn, HOME)
    assert (asked[0].decode, asked[0].prefill) == (D1, P1)
    assert [path.decode for path in asked] == [D1, D0]


def test_a_worker_that_was_born_again_or_is_avoided_is_no_home() -> None:
    reborn = Home(replace(D1, epoch=7).ref, replace(P1, epoch=7).ref)
    assert [paths(VIEW, {}, turn, reborn)[0].decode for turn in range(2)] == [D0, D1]
    avoiding = replace(VIEW, avoided=frozenset({"d-1"}))
    assert paths(avoiding, {}, 1, HOME)[0].decode == D0


def test_where_the_prefill_worker_is_gone_decode_still_holds_the_conversation() -> None:
    path = paths(ClusterView((E0, P0, D0, D1)), {}, 0, HOME)[0]
    assert (path.decode, path.prefill) == (D1, P0)


def test_a_worker_that_does_all_is_a_home_too() -> None:
    home = Home(MONO.ref, MONO.ref)
    for turn in range(3):
        assert paths(ClusterView((E0, P0, D0, MONO)), PICTURE, turn, home)[0] == Path(MONO, MONO, (MONO,))


@settings(deadline=None)
@given(pools(), st.booleans(), st.integers(0, 50), st.data())
def test_a_home_changes_the_order_and_nothing_else(
    pool: list[WorkerInfo], pictures: bool, turn: int, data: st.DataObject
) -> None:
    view, items = ClusterView(tuple(pool)), PICTURE if pictures else {}
    try:
        without = paths(view, items, turn)
    except Unavailable:
        return
    decodes = [worker for worker in pool if Role.DECODE in worker.roles]
    prefills = [worker for worker in pool if Role.PREFILL in worker.roles]
    home = Home(data.draw(st.sampled_from(decodes)).ref, data.draw(st.sampled_from(prefills)).ref)
    asked = paths(view, items, turn, home)
    assert sorted(path.decode.worker_id for path in asked) == sorted(path.decode.worker_id for path in without)
