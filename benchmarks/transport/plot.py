"""Curves drawn with Pillow: bytes/s and round trips of each arm over the size, both on logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from benchmarks.engine.plot import font
from benchmarks.transport.cells import ARMS, OURS, shown, transport_of

PANEL, LEGEND_WIDTH, HEIGHT = 560, 190, 460
LEFT, TOP, RIGHT, BOTTOM = 70, 40, 20, 50
COLOURS = {
    "memcpy": "#222222",
    "inproc": "#2e8b57",
    "shm": "#1b6ca8",
    "zmq-ipc": "#8e44ad",
    "zmq-tcp": "#c0569b",
    "pyzmq-ipc": "#b5651d",
    "pyzmq-tcp": "#e0a96f",
    "grpc": "#888888",
    "nixl": "#5a8f00",
    "raw-nixl": "#9bc53d",
    "raw-nixl-tcp": "#c3d98b",
    "mooncake": "#d0342c",
}
CHARTS = (("gb_per_s", "stream, GB/s (more is better)"), ("round_trip_us", "round trip, us (less is better)"))

Point = tuple[float, float]


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """`rows` are the cells of transport.json. Thin curves: with the commit's checksum."""
    picture = Image.new("RGB", (len(CHARTS) * PANEL + LEGEND_WIDTH, HEIGHT), "white")
    pen = ImageDraw.Draw(picture)
    for column, (figure, title) in enumerate(CHARTS):
        _chart(pen, [row for row in rows if row[figure]], figure, title, column * PANEL)
    arms = [arm for arm in ARMS if any(row["arm"] == arm for row in rows)]
    for line, arm in enumerate(arms):
        left, top = len(CHARTS) * PANEL, TOP + 24 * line
        pen.line([(left, top + 8), (left + 24, top + 8)], fill=COLOURS[transport_of(arm)], width=_width(arm))
        pen.text((left + 32, top), arm, fill="black", font=font())
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path)


def _chart(pen: ImageDraw.ImageDraw, rows: Sequence[Mapping[str, Any]], figure: str, title: str, left: int) -> None:
    pen.text((left + LEFT, 12), title, fill="black", font=font())
    if not rows:
        return
    sizes = sorted({row["bytes"] for row in rows})
    across = scale(sizes[0], sizes[-1], left + LEFT, left + PANEL - RIGHT)
    lowest, highest = decades([row[figure] for row in rows])
    upward = scale(lowest, highest, HEIGHT - BOTTOM, TOP)
    for size in sizes:
        pen.line([(across(size), TOP), (across(size), HEIGHT - BOTTOM)], fill="#eeeeee")
        pen.text((across(size) - 18, HEIGHT - BOTTOM + 8), shown(size), fill="black", font=font(9))
    for power in range(round(math.log10(lowest)), round(math.log10(highest)) + 1):
        height = upward(10.0**power)
        pen.line([(left + LEFT, height), (left + PANEL - RIGHT, height)], fill="#dddddd")
        pen.text((left + 16, height - 7), f"{10.0**power:g}", fill="black", font=font(10))
    for arm in ARMS:
        points: list[Point] = [
            (across(row["bytes"]), upward(row[figure])) for size in sizes for row in rows if _is(row, arm, size)
        ]
        _curve(pen, points, COLOURS[transport_of(arm)], _width(arm))


def _curve(pen: ImageDraw.ImageDraw, points: Sequence[Point], colour: str, width: int) -> None:
    if len(points) > 1:
        pen.line(list(points), fill=colour, width=width)
    for x, y in points:
        pen.ellipse((x - width, y - width, x + width, y + width), fill=colour)


def scale(low: float, high: float, begin: float, end: float) -> Callable[[float], float]:
    """A logarithmic axis: where `low` to `high` lie between `begin` and `end`."""
    span = math.log(high / low) or 1.0
    return lambda value: begin + (end - begin) * math.log(value / low) / span


def decades(values: Sequence[float]) -> tuple[float, float]:
    """The powers of ten around them, one at least apart."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return 10.0**low, 10.0 ** max(high, low + 1)


def _is(row: Mapping[str, Any], arm: str, size: int) -> bool:
    return bool(row["arm"] == arm and row["bytes"] == size)


def _width(arm: str) -> int:
    return 1 if arm not in COLOURS else 3 if arm in OURS else 2
