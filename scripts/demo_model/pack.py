"""Batches of branch-packed rows.

A row is one prefix (system prompt, earlier turns, pictures) followed by several independent questions on it:

    prefix ............ | branch 1 ...... | branch 2 ...... | branch 3 ...
    segment 0             1                 2                 3

A branch sees the prefix and itself; its positions go on from the prefix's end as if it were alone. So one pass over
the expensive part, the pictures, teaches several answers.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from tokenizers import Tokenizer

from scripts.demo_model.questions import (
    SYSTEM_PROMPTS,
    Turn,
    about_nothing,
    about_picture,
    about_pictures,
    informative_spans,
    pick_turns,
)
from scripts.demo_model.scenes import (
    MAX_TOKENS,
    TOKEN_PIXELS,
    Grid,
    Kind,
    Scene,
    draw,
    kinds_for,
    make_scene,
    noise_picture,
    pick_grid,
    token_labels,
    training_seed,
)
from scripts.demo_model.tokenizer import token_id

IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)
PATCH_PIXELS = TOKEN_PIXELS // 2
FORM_WEIGHT = 0.3
ROWS, TEXT_FIRST_ROWS, TEXT_ROWS, DIGIT_PICTURES = 16, 32, 14, 12
BRANCHES = 6
VISION_TOKENS = 480
BLIND_SHARE = 0.06
"""Rows whose pictures are noise while the answers stay: from these the model learns to guess among valid answers
where it sees nothing, rather than to break off the sentence form."""
_SEEDS_PER_STEP = 1024

MIXTURE = {"single": 0.40, "two": 0.33, "several": 0.06, "text": 0.12, "text first": 0.09}


@dataclass(frozen=True, slots=True)
class Pictures:
    """Pictures that share a grid. `patches` (pictures, patches, 588) uint8; labels (pictures, tokens)."""

    grid: Grid
    patches: torch.Tensor
    colours: torch.Tensor
    classes: torch.Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows padded to one length L. `pictures[k]` holds every row's k-th picture.

    ids, segments (-1 is padding), targets (-1 is none): (rows, L) int64; weights: (rows, L) float32;
    positions: (3, rows, L) int64; is_picture: (rows, L) bool.
    """

    ids: torch.Tensor
    segments: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    is_picture: torch.Tensor
    pictures: tuple[Pictures, ...]
    digits: Pictures


@dataclass(slots=True)
class Row:
    """A row while it is being written."""

    ids: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    positions: list[tuple[int, int, int]] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, ids: Sequence[int], segment: int, start: int, weights: Sequence[float] | None = None) -> int:
        """Appends text from position `start`; returns the position after it."""
        self.ids += ids
        self.segments += [segment] * len(ids)
        self.positions += [(p, p, p) for p in range(start, start + len(ids))]
        self.weights += weights if weights is not None else [0.0] * len(ids)
        return start + len(ids)

    def add_picture(self, image_id: int, grid: Grid, start: int) -> int:
        """Appends a picture's tokens with M-RoPE positions; text goes on after the longer side."""
        rows, columns = grid
        self.ids += [image_id] * (rows * columns)
        self.segments += [0] * (rows * columns)
        self.positions += [(start, start + r, start + c) for r in range(rows) for c in range(columns)]
        self.weights += [0.0] * (rows * columns)
        return start + max(rows, columns)


@dataclass(frozen=True, slots=True)
class Writer:
    """Turns conversations into rows with one tokenizer, in the form that the chat template gives them."""

    tokenizer: Tokenizer

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def _id(self, token: str) -> int:
        return token_id(self.tokenizer, token)

    @property
    def image_id(self) -> int:
        return self._id("<|image_pad|>")

    def row(self, opening: str, grids: Sequence[Grid], branches: Sequence[Sequence[Turn]]) -> Row:
        """Opening text and pictures as the prefix, then each branch: the rest of that user turn and what follows."""
        row = Row()
        end = row.add(self._encode(opening), 0, 0)
        end = self._add_pictures(row, grids, end)
        for number, turns in enumerate(branches, 1):
            self._add_branch(row, turns, number, end)
        return row

    def text_first_row(self, opening: str, grids: Sequence[Grid], turn: Turn) -> Row:
        """The question stands before the pictures, so there is nothing to share: all of it is the prefix."""
        row = Row()
        end = row.add(self._encode(opening + turn.question), 0, 0)
        end = self._add_pictures(row, grids, end)
        end = row.add(self._encode("<|im_end|>\n<|im_start|>assistant\n"), 0, end)
        self._add_answer(row, turn.answer, 0, end)
        return row

    def _add_pictures(self, row: Row, grids: Sequence[Grid], end: int) -> int:
        for grid in grids:
            end = row.add([self._id("<|vision_start|>")], 0, end)
            end = row.add_picture(self.image_id, grid, end)
            end = row.add([self._id("<|vision_end|>")], 0, end)
        return end

    def _add_branch(self, row: Row, turns: Sequence[Turn], segment: int, end: int) -> None:
        before = ""
        for turn in turns:
            question = f"{before}{turn.question}<|im_end|>\n<|im_start|>assistant\n"
            end = row.add(self._encode(question), segment, end)
            end = self._add_answer(row, turn.answer, segment, end)
            before = "\n<|im_start|>user\n"

    def _add_answer(self, row: Row, answer: str, segment: int, end: int) -> int:
        encoded = self.tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False)
        spans = informative_spans(answer)
        weights = [_weight(offsets, spans) for offsets in encoded.offsets]
        return row.add(encoded.ids, segment, end, weights)


