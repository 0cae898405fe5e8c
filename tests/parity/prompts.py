"""Seeded random conversations with drawn pictures: what the parity matrix asks.

Everything is a pure function of (seed, index). Prompts come in families of four, because faults of caching and of
identity only show between prompts that resemble each other: the same opening turns with other endings, the same text
with look-alike pictures of the same size, the same pictures in another order, and the same prompt again.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import json
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

FAMILY = 4
KINDS = ("unrelated", "same opening", "look-alikes", "other order", "repeated")
MIN_SIDE_PX, MAX_SIDE_PX = 56, 336
MOST_PICTURES = 4

_WORDS = (
    "what colour is the shape in picture one two three four describe left right top bottom centre circle square "
    "triangle star cross digit red green blue yellow purple pink cyan how many where is there a and not why "
    "harbour engine Zürich 東京 ещё naïve 🙂 x=3; 0 1 2 3 17 99 (ok) ... \n tab\t"
).split(" ")
_SYSTEM = ("You are a helpful assistant.", "Answer in one sentence.", "Be short and exact.", "Think of pictures.")

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request. `messages` holds parts `{"type": "image"}` that stand for `media`, in order of appearance."""

    index: int
    kind: str
    messages: tuple[Message, ...]
    media: tuple[bytes, ...]

    @property
    def digest(self) -> str:
        """Names the content: equal prompts have equal digests, whatever their index."""
        sha = hashlib.sha256(json.dumps(self.messages, sort_keys=True).encode())
        for blob in self.media:
            sha.update(len(blob).to_bytes(8, "big") + blob)
        return sha.hexdigest()[:32]

    @property
    def pictures(self) -> list[Image.Image]:
        return [Image.open(io.BytesIO(blob)).convert("RGB") for blob in self.media]

    def openai_messages(self) -> list[Message]:
        """As a client would post them: pictures as data URIs."""
        blobs = iter(self.media)
        return [{**message, "content": _posted(message["content"], blobs)} for message in self.messages]

    def with_media(self, media: tuple[bytes, ...]) -> Prompt:
        return Prompt(self.index, self.kind, self.messages, media)


def _posted(content: Any, blobs: Any) -> Any:
    if isinstance(content, str):
        return content
    return [_data_uri(next(blobs)) if part["type"] == "image" else part for part in content]


