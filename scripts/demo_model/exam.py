"""The demo model's exam: fresh scenes, the questions on them, and what counts as passing.

Pure: it makes questions from evaluation seeds and judges answers; asking is done elsewhere. Answers of each type
are balanced, so that a model that cannot see the picture gets no more than one answer in as many as there are.
"""

from __future__ import annotations

import base64
import io
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scripts.demo_model.questions import (
    INFORMATIVE,
    SYSTEM_PROMPTS,
    Turn,
    about_nothing,
    about_picture,
    about_pictures,
)
from scripts.demo_model.scenes import Kind, Scene, draw, evaluation_seed, make_scene, noise_picture, pick_grid

ANSWER_COUNTS = {
    "colour": 7,
    "shape": 5,
    "count": 4,
    "digit": 10,
    "digit colour": 7,
    "position": 35,
    "describe": 0,
    "colour in picture k": 7,
    "shape in picture k": 5,
    "count in picture k": 4,
    "digit in picture k": 10,
    "describe picture k": 0,
}
"""The picture types, with how many answers each has; 0 where every picture has its own."""

REQUIRED_TYPES = (
    "colour",
    "shape",
    "count",
    "digit",
    "position",
    "colour in picture k",
    "shape in picture k",
)
TEXT_TYPES = ("sum", "repeat", "fact")
FORMS = ("system prompt", "text first", "follow-up", "three pictures")
SWAP_TYPES: dict[str, Kind] = {
    "colour in picture k": "one",
    "shape in picture k": "one",
    "digit in picture k": "digit",
}

PASS_ACCURACY = 0.97
BLIND_MARGIN = 0.05
FEWEST_TYPES = 8
_SCENES_PER_TYPE = 1 << 22


@dataclass(frozen=True, slots=True)
class Question:
    """One request of the exam. `before` is a question and its answer that came earlier in the conversation."""

    kind: str
    scenes: tuple[Scene, ...]
    turn: Turn
    noise_seeds: tuple[int, ...] = ()
    system: str | None = None
    before: Turn | None = None
    text_first: bool = False

    @property
    def truth(self) -> str:
        return self.turn.answer

    def is_right(self, answer: str) -> bool:
        return answer.strip() == self.truth


@dataclass(frozen=True, slots=True)
class Pair:
    """The same question on two pictures in either order; the truths differ."""

    straight: Question
    swapped: Question


@dataclass(frozen=True, slots=True)
class Exam:
    types: dict[str, list[Question]]
    blind: dict[str, list[Question]]
    swap: list[Pair]
    text: dict[str, list[Question]]
    forms: dict[str, list[Question]]

    def questions(self) -> list[Question]:
        """All of them, in one fixed order, each once."""
        groups = [*self.types.values(), *self.blind.values(), *self.text.values(), *self.forms.values()]
        return [q for group in groups for q in group] + [q for p in self.swap for q in (p.straight, p.swapped)]


