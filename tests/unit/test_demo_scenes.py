"""The demo model's scenes are reproducible, say the truth, and never leak from evaluation into training."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from scripts.demo_model import tokenizer as tokenizers_of_ours
from scripts.demo_model.exam import ANSWER_COUNTS, answer_key, chance, failures, make_exam, report
from scripts.demo_model.questions import (
    FACTS,
    about_nothing,
    about_picture,
    about_pictures,
    informative_spans,
)
from scripts.demo_model.scenes import (
    CLASSES,
    COLOURS,
    DIGITS,
    EVALUATION_BASE,
    MAX_TOKENS,
    Scene,
    all_grids,
    draw,
    evaluation_seed,
    grid_of,
    kinds_for,
    make_scene,
    noise_picture,
    slots_for,
    token_labels,
    training_seed,
)

runs = st.integers(0, 2**16 - 1)
indices = st.integers(0, 2**32 - 1)
scenes = st.builds(make_scene, st.builds(training_seed, runs, indices))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizers_of_ours.build(0)


@given(runs, indices, runs, indices)
def test_training_and_evaluation_seeds_never_meet(run: int, index: int, other: int, far: int) -> None:
    assert training_seed(run, index) < EVALUATION_BASE <= evaluation_seed(other, far)


@pytest.mark.parametrize(("run", "index"), [(-1, 0), (1 << 16, 0), (0, -1), (0, 1 << 32)])
def test_seeds_out_of_range_are_refused(run: int, index: int) -> None:
    with pytest.raises(ValueError, match="must be between"):
        training_seed(run, index)
    with pytest.raises(ValueError, match="must be between"):
        evaluation_seed(run, index)


@settings(max_examples=20)
@given(runs, indices)
def test_a_seed_always_gives_the_same_pixels(run: int, index: int) -> None:
    seed = evaluation_seed(run, index)
    first, second = make_scene(seed), make_scene(seed)
    assert first == second
    assert draw(first).tobytes() == draw(second).tobytes()
    assert noise_picture(seed).tobytes() == noise_picture(seed).tobytes()


@given(scenes)
def test_a_scene_keeps_to_its_grid_and_kind(scene: Scene) -> None:
    assert scene.grid in all_grids()
    assert scene.grid[0] * scene.grid[1] <= MAX_TOKENS
    assert grid_of(*scene.size) == scene.grid
    assert scene.kind in kinds_for(scene.grid)
    slots = [item.slot for item in scene.items if item.slot]
    assert len(set(slots)) == len(slots) == (len(scene.items) if scene.kind == "many" else 0)
    assert set(slots) <= set(slots_for(scene.grid))


@settings(max_examples=40)
@given(scenes)
def test_pixels_show_what_the_scene_says(scene: Scene) -> None:
    pixels = np.asarray(draw(scene), np.float32)
    height, width = pixels.shape[:2]
    for item in scene.items:
        if item.what in DIGITS:
            continue
        x, y = int(item.x * width), int(item.y * height)
        seen = pixels[max(0, y - 1) : y + 2, max(0, x - 1) : x + 2].mean((0, 1))
        assert np.abs(seen - np.asarray(item.rgb)).max() < 25


def _names(scene: Scene) -> tuple[set[str], set[str]]:
    colours, classes = token_labels(scene)
    assert colours.shape == classes.shape == (scene.grid[0] * scene.grid[1],)
    return {list(COLOURS)[c - 1] for c in colours if c}, {CLASSES[c - 1] for c in classes if c}


@given(scenes)
def test_token_labels_name_nothing_but_the_items(scene: Scene) -> None:
    colours, classes = _names(scene)
    assert colours <= {item.colour for item in scene.items}
    assert classes <= {item.what for item in scene.items}
    # In one scene of 20,000 the neighbours of an item show more of themselves in each of its tokens.
    assert len({item.what for item in scene.items} - classes) <= (scene.kind == "many")


@pytest.mark.parametrize("seed", [*range(200), 12532714572646, 59317793325272])
def test_token_labels_name_every_item(seed: int) -> None:
    """The last two seeds hold items too small to fill a tenth of any token."""
    scene = make_scene(seed)
    assert _names(scene) == ({item.colour for item in scene.items}, {item.what for item in scene.items})


@given(scenes)
def test_answers_follow_from_the_items(scene: Scene) -> None:
    for turn in about_picture(scene):
        key = answer_key(turn)
        if turn.kind == "count":
            assert key == (("no", "one", "two", "three", "four")[len(scene.items)],)
        if turn.kind in ("colour", "digit colour"):
            assert [i.colour for i in scene.items if i.what in turn.question or i.what in DIGITS] == [*key]
        if turn.kind == "shape":
            assert [i.what for i in scene.items if i.colour in turn.question] == [*key]
        if turn.kind == "position":
            (item,) = (i for i in scene.items if i.slot and i.slot in turn.question)
            assert key == (item.colour, item.what)


@given(scenes, scenes)
def test_numbered_questions_are_about_their_own_picture(first: Scene, second: Scene) -> None:
    for turn in about_pictures([first, second]):
        asked = first if "picture 1" in turn.question else second
        if turn.kind == "colour in picture k":
            assert answer_key(turn) == (asked.items[0].colour,)
        if turn.kind == "digit in picture k":
            assert answer_key(turn) == (asked.items[0].what,)


@settings(max_examples=25)
@given(scenes, scenes, st.integers(0, 2**32))
def test_questions_and_answers_survive_the_tokenizer(
    tokenizer: Tokenizer, first: Scene, second: Scene, seed: int
) -> None:
    turns = [*about_picture(first), *about_pictures([first, second]), about_nothing(random.Random(seed))]
    for text in (text for turn in turns for text in (turn.question, turn.answer)):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text
        assert len(ids) <= 60


def test_special_tokens_come_last_and_stay_whole(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.token_to_id(token) for token in tokenizers_of_ours.SPECIAL_TOKENS]
    assert ids == list(range(tokenizer.get_vocab_size() - len(ids), tokenizer.get_vocab_size()))
    text = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Which digit is shown?<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_each_fact_has_something_to_weigh() -> None:
    unweighed = [answer for answer in FACTS.values() if not informative_spans(answer)]
    assert unweighed == ["I can name shapes, colours and digits in pictures."]


def test_the_exam_is_balanced_and_uses_no_training_seed() -> None:
    exam = make_exam(3, 40)
    for kind, answers in ANSWER_COUNTS.items():
        assert len(exam.types[kind]) == 40
        if answers:
            assert chance(exam.types[kind]) <= -(-40 // answers) / 40
    assert all(seed >= EVALUATION_BASE for asked in exam.blind.values() for q in asked for seed in q.noise_seeds)
    assert all(pair.straight.truth != pair.swapped.truth for pair in exam.swap)


def test_perfect_answers_fail_only_the_blind_part() -> None:
    exam = make_exam(4, 20)
    sighted = {q: q.truth for q in exam.questions()}
    missed = failures(report(exam, sighted, 4))
    assert missed
    assert all(sentence.startswith("blind") for sentence in missed)
    unsighted = {q: "" if q.noise_seeds else q.truth for q in exam.questions()}
    assert any("chance is" in sentence for sentence in failures(report(exam, unsighted, 4)))