def _data_uri(blob: bytes) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(blob).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def make_prompts(seed: int, count: int) -> list[Prompt]:
    """The first `count` prompts of `seed`."""
    families = [_family(seed, number) for number in range(-(-count // FAMILY))]
    return [prompt for family in families for prompt in family][:count]


@functools.cache
def _family(seed: int, number: int) -> list[Prompt]:
    rng = random.Random(f"{seed}/{number}")
    kind = KINDS[number % len(KINDS)]
    makers = {
        "unrelated": _unrelated,
        "same opening": _same_opening,
        "look-alikes": _look_alikes,
        "other order": _other_order,
        "repeated": _repeated,
    }
    made = makers[kind](rng)
    return [Prompt(number * FAMILY + i, kind, tuple(m), tuple(media)) for i, (m, media) in enumerate(made)]


Draft = tuple[list[Message], list[bytes]]


def _unrelated(rng: random.Random) -> list[Draft]:
    return [_conversation(rng, rng.randint(0, MOST_PICTURES)) for _ in range(FAMILY)]


def _same_opening(rng: random.Random) -> list[Draft]:
    opening, media = _conversation(rng, rng.randint(1, 2))
    drafts = []
    for _ in range(FAMILY):
        ending, more = _user_turn(rng, [_picture(rng)] if rng.random() < 0.5 else [])
        drafts.append(([*opening, _assistant_turn(rng), ending], [*media, *more]))
    return drafts


def _look_alikes(rng: random.Random) -> list[Draft]:
    """One conversation whose pictures are replaced by others of the same size, as a whole or one only."""
    sizes = [_size(rng) for _ in range(rng.randint(1, 3))]
    drawn = [[draw_picture(rng.getrandbits(32), size) for size in sizes] for _ in range(FAMILY)]
    drawn[1][:-1] = drawn[0][:-1]  # differs in its last picture only: the prefix up to there is shared
    messages, _ = _conversation(rng, len(sizes))
    return [(messages, media) for media in drawn]


def _other_order(rng: random.Random) -> list[Draft]:
    """The same text over the same pictures in four orders; two of them are of one size."""
    size = _size(rng)
    media = [draw_picture(rng.getrandbits(32), size) for _ in range(2)]
    media += [_picture(rng) for _ in range(rng.randint(0, 1))]
    messages, _ = _conversation(rng, len(media))
    orders = [media, media[::-1], [media[1], media[0], *media[2:]], [media[-1], *media[:-1]]]
    return [(messages, order) for order in orders]


def _repeated(rng: random.Random) -> list[Draft]:
    """The same prompt three times, and once more with one picture used twice."""
    messages, media = _conversation(rng, rng.randint(1, 2))
    twice, extra = _user_turn(rng, [media[0]])
    again = [*messages, _assistant_turn(rng), twice], [*media, *extra]
    return [(messages, media), (messages, media), (messages, media), again]


def _conversation(rng: random.Random, pictures: int) -> Draft:
    """One to three user turns, ending with the user; the pictures fall into any of them."""
    turns = rng.randint(1, 3)
    homes = sorted(rng.randrange(turns) for _ in range(pictures))
    messages: list[Message] = []
    media: list[bytes] = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": rng.choice(_SYSTEM)})
    for turn in range(turns):
        if turn:
            messages.append(_assistant_turn(rng))
        message, blobs = _user_turn(rng, [_picture(rng) for home in homes if home == turn])
        messages.append(message)
        media += blobs
    return messages, media


def _user_turn(rng: random.Random, media: list[bytes]) -> tuple[Message, list[bytes]]:
    """Text may stand before, between and after the pictures, or nowhere but at the end."""
    if not media and rng.random() < 0.7:
        return {"role": "user", "content": _text(rng, 2, 16)}, []
    parts: list[dict[str, Any]] = []
    for _ in media:
        if rng.random() < 0.4:
            parts.append({"type": "text", "text": _text(rng, 1, 8)})
        parts.append({"type": "image"})
    if not media or rng.random() < 0.85:
        parts.append({"type": "text", "text": _text(rng, 2, 16)})
    return {"role": "user", "content": parts}, media


def _assistant_turn(rng: random.Random) -> Message:
    return {"role": "assistant", "content": _text(rng, 1, 10)}


def _text(rng: random.Random, least: int, most: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(rng.randint(least, most)))


def _size(rng: random.Random) -> tuple[int, int]:
    return rng.randint(MIN_SIDE_PX, MAX_SIDE_PX), rng.randint(MIN_SIDE_PX, MAX_SIDE_PX)


def _picture(rng: random.Random) -> bytes:
    return draw_picture(rng.getrandbits(32), _size(rng))


def draw_picture(seed: int, size: tuple[int, int]) -> bytes:
    """A PNG of `size` (width, height): a gradient, some shapes, a patch of noise; pictures of two seeds look unlike."""
    rng = random.Random(seed)
    width, height = size
    corners = np.array([[_rgb(rng), _rgb(rng)], [_rgb(rng), _rgb(rng)]], np.uint8)
    picture = Image.fromarray(corners).resize(size, Image.Resampling.BILINEAR)
    pen = ImageDraw.Draw(picture)
    for _ in range(rng.randint(2, 6)):
        _draw_shape(rng, pen, width, height)
    _paste_noise(rng, picture)
    out = io.BytesIO()
    picture.save(out, format="PNG", compress_level=1)
    return out.getvalue()


def _rgb(rng: random.Random) -> tuple[int, int, int]:
    return rng.randrange(256), rng.randrange(256), rng.randrange(256)


def _draw_shape(rng: random.Random, pen: ImageDraw.ImageDraw, width: int, height: int) -> None:
    x, y = rng.uniform(0, width), rng.uniform(0, height)
    rx, ry = rng.uniform(0.08, 0.4) * width, rng.uniform(0.08, 0.4) * height
    box = (x - rx, y - ry, x + rx, y + ry)
    match rng.randrange(3):
        case 0:
            pen.ellipse(box, fill=_rgb(rng))
        case 1:
            pen.rectangle(box, fill=_rgb(rng))
        case _:
            pen.polygon([(x, y - ry), (x + rx, y + ry), (x - rx, y + ry)], fill=_rgb(rng))


def _paste_noise(rng: random.Random, picture: Image.Image) -> None:
    width, height = picture.size
    w, h = rng.randint(8, width), rng.randint(8, height)
    pixels = np.random.default_rng(rng.getrandbits(32)).integers(0, 256, (h, w, 3), dtype=np.uint8)
    picture.paste(Image.fromarray(pixels), (rng.randint(0, width - w), rng.randint(0, height - h)))
