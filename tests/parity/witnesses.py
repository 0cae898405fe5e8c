"""A fixed list of questions on which the sound demo model is right and planted faults show.

Attribute questions react to little; which question reacts to which fault depends on the weights. So the list is
searched for, in the stock model alone, by `python -m tests.parity.find_witnesses`, and kept in `witnesses.json`.
Run that again after the demo model has been trained anew.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.demo_model.scenes import draw, evaluation_seed, make_scene
from tests.parity.prompts import Prompt

LIST = Path(__file__).with_name("witnesses.json")
RUN = 77
"""The run of evaluation seeds that the pictures come from."""


@dataclass(frozen=True, slots=True)
class Question:
    """Scenes by their index in `RUN`, and what is asked about them, with its only right answer."""

    scenes: tuple[int, ...]
    question: str
    answer: str

    @property
    def prompt(self) -> Prompt:
        parts = [{"type": "image"}] * len(self.scenes) + [{"type": "text", "text": self.question}]
        return Prompt(0, "witness", ({"role": "user", "content": parts},), tuple(_png(i) for i in self.scenes))


@dataclass(frozen=True, slots=True)
class Witness:
    """`fault` is the name of the fault that changes the answer.

    For faults of the cache `donor` is the other request, `layer` the one whose keys are exchanged, `page` the index of
    the page in the prompt that is stale.
    """

    fault: str
    asked: Question
    donor: Question | None = None
    layer: int | None = None
    page: int | None = None


def load() -> list[Witness]:
    return [_witness(row) for row in json.loads(LIST.read_text())]


def save(witnesses: Sequence[Witness]) -> None:
    LIST.write_text(json.dumps([asdict(witness) for witness in witnesses], indent=1) + "\n")


def _witness(row: dict[str, object]) -> Witness:
    asked, donor = _question(row.pop("asked")), row.pop("donor")
    assert asked is not None
    return Witness(asked=asked, donor=_question(donor), **row)  # type: ignore[arg-type]


def _question(row: object) -> Question | None:
    if not isinstance(row, dict):
        return None
    return Question(tuple(row["scenes"]), row["question"], row["answer"])


def _png(index: int) -> bytes:
    out = io.BytesIO()
    draw(make_scene(evaluation_seed(RUN, index))).save(out, format="PNG")
    return out.getvalue()
