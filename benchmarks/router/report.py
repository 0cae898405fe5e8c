"""What is written: JSON for programs, a table to read."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.engine.keys import Key
from benchmarks.engine.report import rounded
from benchmarks.router.keys import ADDED_P99
from benchmarks.router.results import Figures, Results, percentile

NAMES = tuple(field.name for field in fields(Figures))
HEADINGS = "cell | CPU ms a request | requests/s | TTFB p50 / p99 ms | cores: server, client | reads an answer | rounds"


def as_json(results: Results, keys: Mapping[str, Key], settings: Mapping[str, object]) -> dict[str, Any]:
    return {
        **{name: key.value for name, key in keys.items()},
        "notes": {name: key.note for name, key in keys.items() if key.note},
        "settings": {**settings, "machine": f"{platform.machine()}, {os.cpu_count()} cores"},
        "cells": [_row(results, cell) for cell in results.rounds],
        "first_token_ms": {arm: _first(values) for arm, values in results.first_ms.items()},
        "routing": results.routing,
    }


def _row(results: Results, cell: str) -> dict[str, Any]:
    figures = {name: rounded(results.median(cell, name)) for name in NAMES}
    return {"cell": cell, **figures, "rounds": len(results.rounds[cell])}


def _first(values: list[float]) -> dict[str, Any]:
    return {
        "p50": rounded(percentile(values, 0.5)),
        "p99": rounded(percentile(values, 0.99)),
        "requests": len(values),
    }


def as_markdown(written: Mapping[str, Any], keys: Mapping[str, Key]) -> str:
    lines = ["# Router benchmark", "", "Made by `python -m benchmarks.router`; docs/benchmarks.md explains it."]
    lines += ["", "| key | value | note |", "|---|---|---|"]
    lines += [f"| `{name}` | {json.dumps(key.value)} | {key.note.replace('|', '/')} |" for name, key in keys.items()]
    lines += ["", "## Cells", "", f"| {HEADINGS} |", "|" + "---|" * len(HEADINGS.split("|"))]
    lines += [_line(row) for row in written["cells"]]
    if ADDED_P99 in keys:
        lines += [
            "",
            "## Time to the first token, text",
            "",
            "| arm | p50 ms | p99 ms | requests |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {arm} | {row['p50']} | {row['p99']} | {row['requests']} |"
            for arm, row in written["first_token_ms"].items()
        ]
    return "\n".join(lines) + "\n"


def _line(row: Mapping[str, Any]) -> str:
    cells = (
        row["cell"],
        f"{row['cpu_ms']:.2f}",
        f"{row['req_per_s']:.0f}",
        f"{row['first_p50_ms']:.1f} / {row['first_p99_ms']:.1f}",
        f"{row['server_cores']:.2f}, {row['client_cores']:.2f}",
        f"{row['reads']:.1f}",
        row["rounds"],
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def write(folder: Path, written: Mapping[str, Any], keys: Mapping[str, Key]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "router.json").write_text(json.dumps(written, indent=1) + "\n")
    (folder / "router.md").write_text(as_markdown(written, keys))
