"""The step loop over a language model that can be computed in the head: what it runs, from which cache, for whom."""

from __future__ import annotations

import pytest

from tests.unit.engine_house import (
    PAGE,
    ROW_BYTES,
    House,
    PoolOfAnother,
    answer_of,
    heard,
)
from triptych.core.errors import Aborted
from triptych.core.lifecycle import Phase
from triptych.core.plan import EmbeddingSource, FinishReason, Token
from triptych.engine.loop import missing_items


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
    assert heard(sequence).story == ["admitted", "handed_off"]
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
    house.manager.credit(2)
    pages = house.manager.bind_credit(2)
    for index, value in enumerate([1, 2, 3, 4, 5, 6]):
        house.runner.cells[pages[index // PAGE], index % PAGE] = value
    sequence.pages = house.manager.own_leased(pages)
    house.engine.adopt(sequence, Token(0, answer[0]))
    house.finish(sequence)
    assert [token.index for token in heard(sequence).tokens_seen] == [1, 2, 3, 4]
    assert [token.id for token in heard(sequence).tokens_seen] == answer[1:]
    assert house.is_clean
    assert house.manager.match_tokens(b"", [*sequence.ids, 0]) == 8, (
        "6 + 5 tokens, of which the last was never computed"
    )


def test_the_prompt_of_one_that_was_taken_over_serves_others_while_it_decodes() -> None:
    house = House()
    sequence = house.new([1, 2, 3, 4, 5, 6], max_tokens=5)
    house.manager.credit(2)
    sequence.pages = house.manager.own_leased(house.manager.bind_credit(2))
    house.engine.adopt(sequence, Token(0, answer_of(sequence)[0]))
    assert house.manager.match_tokens(b"", [1, 2, 3, 4, 9]) == 4
    house.engine.abort(sequence.ref, Aborted("the caller left"))
    assert house.is_clean and house.manager.counts()["cached"] == 1


def test_what_the_other_worker_holds_is_not_pushed() -> None:
    house = House(max_chunk=5)
    prompt = list(range(1, 15))
    sequence, target = house.submit(prompt, needs_handoff=True), PoolOfAnother(house.runner)
    house.turn()
    house.engine.bound(sequence.ref, target, num_held_pages=2)
    house.turn_until(lambda: "handed_off" in heard(sequence).story)
    assert sorted(target.pages) == [0, 1], "places in the grant, which begins behind what is held"
    assert target.values(6) == prompt[8:]
    assert heard(sequence).num_bytes == 200
