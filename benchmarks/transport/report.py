"""What is written: JSON for programs, a table to read."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.engine.keys import Key
from benchmarks.engine.report import rounded
from benchmarks.transport.cells import ARMS, MEMCPY, shown
from benchmarks.transport.results import Results

HEADINGS = "arm | size | round trip us | before it us | stream GB/s | of memcpy | rounds"


def as_json(results: Results, keys: Mapping[str, Key], settings: Mapping[str, object]) -> dict[str, Any]:
    return {
        **{name: key.value for name, key in keys.items()},
        "notes": {name: key.note for name, key in keys.items() if key.note},
        "settings": {**settings, "machine": f"{platform.machine()}, {os.cpu_count()} cores"},
        "cells": [_row(results, arm, num_bytes) for arm, num_bytes in sorted(results.turns, key=_place)],
        "handoff": None if results.handoff is None else _rounded(asdict(results.handoff)),
        "hidden": None if results.hidden is None else _rounded(asdict(results.hidden)),
        "missing": [{"arm": arm, "why": why} for arm, why in results.missing.items()],
    }


def _place(cell: tuple[str, int]) -> tuple[int, int]:
    return cell[1], ARMS.index(cell[0])


def _row(results: Results, arm: str, num_bytes: int) -> dict[str, Any]:
    turn, floor = results.of(arm, num_bytes), results.of(MEMCPY, num_bytes)
    assert turn is not None
    row = {
        "arm": arm,
        "bytes": num_bytes,
        "round_trip_us": 1e6 * turn.round_trip_s,
        "prepare_us": 1e6 * turn.prepare_s,
        "gb_per_s": turn.bytes_per_s / 1e9,
        "of_memcpy": None if floor is None else turn.bytes_per_s / floor.bytes_per_s,
        "rounds": len(results.turns[arm, num_bytes]),
    }
    return _rounded(row)


def _rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: rounded(value) for name, value in row.items()}


def as_markdown(written: Mapping[str, Any], keys: Mapping[str, Key]) -> str:
    lines = ["# Transport benchmark", "", "Made by `python -m benchmarks.transport`; docs/benchmarks.md explains it."]
    lines += ["", "| key | value | note |", "|---|---|---|"]
    lines += [f"| `{name}` | {json.dumps(key.value)} | {key.note.replace('|', '/')} |" for name, key in keys.items()]
    lines += ["", "## Between two processes", "", f"| {HEADINGS} |", "|" + "---|" * len(HEADINGS.split("|"))]
    lines += [_line(row) for row in written["cells"]]
    for name, title in (("handoff", "In a cluster"), ("hidden", "In a cluster with a throttled link")):
        if written[name] is not None:
            lines += ["", f"## {title}", "", "| figure | value |", "|---|---|", *_figures(written[name])]
    lines += ["", "## Missing", "", *[f"- {row['arm']}: {row['why']}" for row in written["missing"]]]
    return "\n".join(lines) + "\n"


def _line(row: Mapping[str, Any]) -> str:
    share = "" if row["of_memcpy"] is None else f"{row['of_memcpy']:.2f}"
    cells = (
        row["arm"],
        shown(row["bytes"]),
        f"{row['round_trip_us']:.0f}",
        f"{row['prepare_us']:.0f}",
        f"{row['gb_per_s']:.2f}",
        share,
        row["rounds"],
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def _figures(row: Mapping[str, Any]) -> Iterable[str]:
    return (f"| {name} | {value} |" for name, value in row.items())


def write(folder: Path, written: Mapping[str, Any], keys: Mapping[str, Key]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "transport.json").write_text(json.dumps(written, indent=1) + "\n")
    (folder / "transport.md").write_text(as_markdown(written, keys))
