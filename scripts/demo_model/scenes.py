"""Drawn pictures whose truth is known.

The bundled model learns from these and is judged on them, so everything here is a pure function of a seed: the same
seed gives the same scene and the same pixels. Seeds below `EVALUATION_BASE` are for training only, those from it on
for evaluation only; `training_seed` and `evaluation_seed` are the only ways to make them.

A scene is chosen for a *merged grid* (rows x columns of language-model tokens, 28 pixels each), because all rows of
a training batch share one; its pixel size is any size that the image processor resizes onto that grid.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

Kind = Literal["one", "many", "digit"]
Grid = tuple[int, int]
Rgb = tuple[int, int, int]
Point = tuple[float, float]

COLOURS: dict[str, Rgb] = {
    "red": (222, 40, 38),
    "green": (44, 160, 60),
    "blue": (44, 84, 222),
    "yellow": (236, 206, 40),
    "purple": (128, 50, 168),
    "pink": (246, 132, 190),
    "cyan": (52, 206, 216),
}
SHAPES = ("circle", "square", "triangle", "star", "cross")
DIGITS = tuple("0123456789")
CLASSES = (*SHAPES, *DIGITS)
"""What a token of the picture can show; the training labels count from 1, 0 being the background."""

ROW_SLOTS = ("left", "centre", "right")
COLUMN_SLOTS = ("top", "centre", "bottom")
CROSS_SLOTS = ("top", "left", "centre", "right", "bottom")

TOKEN_PIXELS = 28
MIN_PIXELS = 56 * 56
MAX_PIXELS = 224 * 224
MAX_TOKENS = MAX_PIXELS // TOKEN_PIXELS**2
MAX_GRID_ASPECT = 3.2

EVALUATION_BASE = 1 << 48
_RUN_SPAN = 1 << 32


@dataclass(frozen=True, slots=True)
class Item:
    """One drawn thing. `x` and `y` are fractions of width and height, `radius` a fraction of the shorter side."""

    what: str
    colour: str
    rgb: Rgb
    x: float
    y: float
    radius: float
    turn_degrees: float
    slot: str | None


@dataclass(frozen=True, slots=True)
class Scene:
    """A picture before it is drawn. `size` is (width, height) in pixels, `grid` is (rows, columns) in tokens."""

    kind: Kind
    grid: Grid
    size: tuple[int, int]
    items: tuple[Item, ...]
    background: Rgb
    noise_sigma: float
    noise_seed: int


def training_seed(run: int, index: int) -> int:
    """The seed of training scene `index` of run `run`; always below `EVALUATION_BASE`."""
    return _seed(run, index)


def evaluation_seed(run: int, index: int) -> int:
    """The seed of evaluation scene `index` of run `run`; never one of `training_seed`."""
    return EVALUATION_BASE + _seed(run, index)


def _seed(run: int, index: int) -> int:
    if not 0 <= run < EVALUATION_BASE // _RUN_SPAN:
        raise ValueError(f"run must be between 0 and {EVALUATION_BASE // _RUN_SPAN - 1}, not {run}")
    if not 0 <= index < _RUN_SPAN:
        raise ValueError(f"index must be between 0 and {_RUN_SPAN - 1}, not {index}")
    return run * _RUN_SPAN + index


def all_grids(max_tokens: int = MAX_TOKENS) -> list[Grid]:
    """Every grid a picture may have: sides of 2 to 12 tokens, at most `max_tokens`, not too elongated."""
    sides = range(2, 13)
    return [(r, c) for r in sides for c in sides if r * c <= max_tokens and max(r, c) / min(r, c) <= MAX_GRID_ASPECT]


def pick_grid(rng: random.Random, max_tokens: int = MAX_TOKENS) -> Grid:
    """A grid, small ones more often: they cost less to train on."""
    grids = all_grids(max_tokens)
    return rng.choices(grids, weights=[(r * c) ** -0.6 for r, c in grids])[0]


def kinds_for(grid: Grid) -> tuple[Kind, ...]:
    """The kinds that a grid has room for; several shapes need about one token each."""
    rows, columns = grid
    return ("one", "many", "digit") if max(rows, columns) >= 4 and rows * columns >= 8 else ("one", "digit")


def slots_for(grid: Grid) -> tuple[str, ...]:
    """The named places of a grid, in the order in which a description goes through them."""
    rows, columns = grid
    if columns >= 1.5 * rows:
        return ROW_SLOTS
    return COLUMN_SLOTS if rows >= 1.5 * columns else CROSS_SLOTS


def make_scene(seed: int, grid: Grid | None = None, kind: Kind | None = None) -> Scene:
    """The scene of `seed`, on `grid` and of `kind` where those are given, else chosen from the seed."""
    rng = random.Random(seed)
    grid = grid or pick_grid(rng)
    kind = kind or _pick_kind(rng, grid)
    grey = rng.randint(8, 247)
    background = _jitter(rng, (grey, grey, grey), 8)
    size = _pick_size(rng, grid)
    return Scene(kind, grid, size, _items(rng, kind, grid), background, rng.uniform(0, 10), rng.getrandbits(32))


def _pick_kind(rng: random.Random, grid: Grid) -> Kind:
    kinds = kinds_for(grid)
    weights = {"one": 0.32, "many": 0.43, "digit": 0.25}
    return rng.choices(kinds, weights=[weights[k] for k in kinds])[0]


def _pick_size(rng: random.Random, grid: Grid) -> tuple[int, int]:
    """A (width, height) that the processor resizes onto `grid`; exact multiples always do."""
    rows, columns = grid
    for _ in range(12):
        zoom = rng.uniform(0.95, 1.6) if rows * columns > 0.7 * MAX_TOKENS else 1.0
        width = round(columns * TOKEN_PIXELS * zoom + rng.uniform(-13, 13))
        height = round(rows * TOKEN_PIXELS * zoom + rng.uniform(-13, 13))
        if min(width, height) >= 48 and max(width, height) <= 360 and grid_of(width, height) == grid:
            return width, height
    return columns * TOKEN_PIXELS, rows * TOKEN_PIXELS


def grid_of(width: int, height: int) -> Grid:
    """The grid onto which the image processor resizes a picture: nearest multiples of a token, within the limits."""
    rows, columns = round(height / TOKEN_PIXELS), round(width / TOKEN_PIXELS)
    pixels = rows * columns * TOKEN_PIXELS**2
    if pixels > MAX_PIXELS:
        beta = math.sqrt((height * width) / MAX_PIXELS)
        return max(1, math.floor(height / beta / TOKEN_PIXELS)), max(1, math.floor(width / beta / TOKEN_PIXELS))
    if pixels < MIN_PIXELS:
        beta = math.sqrt(MIN_PIXELS / (height * width))
        return math.ceil(height * beta / TOKEN_PIXELS), math.ceil(width * beta / TOKEN_PIXELS)
    return rows, columns


def _items(rng: random.Random, kind: Kind, grid: Grid) -> tuple[Item, ...]:
    if kind == "many":
        return _slot_items(rng, slots_for(grid))
    what = rng.choice(DIGITS if kind == "digit" else SHAPES)
    radius = rng.uniform(0.26, 0.44)
    spread = 0.46 - radius
    x, y = 0.5 + rng.uniform(-spread, spread), 0.5 + rng.uniform(-spread, spread)
    return (_item(rng, what, rng.choice(list(COLOURS)), (x, y), radius, None),)


def _slot_items(rng: random.Random, slots: Sequence[str]) -> tuple[Item, ...]:
    count = rng.choice((2, 3, 4, 4) if len(slots) == len(CROSS_SLOTS) else (2, 3))
    chosen = set(rng.sample(slots, count))
    things = _pairs(rng, count)
    used = [slot for slot in slots if slot in chosen]
    return tuple(_slot_item(rng, slots, slot, thing) for slot, thing in zip(used, things, strict=True))


def _pairs(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """`count` different (shape, colour) pairs; half of the time no shape and no colour comes twice."""
    if rng.random() < 0.5:
        return list(zip(rng.sample(SHAPES, count), rng.sample(list(COLOURS), count), strict=True))
    return rng.sample([(shape, colour) for shape in SHAPES for colour in COLOURS], count)


def _slot_item(rng: random.Random, slots: Sequence[str], slot: str, thing: tuple[str, str]) -> Item:
    crossed = len(slots) == len(CROSS_SLOTS)
    radius = rng.uniform(0.115, 0.15) if crossed else rng.uniform(0.17, 0.24)
    far, along = (0.31, 0.02) if crossed else (0.33, 0.015)
    dx = {"left": -far, "right": far}.get(slot, 0.0) + rng.uniform(-along, along)
    dy = {"top": -far, "bottom": far}.get(slot, 0.0) + rng.uniform(-along, along)
    return _item(rng, thing[0], thing[1], (0.5 + dx, 0.5 + dy), radius, slot)


def _item(rng: random.Random, what: str, colour: str, at: Point, radius: float, slot: str | None) -> Item:
    rgb = _jitter(rng, COLOURS[colour], 14)
    return Item(what, colour, rgb, at[0], at[1], radius, rng.uniform(-12, 12), slot)


def _jitter(rng: random.Random, rgb: Rgb, by: int) -> Rgb:
    r, g, b = (min(255, max(0, value + rng.randint(-by, by))) for value in rgb)
    return r, g, b


def draw(scene: Scene) -> Image.Image:
    """The picture: drawn at twice the size, shrunk by averaging, with Gaussian noise on every channel."""
    width, height = scene.size
    canvas = Image.new("RGB", (2 * width, 2 * height), scene.background)
    for item in scene.items:
        stamp, corner = _stamp(item, canvas.size)
        canvas.paste(item.rgb, corner, stamp)
    return _with_noise(canvas.reduce(2), scene.noise_sigma, scene.noise_seed)


def noise_picture(seed: int, grid: Grid | None = None) -> Image.Image:
    """A picture that says nothing: independent pixels; without `grid`, of a size that depends on the seed alone."""
    rng = random.Random(seed)
    width, height = _pick_size(rng, grid or pick_grid(rng))
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels, "RGB")


def token_labels(scene: Scene) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Colour and class of each token of the grid (row-major, 0 where it is background): labels for training only.

    A token bears the name of the item that it shows most of; an item that fills no token far names the one that shows
    most of it.
    """
    rows, columns = scene.grid
    colours = np.zeros(rows * columns, np.int64)
    classes = np.zeros(rows * columns, np.int64)
    most = np.zeros(rows * columns, np.uint8)
    for item in scene.items:
        stamp, corner = _stamp(item, scene.size)
        canvas = Image.new("L", scene.size, 0)
        canvas.paste(stamp, corner)
        cover = np.asarray(canvas.resize((columns, rows), Image.Resampling.BOX)).reshape(-1)
        shown = (cover >= min(27 if item.what in SHAPES else 17, cover.max())) & (cover > most)
        colours[shown] = 1 + list(COLOURS).index(item.colour)
        classes[shown] = 1 + CLASSES.index(item.what)
        most[shown] = cover[shown]
    return colours, classes


