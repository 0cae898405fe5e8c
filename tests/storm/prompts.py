"""The bounded family of prompts that storms draw from, in ids: so that the truth about each is computed once.

A *root* is a conversation of one or two turns with 0 to 4 pictures, some of them repeated. Of each root there are four
variants, alike in what faults of caching and of identity need:

    BASE          the conversation
    LOOK_ALIKE    its pictures replaced by others of the same size that differ in one pixel (or one id of its text)
    OTHER_ENDING  the same opening, another last turn
    FOLLOW_UP     the conversation, an answer to it, and one more turn
"""

from __future__ import annotations

import enum
import functools
import hashlib
import io
import random
from dataclasses import dataclass

from PIL import Image

from tests.parity.prompts import draw_picture

NUM_ROOTS = 24
FIRST_TEXT_ID, LAST_TEXT_ID = 5, 600
NUM_PICTURES = 10
PICTURE_BEGIN_ID, PICTURE_END_ID = 633, 634
SIDES_PX = ((56, 56), (56, 84), (112, 84), (56, 112), (140, 112))
MOST_PICTURES = 4

Piece = int | bytes
"""An id of text, or a picture's encoded bytes."""


class Variant(enum.Enum):
    BASE = "base"
    LOOK_ALIKE = "look-alike"
    OTHER_ENDING = "other ending"
    FOLLOW_UP = "follow-up"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt by its name in the family, and what it holds."""

    root: int
    variant: Variant
    pieces: tuple[Piece, ...]

    @property
    def name(self) -> str:
        return f"{self.root}/{self.variant.value}"

    @property
    def media(self) -> tuple[bytes, ...]:
        return tuple(piece for piece in self.pieces if isinstance(piece, bytes))

    @property
    def digest(self) -> str:
        parts = [b"%d," % piece if isinstance(piece, int) else hashlib.sha256(piece).digest() for piece in self.pieces]
        return hashlib.sha256(b"".join(parts)).hexdigest()[:32]


@functools.cache
def picture(number: int) -> bytes:
    """Pictures come in pairs of one size: 2k and 2k + 1."""
    return draw_picture(1000 + number, SIDES_PX[number // 2 % len(SIDES_PX)])


@functools.cache
def look_alike(media: bytes) -> bytes:
    """The same picture but for one pixel, which has the opposite colour."""
    image = Image.open(io.BytesIO(media)).convert("RGB")
    at = image.width // 2, image.height // 2
    red, green, blue = image.getpixel(at)
    image.putpixel(at, (255 - red if abs(red - 128) > 40 else 255, 255 - green, 255 - blue))
    out = io.BytesIO()
    image.save(out, format="PNG", compress_level=1)
    return out.getvalue()


@functools.cache
def conversation(root: int, variant: Variant) -> Prompt:
    """All variants but FOLLOW_UP, which needs an answer."""
    dice = random.Random(f"root/{root}")
    opening = _text(dice, *dice.choice([(1, 6), (20, 40), (60, 90)]))
    shown = [picture(dice.randrange(NUM_PICTURES)) for _ in range(dice.choice([0, 1, 1, 2, 3, MOST_PICTURES]))]
    if len(shown) > 1 and dice.random() < 0.5:
        shown[-1] = shown[0]
    for media in shown[: len(shown) - 1]:
        opening += [*_shown(media), *_text(dice, 0, 12)]
    ending = [*(_shown(shown[-1]) if shown else []), *_text(dice, 1, 40)]
    if variant is Variant.LOOK_ALIKE:
        return Prompt(root, variant, tuple(_altered([*opening, *ending], dice)))
    if variant is Variant.OTHER_ENDING:
        ending = _text(dice, 1, 40)
    return Prompt(root, variant, (*opening, *ending))


def follow_up(base: Prompt, answer: tuple[int, ...]) -> Prompt:
    """`answer`: ids, cut where one could be taken for something else than text."""
    dice = random.Random(f"follow/{base.root}")
    said = []
    for token in answer:
        if not FIRST_TEXT_ID <= token <= LAST_TEXT_ID:
            break
        said.append(token)
    again = _shown(base.media[0]) if base.media and dice.random() < 0.5 else []
    return Prompt(base.root, Variant.FOLLOW_UP, (*base.pieces, *said, *_text(dice, 1, 20), *again, *_text(dice, 1, 9)))


def _shown(media: bytes) -> list[Piece]:
    return [PICTURE_BEGIN_ID, media, PICTURE_END_ID]


def _text(dice: random.Random, least: int, most: int) -> list[Piece]:
    return [dice.randint(FIRST_TEXT_ID, LAST_TEXT_ID) for _ in range(dice.randint(least, most))]


def _altered(pieces: list[Piece], dice: random.Random) -> list[Piece]:
    if any(isinstance(piece, bytes) for piece in pieces):
        return [look_alike(piece) if isinstance(piece, bytes) else piece for piece in pieces]
    at = dice.randrange(len(pieces))
    return [*pieces[:at], dice.randint(FIRST_TEXT_ID, LAST_TEXT_ID), *pieces[at + 1 :]]
