"""Bars drawn with Pillow: tokens/s and TTFT of each arm, a row of charts for each model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

COLOURS = {
    "mono": "#1b6ca8",
    "e-p-d": "#6fb1e0",
    "transformers-generate": "#b5651d",
    "transformers-continuous": "#e0a96f",
    "vllm": "#777777",
}
PANEL, MARGIN, BAR_ROOM = (620, 260), 40, 150


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """`rows` are the cells of engine.json. One chart for each model and figure."""
    models = sorted({row["model"] for row in rows})
    charts = (("tokens_per_s", "tokens/s (more is better)"), ("ttft_p50_ms", "TTFT p50, ms (less is better)"))
    width, height = len(charts) * PANEL[0], max(1, len(models)) * PANEL[1] + MARGIN
    picture = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(picture)
    for line, model in enumerate(models):
        own = [row for row in rows if row["model"] == model]
        for column, (figure, title) in enumerate(charts):
            _chart(pen, own, figure, f"{model}: {title}", (column * PANEL[0], line * PANEL[1]))
    for index, (arm, colour) in enumerate(COLOURS.items()):
        left = 20 + index * 200
        pen.rectangle((left, height - 28, left + 14, height - 14), fill=colour)
        pen.text((left + 20, height - 30), arm, fill="black", font=font())
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path)


def _chart(
    pen: ImageDraw.ImageDraw, rows: Sequence[Mapping[str, Any]], figure: str, title: str, corner: tuple[int, int]
) -> None:
    left, top = corner
    pen.text((left + 20, top + 8), title, fill="black", font=font())
    groups = sorted({(row["workload"], row["concurrency"]) for row in rows})
    most = max((row[figure] or 0 for row in rows), default=0) or 1
    room = (PANEL[0] - 40) / max(1, len(groups))
    floor = top + 60 + BAR_ROOM
    for index, group in enumerate(groups):
        x = left + 20 + index * room
        name = f"{group[0].replace('pictures', 'pic')}\nc{group[1]}"
        pen.multiline_text((x, floor + 4), name, fill="black", font=font(9))
        arms = [
            row for arm in COLOURS for row in rows if (row["workload"], row["concurrency"], row["arm"]) == (*group, arm)
        ]
        bar = (room - 6) / len(COLOURS)
        for place, row in enumerate(arms):
            tall = BAR_ROOM * (row[figure] or 0) / most
            edge = x + place * bar
            pen.rectangle((edge, floor - tall, edge + bar - 1, floor), fill=COLOURS[row["arm"]])
            pen.text((edge, floor - tall - 11), f"{row[figure] or 0:.0f}", fill="black", font=font(8))


def font(size: int = 12) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