def _with_noise(picture: Image.Image, sigma: float, seed: int) -> Image.Image:
    """Adds noise that is all but Gaussian: each value is the sum of four random bytes, scaled to `sigma`."""
    pixels = np.asarray(picture)
    draws = np.random.default_rng(seed).integers(0, 256, (4, *pixels.shape), dtype=np.uint8)
    noise = draws.sum(0, dtype=np.int16).astype(np.float32) - 2 * 255
    scale = np.float32(sigma / math.sqrt(4 * (256**2 - 1) / 12))
    return Image.fromarray(np.clip(pixels + noise * scale + 0.5, 0, 255).astype(np.uint8), "RGB")


def _stamp(item: Item, size: tuple[int, int]) -> tuple[Image.Image, tuple[int, int]]:
    """The item's coverage as a small mask, and where its upper left corner belongs on a canvas of `size`."""
    width, height = size
    radius = item.radius * min(width, height)
    side = 2 * math.ceil(1.25 * radius) + 2
    left, top = math.floor(item.x * width - side / 2), math.floor(item.y * height - side / 2)
    return _mask(item, side, (item.x * width - left, item.y * height - top), radius), (left, top)


def _mask(item: Item, side: int, centre: Point, radius: float) -> Image.Image:
    mask = Image.new("L", (side, side), 0)
    pen = ImageDraw.Draw(mask)
    if item.what in DIGITS:
        pen.text(centre, item.what, fill=255, font=_font(round(2.3 * radius)), anchor="mm")
        return mask.rotate(item.turn_degrees, Image.Resampling.BILINEAR, center=centre)
    if item.what == "circle":
        corners = [centre[0] - radius, centre[1] - radius, centre[0] + radius, centre[1] + radius]
        pen.ellipse(corners, fill=255)
        return mask
    pen.polygon(_placed(_OUTLINES[item.what](), centre, radius, item.turn_degrees), fill=255)
    return mask


