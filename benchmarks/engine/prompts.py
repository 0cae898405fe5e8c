"""The questions of each workload, pure functions of a seed: every arm gets the same.

cold: no two prompts share anything but the template. shared: all prompts of a round begin with the same four fifths.
"""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Sequence
from typing import Any, Literal

from PIL import Image

from benchmarks.engine.client import Question
from scripts.demo_model.scenes import draw, evaluation_seed, make_scene

Workload = Literal["text-cold", "text-shared", "pictures-cold", "pictures-shared"]
WORKLOADS: tuple[Workload, ...] = ("text-cold", "text-shared", "pictures-cold", "pictures-shared")

OUTPUT_TOKENS = 32
SHARED = 0.8
PICTURES = 3
GRID = (8, 8)  # of tokens: 64 a picture
COMMON_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father "
    "power hour game line end member law car city name team minute idea body back parent face level office door"
).split()


def questions(workload: Workload, seed: int, count: int, num_words: int) -> list[Question]:
    """`num_words` of a prompt of text: how many tokens they are is the tokenizer's affair."""
    shared = workload.endswith("shared")
    made = []
    for index in range(count):
        own, common = random.Random(f"{seed}/{index}"), random.Random(f"{seed}/prefix")
        is_text = workload.startswith("text")
        made.append(_text(own, common, shared, num_words) if is_text else _pictures(own, common, shared))
    return made


def picture_part(seed: int) -> dict[str, Any]:
    """A drawn picture of 64 tokens as a part of a message."""
    file = io.BytesIO()
    draw(make_scene(evaluation_seed(7, seed), GRID, "one")).resize((224, 224)).save(file, "PNG")
    uri = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": uri}}


def flat_picture_part(seed: int) -> dict[str, Any]:
    """As large a picture of one colour, another for each seed below 2**24: quickly made, and as long to encode."""
    file = io.BytesIO()
    Image.new("RGB", (224, 224), ((seed >> 16) & 255, (seed >> 8) & 255, seed & 255)).save(file, "PNG")
    uri = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": uri}}


def with_pictures(seeds: Sequence[int], text: str, max_tokens: int = OUTPUT_TOKENS) -> Question:
    parts = [*map(picture_part, seeds), {"type": "text", "text": text}]
    return Question([{"role": "user", "content": parts}], max_tokens)


def only_text(text: str, max_tokens: int = OUTPUT_TOKENS) -> Question:
    return Question([{"role": "user", "content": text}], max_tokens)


def _text(own: random.Random, common: random.Random, shared: bool, num_words: int) -> Question:
    kept = round(SHARED * num_words) if shared else 0
    words = [*common.choices(COMMON_WORDS, k=kept), *own.choices(COMMON_WORDS, k=num_words - kept)]
    return only_text(" ".join(words))


def _pictures(own: random.Random, common: random.Random, shared: bool) -> Question:
    """Three pictures, 192 tokens, and about 40 tokens of question."""
    dice = common if shared else own
    seeds = [dice.randrange(1 << 24) for _ in range(PICTURES)]
    return with_pictures(seeds, " ".join(own.choices(COMMON_WORDS, k=10)))
