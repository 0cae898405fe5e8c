from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.unit.demo_dir import demo_model_dir
from triptych.text.detokenizer import IncrementalDetokenizer

TEXTS = ("hello world", "naïve café 日本語", "👩‍👩‍👧‍👦 family 🏳️‍🌈", "a\ufffdb", "é" * 30)


def load() -> Tokenizer:
    return Tokenizer.from_file(str(demo_model_dir() / "tokenizer.json"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load()


def pushed(tokenizer: Tokenizer, ids: list[int], sizes: random.Random | None = None) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces: list[str] = []
    start = 0
    while start < len(ids):
        end = start + (sizes.randrange(1, 5) if sizes else 1)
        pieces.append(detokenizer.push(ids[start:end]))
        start = end
    return "".join([*pieces, detokenizer.flush()])


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_random_ids_concatenate_to_the_full_decode(data: st.DataObject) -> None:
    tokenizer = _shared()
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=60))
    sizes = random.Random(data.draw(st.integers(0, 999)))
    assert pushed(tokenizer, ids, sizes) == tokenizer.decode(ids, skip_special_tokens=True)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_any_text_survives(text: str) -> None:
    tokenizer = _shared()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert pushed(tokenizer, ids) == tokenizer.decode(ids, skip_special_tokens=True)


_loaded: list[Tokenizer] = []


def _shared() -> Tokenizer:
    """Hypothesis does not mix with fixtures of a module."""
    if not _loaded:
        _loaded.append(load())
    return _loaded[0]


@pytest.mark.parametrize("text", TEXTS)
def test_only_whole_characters_are_emitted(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    so_far = ""
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        so_far += detokenizer.push([token])
        assert text.startswith(so_far)
    assert so_far + detokenizer.flush() == text


def test_special_tokens_are_skipped(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    end = tokenizer.token_to_id("<|im_end|>")
    ids = tokenizer.encode("red", add_special_tokens=False).ids
    assert detokenizer.push([end, *ids, end]) + detokenizer.push([end]) + detokenizer.flush() == "red"


@pytest.mark.parametrize("token", ["Ń", "<|im_end|>"], ids=["invalid byte", "special token"])
def test_an_endless_run_of_what_cannot_be_shown_stays_linear(tokenizer: Tokenizer, token: str) -> None:
    """U+0143 stands for byte 0xAD in the byte-level alphabet: a continuation byte without a beginning."""
    run = tokenizer.token_to_id(token)
    assert run is not None
    detokenizer = IncrementalDetokenizer(tokenizer)
    started = time.perf_counter()
    for _ in range(20_000):
        detokenizer.push([run])
    detokenizer.flush()
    assert time.perf_counter() - started < 5