@lru_cache(maxsize=1024)
def _font(pixels: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(pixels)


def _placed(outline: Sequence[Point], centre: Point, radius: float, turn_degrees: float) -> list[Point]:
    cos, sin = math.cos(math.radians(turn_degrees)), math.sin(math.radians(turn_degrees))
    return [(centre[0] + radius * (cos * x - sin * y), centre[1] + radius * (sin * x + cos * y)) for x, y in outline]


def _star() -> list[Point]:
    return [_polar(1.12 if i % 2 == 0 else 0.48, 36 * i - 90) for i in range(10)]


def _polar(radius: float, degrees: float) -> Point:
    return radius * math.cos(math.radians(degrees)), radius * math.sin(math.radians(degrees))


def _cross() -> list[Point]:
    a, b = 0.34, 1.0
    return [
        (-a, -b),
        (a, -b),
        (a, -a),
        (b, -a),
        (b, a),
        (a, a),
        (a, b),
        (-a, b),
        (-a, a),
        (-b, a),
        (-b, -a),
        (-a, -a),
    ]


_OUTLINES: dict[str, Callable[[], list[Point]]] = {
    "square": lambda: [(-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)],
    "triangle": lambda: [(0.0, -1.05), (1.0, 0.8), (-1.0, 0.8)],
    "star": _star,
    "cross": _cross,
}
