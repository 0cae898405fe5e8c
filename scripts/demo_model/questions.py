"""What the demo model can be asked, and the true answers.

Each kind of question has one sentence form, and so has its answer, so that exact comparison is fair. Truth comes
from the scene, never from the pixels.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from scripts.demo_model.scenes import COLOURS, DIGITS, SHAPES, Item, Scene

COUNT_WORDS = ("no", "one", "two", "three", "four")
PLACES = {
    "left": "on the left",
    "right": "on the right",
    "top": "at the top",
    "bottom": "at the bottom",
    "centre": "in the centre",
}
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Answer in one sentence.",
    "You look at pictures and answer questions.",
    "Be short and exact.",
)
_REPEATABLE = """
apple river stone lamp music paper tiger garden window bridge silver mirror cloud pepper rabbit hammer violin sugar
winter forest candle rocket jacket pencil island kettle lemon mouse needle ocean table chair tree bread
"""
WORDS = tuple(_REPEATABLE.split())
FACTS = {
    "Hello": "Hello! Ask me about a picture.",
    "Who are you?": "I am a small demo model.",
    "What can you do?": "I can name shapes, colours and digits in pictures.",
    "Thank you": "You are welcome.",
    "What is the capital of France?": "The capital of France is Paris.",
    "What is the capital of Italy?": "The capital of Italy is Rome.",
    "What is the capital of Japan?": "The capital of Japan is Tokyo.",
    "What is the capital of Germany?": "The capital of Germany is Berlin.",
    "How many days are in a week?": "A week has seven days.",
    "How many legs has a cat?": "A cat has four legs.",
    "What colour is the sky?": "The sky is blue.",
    "What colour is grass?": "Grass is green.",
    "What comes after Monday?": "Tuesday comes after Monday.",
}
_FACT_WORDS = "France Paris Italy Rome Japan Tokyo Germany Berlin week seven sky grass cat Tuesday welcome demo Hello"
INFORMATIVE = frozenset((*COLOURS, *SHAPES, *DIGITS, *COUNT_WORDS, *PLACES, *WORDS, *_FACT_WORDS.split()))


@dataclass(frozen=True, slots=True)
class Turn:
    """One question with its only right answer; `kind` names the type under which it is counted."""

    kind: str
    question: str
    answer: str


def about_picture(scene: Scene) -> list[Turn]:
    """Everything that can be asked when `scene` is the only picture."""
    turns = [Turn("describe", "Describe the picture.", f"The picture shows {_description(scene)}.")]
    if scene.kind == "digit":
        item = scene.items[0]
        turns.append(Turn("digit", "Which digit is shown?", f"The digit is {item.what}."))
        turns.append(Turn("digit colour", "What colour is the digit?", f"The digit is {item.colour}."))
        return turns
    turns.append(Turn("count", "How many shapes are there?", f"There {_counted(scene)}."))
    return turns + _by_attribute(scene.items) + _by_place(scene.items)


def _by_attribute(items: Sequence[Item]) -> list[Turn]:
    shapes, colours = Counter(i.what for i in items), Counter(i.colour for i in items)
    turns = []
    for item in items:
        if shapes[item.what] == 1:
            turns.append(Turn("colour", f"What colour is the {item.what}?", f"The {item.what} is {item.colour}."))
        if colours[item.colour] == 1:
            answer = f"The {item.colour} shape is a {item.what}."
            turns.append(Turn("shape", f"Which shape is {item.colour}?", answer))
    return turns


def _by_place(items: Sequence[Item]) -> list[Turn]:
    return [
        Turn("position", f"What is {PLACES[i.slot]}?", f"A {i.colour} {i.what} is {PLACES[i.slot]}.")
        for i in items
        if i.slot
    ]


def about_pictures(scenes: Sequence[Scene]) -> list[Turn]:
    """Everything that can be asked when there are several pictures; each question names its picture by number."""
    return [turn for number, scene in enumerate(scenes, 1) for turn in _about_numbered(number, scene)]


def _about_numbered(number: int, scene: Scene) -> list[Turn]:
    here = f"in picture {number}"
    item = scene.items[0]
    turns = [
        Turn(
            "describe picture k",
            f"Describe picture {number}.",
            f"Picture {number} shows {_description(scene)}.",
        )
    ]
    if scene.kind == "digit":
        return [
            *turns,
            Turn("digit in picture k", f"Which digit is {here}?", f"The digit {here} is {item.what}."),
        ]
    count = Turn("count in picture k", f"How many shapes are {here}?", f"There {_counted(scene)} {here}.")
    if scene.kind == "many":
        return [*turns, count]
    return [
        *turns,
        count,
        Turn("colour in picture k", f"What colour is the shape {here}?", f"The shape {here} is {item.colour}."),
        Turn("shape in picture k", f"Which shape is {here}?", f"The shape {here} is a {item.what}."),
    ]


def _counted(scene: Scene) -> str:
    count = len(scene.items)
    return f"{'is' if count == 1 else 'are'} {COUNT_WORDS[count]} {'shape' if count == 1 else 'shapes'}"


def _description(scene: Scene) -> str:
    if scene.kind == "digit":
        return f"a {scene.items[0].colour} digit {scene.items[0].what}"
    parts = [f"a {i.colour} {i.what}" + (f" {PLACES[i.slot]}" if i.slot else "") for i in scene.items]
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def about_nothing(rng: random.Random) -> Turn:
    """A question that needs no picture: a sum, a difference, words to repeat, or a fact."""
    return rng.choice((_sum, _difference, _repeat, _repeat, _repeat, _fact))(rng)


def _sum(rng: random.Random) -> Turn:
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    return Turn("sum", f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}.")


def _difference(rng: random.Random) -> Turn:
    a, b = sorted((rng.randint(0, 9), rng.randint(0, 9)), reverse=True)
    return Turn("sum", f"What is {a} minus {b}?", f"{a} minus {b} is {a - b}.")


def _repeat(rng: random.Random) -> Turn:
    words = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 5)))
    return Turn("repeat", f"Repeat: {words}.", f"You said: {words}.")


def _fact(rng: random.Random) -> Turn:
    question = rng.choice(list(FACTS))
    return Turn("fact", question, FACTS[question])


def pick_turns(rng: random.Random, turns: Sequence[Turn], count: int) -> list[Turn]:
    """`count` of the turns, each kind equally likely, so that kinds with many instances do not crowd out others."""
    by_kind: dict[str, list[Turn]] = {}
    for turn in turns:
        by_kind.setdefault(turn.kind, []).append(turn)
    kinds = list(by_kind)
    return [rng.choice(by_kind[rng.choice(kinds)]) for _ in range(count)]


def informative_spans(answer: str) -> list[tuple[int, int]]:
    """Where the answer's words that carry information stand; the rest is sentence form."""
    return [m.span() for m in re.finditer(r"[A-Za-z]+|\d", answer) if m.group() in INFORMATIVE]
