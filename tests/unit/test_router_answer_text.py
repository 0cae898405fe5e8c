"""The text of an answer, and which tokens are shown with it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.router.answer_text import AnswerText
from tests.unit.demo_dir import demo_model_dir
from triptych.core.plan import Sampling, Token
from triptych.text.detokenizer import IncrementalDetokenizer
from triptych.text.token_bytes import TokenBytes

TOKENIZER = Tokenizer.from_file(str(demo_model_dir() / "tokenizer.json"))
BYTES = TokenBytes(TOKENIZER)
LETTERS = "ab c日👩é"
END = TOKENIZER.token_to_id("<|im_end|>")


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def spoken(
    ids: list[int], stops: list[str], sampling: Sampling | None = None, rng: random.Random | None = None
) -> tuple[str, list[int], AnswerText]:
    """Text and shown tokens of an answer that comes in pieces of random size."""
    text = AnswerText(IncrementalDetokenizer(TOKENIZER), stops, sampling or Sampling(99))
    tokens = [Token(index, token_id) for index, token_id in enumerate(ids)]
    pieces = []
    while tokens and not text.stopped:
        size = rng.randrange(1, 5) if rng else 1
        pieces.append(text.push(tokens[:size]))
        tokens = tokens[size:]
    if not text.stopped:
        pieces.append(text.finish())
    return "".join(piece.text for piece in pieces), [t.index for piece in pieces for t in piece.tokens], text


@settings(max_examples=300, deadline=None)
@given(
    st.text(alphabet="ab c日👩é", max_size=30),
    st.lists(st.text(alphabet="ab c日👩é", min_size=1, max_size=3), max_size=2),
)
def test_shown_tokens_cover_the_text_and_nothing_beyond_it(text: str, stops: list[str]) -> None:
    ids = ids_of(text)
    told, shown, _ = spoken(ids, stops, rng=random.Random(len(text)))
    first_stop = min((text.find(stop) + len(stop) for stop in stops if stop in text), default=None)
    assert text.startswith(told)
    if first_stop is None:
        assert told == text
    assert shown == list(range(len(shown))), "in order, each once"
    covered = b"".join(BYTES(ids[index]) for index in shown)
    assert covered.startswith(told.encode())
    if shown:
        without_last = b"".join(BYTES(ids[index]) for index in shown[:-1])
        # The last token has a part in the text's last character.
        assert len(without_last) < len(told.encode()) or len(told.encode()) == len(covered)


def test_a_token_that_ends_the_answer_is_counted_and_not_shown() -> None:
    red = ids_of("red")
    told, shown, text = spoken([*red, END], [], Sampling(99, stop_token_ids=frozenset({END})))
    assert (told, shown, text.num_tokens) == ("red", list(range(len(red))), len(red) + 1)
    assert not text.stopped, "the worker says why it ended"


def test_a_stop_token_that_is_no_special_one_is_not_shown_either() -> None:
    ids = ids_of("the square is red")
    told, shown, _ = spoken(ids, [], Sampling(99, stop_token_ids=frozenset({ids[-1]})))
    assert told == TOKENIZER.decode(ids[:-1])
    assert shown == list(range(len(ids) - 1))


def test_an_end_token_that_is_ignored_is_shown_without_text() -> None:
    red = ids_of("red")
    told, shown, _ = spoken([*red, END, *red], [])
    assert told == "redred"
    assert shown == list(range(2 * len(red) + 1))


def test_tokens_of_a_stop_string_are_not_shown() -> None:
    ids = ids_of("the square is red")
    told, shown, text = spoken(ids, [" is"])
    assert told == "the square" == b"".join(BYTES(ids[index]) for index in shown).decode()
    assert text.num_tokens <= len(ids)


def test_a_token_that_a_stop_string_cuts_in_two_is_shown() -> None:
    ids = ids_of("the square is red")
    assert " is" in [BYTES(token).decode() for token in ids], "a word's token begins with the space before it"
    told, shown, _ = spoken(ids, ["is"])
    assert told == "the square "
    assert b"".join(BYTES(ids[index]) for index in shown).decode() == "the square is"


@pytest.mark.parametrize(("min_tokens", "cut"), [(0, True), (1, True), (99, False)])
def test_stop_strings_are_not_heard_before_the_minimum(min_tokens: int, cut: bool) -> None:
    ids = ids_of("the square is red")
    told, _, text = spoken(ids, ["square"], Sampling(99, min_tokens=min_tokens))
    assert text.stopped == cut
    assert told == ("the " if cut else "the square is red")


def test_a_stop_string_counts_when_its_end_comes_after_the_minimum() -> None:
    ids = ids_of("the square is red and the square is blue")
    at = len(ids_of("the square is red and"))
    told, _, text = spoken(ids, ["square"], Sampling(99, min_tokens=at))
    assert text.stopped
    assert told == "the square is red and the "


def test_a_character_that_never_became_whole_keeps_its_tokens() -> None:
    ids = ids_of("a👩")[:-1]
    told, shown, _ = spoken(ids, [])
    assert told == TOKENIZER.decode(ids)
    assert shown == list(range(len(ids)))
