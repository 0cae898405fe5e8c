from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.text.stop import StopMatcher


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    text = "".join(matcher.push(piece) for piece in pieces)
    return (text, True) if matcher.stopped else (text + matcher.flush(), False)


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition, read off the whole text: the earliest end, and of those that end there the longest."""
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop and stop in text]
    if not ends:
        return text, False
    end, minus_length = min(ends)
    return text[: end + minus_length], True


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "stopped"),
    [
        (["hello"], [], "hello", False),
        (["hello"], ["ll"], "he", True),
        (["he", "l", "l", "o"], ["ll"], "he", True),
        (["abab", "abc!"], ["ababc"], "aba"[:2], True),
        (["aaab"], ["aab"], "a", True),
        (["ab"], ["abc"], "ab", False),
        (["xabc"], ["abc", "b"], "xa", True),
        (["x\n", "\nUser:"], ["\n\nUser:", "\n\n"], "x", True),
        (["ends in stop"], ["stop"], "ends in ", True),
        (["", "a", ""], ["", "a"], "", True),
        (["日本", "語です"], ["本語"], "日", True),
    ],
)
def test_cuts(pieces: list[str], stops: list[str], text: str, stopped: bool) -> None:
    assert run(pieces, stops) == (text, stopped)


@given(
    st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=5), max_size=4), st.integers(0, 2**32 - 1)
)
def test_the_pieces_make_no_difference(text: str, stops: list[str], seed: int) -> None:
    rng = random.Random(seed)
    pieces: list[str] = []
    start = 0
    while start < len(text):
        size = rng.randrange(1, 5)
        pieces.append(text[start : start + size])
        start += size
    assert run(pieces, stops) == expected(text, stops)


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_nothing_of_a_stop_string_is_ever_released(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    released = ""
    for char in text:
        released += matcher.push(char)
        assert expected(text, stops)[0].startswith(released)


def test_what_can_be_released_is_released_at_once() -> None:
    matcher = StopMatcher(["xyz"])
    assert matcher.push("abc") == "abc"
    assert matcher.push("dx") == "d"
    assert matcher.push("yq") == "xyq"


def test_nothing_comes_after_the_stop() -> None:
    matcher = StopMatcher(["b"])
    assert matcher.push("abc") == "a"
    assert matcher.stopped
    assert matcher.push("more") == ""
    assert matcher.flush() == ""


def test_what_is_passed_over_does_not_stop_but_may_begin_a_stop() -> None:
    matcher = StopMatcher(["abc"])
    assert matcher.pass_over("abcab") == "abc"
    assert not matcher.stopped
    assert matcher.push("cd") == ""
    assert matcher.stopped


def test_what_was_passed_over_and_came_to_nothing_is_released() -> None:
    matcher = StopMatcher(["abc"])
    assert matcher.pass_over("xab") == "x"
    assert matcher.push("d") == "abd"
    assert matcher.pass_over("ab") == ""
    assert matcher.flush() == "ab"