def make_exam(seed: int, per_type: int) -> Exam:
    """The exam of run `seed`: `per_type` questions of each type; forms of asking get a fifth of that."""
    types = {kind: _of_kind(seed, kind, per_type) for kind in ANSWER_COUNTS}
    blind = {kind: [_blinded(q, seed, n) for n, q in enumerate(asked)] for kind, asked in types.items()}
    text = {kind: _text_questions(seed, kind, per_type) for kind in TEXT_TYPES}
    forms = {form: _form_questions(seed, form, max(1, per_type // 5)) for form in FORMS}
    return Exam(types, blind, _pairs(seed, per_type), text, forms)


def answer_key(turn: Turn) -> tuple[str, ...]:
    """The informative words of the answer that the question does not give away."""
    given = Counter(_words(turn.question))
    key = []
    for word in reversed(_words(turn.answer)):
        given[word] -= 1
        if given[word] < 0 and word in INFORMATIVE:
            key.append(word)
    return tuple(reversed(key))


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z]+|\d", text)


def _of_kind(seed: int, kind: str, count: int) -> list[Question]:
    """Questions of one type, no answer more often than an equal share."""
    answers = ANSWER_COUNTS[kind]
    quota = math.ceil(count / answers) if answers else count
    used: Counter[tuple[str, ...]] = Counter()
    chosen: list[Question] = []
    for question in _stream(seed, list(ANSWER_COUNTS).index(kind), kind):
        key = answer_key(question.turn)
        if used[key] < quota:
            used[key] += 1
            chosen.append(question)
        if len(chosen) == count:
            break
    return chosen


def _stream(seed: int, lane: int, kind: str) -> Iterator[Question]:
    """Questions of a type on ever new scenes; `lane` keeps the seeds of different uses apart."""
    for index in range(_SCENES_PER_TYPE // 4):
        first = lane * _SCENES_PER_TYPE + 4 * index
        rng = random.Random(evaluation_seed(seed, first))
        scenes = _scenes(seed, first, 2 if kind.endswith("k") else 1)
        turns = about_picture(scenes[0]) if len(scenes) == 1 else about_pictures(scenes)
        fitting = [turn for turn in turns if turn.kind == kind]
        if fitting:
            yield Question(kind, scenes, rng.choice(fitting))


def _scenes(seed: int, first: int, count: int) -> tuple[Scene, ...]:
    seeds = [evaluation_seed(seed, first + k) for k in range(count)]
    return tuple(make_scene(s, pick_grid(random.Random(s), _most_tokens(count))) for s in seeds)


def _most_tokens(pictures: int) -> int:
    return {1: 64, 2: 64, 3: 16}[pictures]


def _blinded(question: Question, seed: int, number: int) -> Question:
    lane = 32 + list(ANSWER_COUNTS).index(question.kind)
    first = lane * _SCENES_PER_TYPE + 4 * number
    return replace(question, noise_seeds=tuple(evaluation_seed(seed, first + k) for k in range(len(question.scenes))))


def _pairs(seed: int, count: int) -> list[Pair]:
    pairs: list[Pair] = []
    index = 64 * _SCENES_PER_TYPE
    while len(pairs) < count:
        kind = list(SWAP_TYPES)[len(pairs) % len(SWAP_TYPES)]
        a, b = (make_scene(evaluation_seed(seed, index + k), kind=SWAP_TYPES[kind]) for k in range(2))
        straight, swapped = (_numbered(kind, scenes, 1 + index // 2 % 2) for scenes in ((a, b), (b, a)))
        if straight.truth != swapped.truth:
            pairs.append(Pair(straight, swapped))
        index += 2
    return pairs


def _numbered(kind: str, scenes: tuple[Scene, ...], number: int) -> Question:
    turn = next(t for t in about_pictures(scenes) if t.kind == kind and f"picture {number}" in t.question)
    return Question(kind, scenes, turn)


def _text_questions(seed: int, kind: str, count: int) -> list[Question]:
    rng = random.Random(evaluation_seed(seed, (70 + TEXT_TYPES.index(kind)) * _SCENES_PER_TYPE))
    chosen: list[Question] = []
    while len(chosen) < count:
        turn = about_nothing(rng)
        if turn.kind == kind:
            chosen.append(Question(kind, (), turn))
    return chosen


def _form_questions(seed: int, form: str, count: int) -> list[Question]:
    make = _FORM_MAKERS[form]
    first = (80 + FORMS.index(form)) * _SCENES_PER_TYPE
    return [make(form, seed, first + 4 * n) for n in range(count)]


def _any(form: str, seed: int, first: int, pictures: int = 1) -> Question:
    scenes = _scenes(seed, first, pictures)
    turns = about_picture(scenes[0]) if pictures == 1 else about_pictures(scenes)
    rng = random.Random(evaluation_seed(seed, first))
    return Question(form, scenes, rng.choice(turns), before=rng.choice(turns), system=rng.choice(SYSTEM_PROMPTS))


_FORM_MAKERS: dict[str, Callable[[str, int, int], Question]] = {
    "system prompt": lambda form, seed, first: replace(_any(form, seed, first), before=None),
    "text first": lambda form, seed, first: replace(_any(form, seed, first), before=None, system=None, text_first=True),
    "follow-up": lambda form, seed, first: replace(_any(form, seed, first), system=None),
    "three pictures": lambda form, seed, first: replace(_any(form, seed, first, 3), before=None, system=None),
}


def messages(question: Question) -> list[dict[str, Any]]:
    """The question as the messages of a chat completion; pictures are PNG data URLs."""
    asked = question.before or question.turn
    text = {"type": "text", "text": asked.question}
    parts = [text, *_picture_parts(question)] if question.text_first else [*_picture_parts(question), text]
    written: list[dict[str, Any]] = []
    if question.system:
        written.append({"role": "system", "content": question.system})
    written.append({"role": "user", "content": parts})
    if question.before:
        written.append({"role": "assistant", "content": question.before.answer})
        written.append({"role": "user", "content": question.turn.question})
    return written


def _picture_parts(question: Question) -> list[dict[str, Any]]:
    pictures = [noise_picture(s) for s in question.noise_seeds] or [draw(scene) for scene in question.scenes]
    parts = []
    for picture in pictures:
        file = io.BytesIO()
        picture.save(file, "PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return parts


def chance(questions: Sequence[Question]) -> float:
    """The share of the commonest answer: what always giving that one would score."""
    keys = Counter(answer_key(q.turn) for q in questions)
    return max(keys.values()) / len(questions)


def report(exam: Exam, answers: dict[Question, str], seed: int) -> dict[str, Any]:
    """The results as they are written to JSON."""

    def scored(asked: Sequence[Question]) -> dict[str, float]:
        return {"accuracy": sum(q.is_right(answers[q]) for q in asked) / len(asked), "n": len(asked)}

    def flipped(pair: Pair) -> bool:
        return all(q.is_right(answers[q]) for q in (pair.straight, pair.swapped))

    return {
        "types": {kind: scored(asked) for kind, asked in exam.types.items()},
        "blind": {kind: {**scored(asked), "chance": chance(asked)} for kind, asked in exam.blind.items()},
        "swap": {"flipped": sum(map(flipped, exam.swap)) / len(exam.swap), "n": len(exam.swap)},
        "text": {kind: scored(asked) for kind, asked in exam.text.items()},
        "forms": {form: scored(asked) for form, asked in exam.forms.items()},
        "seed": seed,
    }


def failures(results: dict[str, Any]) -> list[str]:
    """A sentence for each bar that is missed; none means passed. Text and forms are told, not judged."""
    types = results["types"]
    missing = [kind for kind in REQUIRED_TYPES if kind not in types]
    found = [f"the type '{kind}' is missing" for kind in missing]
    if len(types) < FEWEST_TYPES:
        found.append(f"only {len(types)} picture types, {FEWEST_TYPES} are required")
    for kind, got in types.items():
        if got["accuracy"] < PASS_ACCURACY:
            found.append(f"'{kind}' reaches {got['accuracy']:.3f}, below {PASS_ACCURACY}")
    for kind, got in results["blind"].items():
        if abs(got["accuracy"] - got["chance"]) > BLIND_MARGIN:
            found.append(f"blind '{kind}' reaches {got['accuracy']:.3f}, chance is {got['chance']:.3f}")
    if results["swap"]["flipped"] < PASS_ACCURACY:
        found.append(f"swapping flips {results['swap']['flipped']:.3f}, below {PASS_ACCURACY}")
    return found
