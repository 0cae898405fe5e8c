"""Shows that it works: a cluster of four processes is asked about pictures that are drawn now, and judged.

    python -m scripts.demo [--seed N] [--url URL] [--save DIR]

Without `--seed` the pictures are new ones each time. The questions are of the kinds that the small model is surest of;
`scripts/eval_demo_model.py` asks all kinds and says how often it errs. Exit status 0 means that every answer was right.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from scripts.cluster import ClusterFailed, running_cluster
from scripts.demo_model.questions import Turn, about_picture, about_pictures
from scripts.demo_model.scenes import Grid, Kind, Scene, draw, evaluation_seed, make_scene
from triptych.cli.chat import unreachable
from triptych.cli.client import Answer, ChatClient, ChatFailed, picture_part
from triptych.cli.display import write_what_the_terminal_can
from triptych.cli.timeline_view import render, served_by

SEEDS = 1 << 16
MAX_TOKENS = 64
STAGES = ("router", "encoder", "prefill", "decode")

# kind of picture, and its size in rows and columns of tokens: large enough to see what is there
PICTURES: tuple[tuple[Kind, Grid], ...] = (
    ("one", (6, 5)),
    ("one", (8, 5)),
    ("many", (5, 10)),
    ("digit", (6, 6)),
    ("one", (5, 6)),
)
# pictures shown (counted from 0), kind of question
ASKED: tuple[tuple[tuple[int, ...], str], ...] = (
    ((0,), "colour"),
    ((0,), "shape"),
    ((1,), "colour"),
    ((1,), "shape"),
    ((2,), "count"),
    ((2,), "position"),
    ((3,), "digit"),
    ((3,), "digit colour"),
    ((0, 4), "colour in picture k"),
    ((4, 1), "shape in picture k"),
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A question with its pictures, what came back and how long it took."""

    pictures: tuple[int, ...]
    turn: Turn
    answer: Answer
    seconds: float

    @property
    def is_right(self) -> bool:
        return self.answer.text.strip() == self.turn.answer


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    write_what_the_terminal_can()
    scenes = [
        make_scene(evaluation_seed(options.seed, index), grid, kind) for index, (kind, grid) in enumerate(PICTURES)
    ]
    pictures = [draw(scene) for scene in scenes]
    print(f"seed {options.seed} (the same pictures again: --seed {options.seed})\n")
    for number, (scene, picture) in enumerate(zip(scenes, pictures, strict=True), 1):
        print(f"picture {number}   {picture.width:3} x {picture.height:3} pixels   {_truth_of(scene)}")
    try:
        if options.save:
            _save(pictures, options.save)
        with _server(options.url) as url, ChatClient(url) as client:
            results = _ask_all(client, scenes, pictures, random.Random(options.seed))
    except (ClusterFailed, ChatFailed, OSError) as failure:
        return _failed(str(failure))
    except httpx.HTTPError as error:
        return _failed(unreachable(options.url or "the cluster's API", error).message)
    return _conclude(results)


def _failed(why: str) -> int:
    print(f"error: {why}", file=sys.stderr)
    return 1


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts.demo", description="Asks a cluster about pictures drawn now.")
    parser.add_argument("--seed", type=_seed, default="random", help=f"below {SEEDS}, or: random (%(default)s)")
    parser.add_argument("--url", help="of a running cluster; without it one is started and stopped")
    parser.add_argument("--save", type=Path, metavar="DIR", help="also write the pictures there")
    return parser.parse_args(argv)


def _seed(text: str) -> int:
    if text == "random":
        return random.SystemRandom().randrange(SEEDS)
    if not text.isdecimal() or int(text) >= SEEDS:
        raise argparse.ArgumentTypeError(f"a number below {SEEDS}, or random, but not {text}")
    return int(text)


@contextlib.contextmanager
def _server(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    print("\nstarting router, encoder, prefill and decode ...", flush=True)
    began = time.monotonic()
    with running_cluster("--topology", "e-p-d") as started:
        print(f"ready after {time.monotonic() - began:.1f} s at {started}\n", flush=True)
        yield started


def _ask_all(
    client: ChatClient, scenes: Sequence[Scene], pictures: Sequence[Image.Image], rng: random.Random
) -> list[Asked]:
    model = client.model_name()
    parts = [picture_part(_png(picture)) for picture in pictures]
    results = []
    for shown, kind in ASKED:
        turn = _pick(rng, [scenes[index] for index in shown], kind)
        content = [*(parts[index] for index in shown), {"type": "text", "text": turn.question}]
        began = time.monotonic()
        answer = client.ask(_body(model, content), timeline=True)
        results.append(Asked(shown, turn, answer, time.monotonic() - began))
        _show(len(results), results[-1])
    return results


def _pick(rng: random.Random, scenes: Sequence[Scene], kind: str) -> Turn:
    """A question of that kind; about a later picture where there are several."""
    turns = about_picture(scenes[0]) if len(scenes) == 1 else about_pictures(scenes)
    fitting = [turn for turn in turns if turn.kind == kind]
    return fitting[-1] if len(scenes) > 1 else rng.choice(fitting)


def _body(model: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": model, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0}


def _show(number: int, asked: Asked) -> None:
    where = "pictures" if len(asked.pictures) > 1 else "picture"
    workers: Mapping[str, str] = served_by(asked.answer.timeline)
    served = "   ".join(f"{stage}: {workers.get(stage, '?')}" for stage in STAGES)
    print(f"{number:2}  {where} {' and '.join(str(index + 1) for index in asked.pictures)}: {asked.turn.question}")
    print(f"    true answer   {asked.turn.answer}")
    print(f"    given answer  {asked.answer.text.strip()}   {'right' if asked.is_right else 'WRONG'}")
    print(f"    served by     {served}   in {asked.seconds * 1000:.0f} ms\n", flush=True)


def _conclude(results: Sequence[Asked]) -> int:
    shown = next(asked for asked in results if len(asked.pictures) > 1)
    print(f"timeline of the question {shown.turn.question!r}\n")
    print(render(shown.answer.timeline))
    right = sum(asked.is_right for asked in results)
    print(f"\n{right} of {len(results)} answers are right")
    return 0 if right == len(results) else 1


def _truth_of(scene: Scene) -> str:
    description = next(turn.answer for turn in about_picture(scene) if turn.kind == "describe")
    return description.removeprefix("The picture shows ").rstrip(".")


def _png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def _save(pictures: Sequence[Image.Image], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, picture in enumerate(pictures, 1):
        picture.save(folder / f"picture-{number}.png")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