def _weight(offsets: tuple[int, int], spans: Sequence[tuple[int, int]]) -> float:
    touches = any(offsets[0] < end and start < offsets[1] for start, end in spans)
    return 1.0 if touches else FORM_WEIGHT


def patches_of(picture: Image.Image, grid: Grid) -> npt.NDArray[np.uint8]:
    """(patches, 3 * 14 * 14) in the processor's order: token by token, four patches each."""
    rows, columns = grid
    sized = picture.resize((columns * TOKEN_PIXELS, rows * TOKEN_PIXELS), Image.Resampling.BICUBIC)
    blocks = np.asarray(sized).reshape(rows, 2, PATCH_PIXELS, columns, 2, PATCH_PIXELS, 3)
    return np.ascontiguousarray(blocks.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(rows * columns * 4, -1)


def normalised(patches: torch.Tensor) -> torch.Tensor:
    """uint8 patches as the model sees them, float32."""
    mean = torch.tensor(IMAGE_MEAN).repeat_interleave(PATCH_PIXELS**2)
    std = torch.tensor(IMAGE_STD).repeat_interleave(PATCH_PIXELS**2)
    return (patches.float() / 255 - mean) / std


def draw_all(scenes: Sequence[Scene], noise_seeds: Mapping[int, int] = MappingProxyType({})) -> Pictures:
    """The scenes, which share a grid, drawn, cut and labelled; noise where `noise_seeds` has the scene's index."""
    grid = scenes[0].grid
    drawn = [
        noise_picture(noise_seeds[index], grid) if index in noise_seeds else draw(scene)
        for index, scene in enumerate(scenes)
    ]
    labels = np.stack([token_labels(scene) for scene in scenes])
    labels[list(noise_seeds)] = 0
    patches = np.stack([patches_of(picture, grid) for picture in drawn])
    return Pictures(grid, *(torch.from_numpy(a) for a in (patches, labels[:, 0].copy(), labels[:, 1].copy())))


def collate(rows: Sequence[Row], pictures: tuple[Pictures, ...], digits: Pictures, image_id: int) -> Batch:
    """Pads the rows; the target of a token is the next token of the row where that one belongs to an answer."""
    length = max(len(row.ids) for row in rows)
    ids, segments, targets = (np.full((len(rows), length), fill, np.int64) for fill in (0, -1, -1))
    weights = np.zeros((len(rows), length), np.float32)
    positions = np.zeros((3, len(rows), length), np.int64)
    for r, row in enumerate(rows):
        n = len(row.ids)
        ids[r, :n], segments[r, :n] = row.ids, row.segments
        positions[:, r, :n] = np.asarray(row.positions).T
        weights[r, : n - 1] = row.weights[1:]
        targets[r, : n - 1] = np.where(weights[r, : n - 1] > 0, row.ids[1:], -1)
    tensors = [torch.from_numpy(a) for a in (ids, segments, positions, targets, weights, ids == image_id)]
    return Batch(tensors[0], tensors[1], tensors[2], tensors[3], tensors[4], tensors[5], pictures, digits)


def training_batch(writer: Writer, run: int, step: int) -> Batch:
    """The batch of one step: a pure function of the run's seed and the step's number."""
    rng = random.Random(training_seed(run, step * _SEEDS_PER_STEP))
    seeds = _Seeds(run, step * _SEEDS_PER_STEP)
    form = rng.choices(list(MIXTURE), weights=list(MIXTURE.values()))[0]
    digits = draw_all([make_scene(seeds.next(), grid, "digit") for grid in [pick_grid(rng, 12)] * DIGIT_PICTURES])
    rows: list[Row] = []
    scenes: list[list[Scene]] = []
    if form == "text":
        rows = [writer.row(_opening(rng), (), _text_branches(rng)) for _ in range(TEXT_ROWS)]
    else:
        scenes, rows = _picture_rows(writer, rng, seeds, form)
    blind = [row for row in range(len(scenes)) if rng.random() < BLIND_SHARE]
    pictures = tuple(draw_all(column, {row: seeds.next() for row in blind}) for column in zip(*scenes, strict=True))
    return collate(rows, pictures, digits, writer.image_id)


def vision_batch(run: int, step: int) -> Pictures:
    """Pictures alone, for the phase in which only the vision tower learns.

    It begins with small pictures, of which each token shows a good part of the shape, and many of them.
    """
    rng = random.Random(training_seed(run, step * _SEEDS_PER_STEP))
    seeds = _Seeds(run, step * _SEEDS_PER_STEP)
    grid = pick_grid(rng, min(MAX_TOKENS, 9 + step // 25))
    kinds = kinds_for(grid)
    count = min(64, max(12, VISION_TOKENS // (grid[0] * grid[1])))
    return draw_all([make_scene(seeds.next(), grid, rng.choice(kinds)) for _ in range(count)])


@dataclass(slots=True)
class _Seeds:
    """The training seeds of one step, in order; the first is the step's own."""

    run: int
    last: int

    def next(self) -> int:
        self.last += 1
        return training_seed(self.run, self.last)


def _picture_rows(writer: Writer, rng: random.Random, seeds: _Seeds, form: str) -> tuple[list[list[Scene]], list[Row]]:
    grids = _grids(rng, form)
    text_first = form == "text first"
    count = TEXT_FIRST_ROWS if text_first else ROWS
    scenes = [_scenes(rng, seeds, grids) for _ in range(count)]
    if not text_first:
        return scenes, [writer.row(_opening(rng), grids, _branches(rng, asked)) for asked in scenes]
    turns = [pick_turns(rng, _askable(asked), 1)[0] for asked in scenes]
    openings = [_opening(rng) for _ in turns]
    return scenes, [writer.text_first_row(o, grids, turn) for o, turn in zip(openings, turns, strict=True)]


def _grids(rng: random.Random, form: str) -> list[Grid]:
    """One grid per picture; the more pictures, the smaller."""
    if form == "several":
        return [pick_grid(rng, 16) for _ in range(rng.choice((3, 3, 4)))]
    if form == "two" or (form == "text first" and rng.random() < 0.35):
        return [pick_grid(rng, rng.choice((20, 36, 64))) for _ in range(2)]
    return [pick_grid(rng)]


def _scenes(rng: random.Random, seeds: _Seeds, grids: Sequence[Grid]) -> list[Scene]:
    """A row's scenes; half of the time later pictures share the first one's kind, so that only the index tells."""
    first = make_scene(seeds.next(), grids[0])
    return [first, *(_later_scene(rng, seeds, grid, first) for grid in grids[1:])]


def _later_scene(rng: random.Random, seeds: _Seeds, grid: Grid, first: Scene) -> Scene:
    same: Kind | None = first.kind if rng.random() < 0.5 and first.kind in kinds_for(grid) else None
    scene = make_scene(seeds.next(), grid, same)
    if same is None or rng.random() < 0.5:
        return scene
    return _sharing(rng, seeds, scene, first)


def _sharing(rng: random.Random, seeds: _Seeds, scene: Scene, first: Scene) -> Scene:
    """A scene like `scene` that has the first picture's shape or colour, to make the two harder to tell apart."""
    by_colour = rng.random() < 0.5
    for _ in range(8):
        a, b = scene.items[0], first.items[0]
        if (a.colour == b.colour) if by_colour else (a.what == b.what):
            break
        scene = make_scene(seeds.next(), scene.grid, scene.kind)
    return scene


def _askable(scenes: Sequence[Scene]) -> list[Turn]:
    return about_picture(scenes[0]) if len(scenes) == 1 else about_pictures(scenes)


def _branches(rng: random.Random, scenes: Sequence[Scene]) -> list[list[Turn]]:
    """Questions on the pictures; one in five is followed by another in the same conversation."""
    askable = _askable(scenes)
    return [pick_turns(rng, askable, 2 if rng.random() < 0.2 else 1) for _ in range(BRANCHES)]


def _text_branches(rng: random.Random) -> list[list[Turn]]:
    return [[about_nothing(rng) for _ in range(2 if rng.random() < 0.2 else 1)] for _ in range(BRANCHES)]


def _opening(rng: random.Random) -> str:
    """What stands before the pictures: perhaps a system prompt, seldom an earlier turn about something else."""
    system = f"<|im_start|>system\n{rng.choice(SYSTEM_PROMPTS)}<|im_end|>\n" if rng.random() < 0.2 else ""
    return f"{system}{_earlier_turn(rng) if rng.random() < 0.06 else ''}<|im_start|>user\n"


def _earlier_turn(rng: random.Random) -> str:
    turn = about_nothing(rng)
    return f"<|im_start|>user\n{turn.question}<|im_end|>\n<|im_start|>assistant\n{turn.answer}<|im_end|>\n"
