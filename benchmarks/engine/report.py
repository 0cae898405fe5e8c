"""What is written: JSON for programs, a table to read."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.engine.arms import GENERATE
from benchmarks.engine.keys import Key
from benchmarks.engine.results import Place, Results, bandwidth_share

HEADINGS = (
    "model | workload | clients | arm | TTFT p50 / p99 ms | TPOT p50 / p99 ms | tokens/s | of bandwidth | peak MB"
)


def as_json(results: Results, keys: Mapping[str, Key], settings: Mapping[str, object]) -> dict[str, Any]:
    return {
        **{name: key.value for name, key in keys.items()},
        "notes": {name: key.note for name, key in keys.items() if key.note},
        "settings": {**settings, "machine": f"{platform.machine()}, {os.cpu_count()} cores"},
        "triad_bytes_per_s": results.triad_bytes_per_s,
        "cells": [_row(results, arm, where) for arm, where in results.rounds],
        "missing": [{"arm": arm, "model": case, "why": why} for (arm, case), why in results.missing.items()],
        "commands": [{"arm": arm, "model": case, "command": line} for (arm, case), line in results.commands.items()],
    }


def _row(results: Results, arm: str, where: Place) -> dict[str, Any]:
    case, workload, concurrency = where
    found = results.figures(arm, *where)
    assert found is not None
    share: Mapping[str, float] = {}
    if case in results.weights:
        share = bandwidth_share(found, concurrency, results.weights[case], results.kv[case], results.triad_bytes_per_s)
    row = {
        "model": case,
        "workload": workload,
        "concurrency": concurrency,
        "arm": arm,
        **asdict(found),
        **share,
        "rounds": len(results.rounds[arm, where]),
        "peak_rss_bytes": results.peaks.get((arm, case)),
        "answers_as_generate": _alike(results, arm, where),
    }
    return {name: rounded(value) for name, value in row.items()}


def _alike(results: Results, arm: str, where: Place) -> float | None:
    """The share of answers with the same text as those of `generate`; in bfloat16 few can be expected to be."""
    mine, theirs = results.answers.get((arm, where)), results.answers.get((GENERATE, where))
    if not mine or not theirs:
        return None
    return sum(one.strip() == other.strip() for one, other in zip(mine, theirs, strict=True)) / len(mine)


def rounded(value: object) -> object:
    if isinstance(value, float):
        return round(value, 3) if math.isfinite(value) else None
    return value


def as_markdown(written: Mapping[str, Any], keys: Mapping[str, Key]) -> str:
    lines = ["# Engine benchmark", "", "Made by `python -m benchmarks.engine`; docs/benchmarks.md explains it.", ""]
    lines += ["| key | value | note |", "|---|---|---|"]
    lines += [f"| `{name}` | {json.dumps(key.value)} | {key.note.replace('|', '/')} |" for name, key in keys.items()]
    lines += ["", f"| {HEADINGS} |", "|" + "---|" * len(HEADINGS.split("|"))]
    order = sorted(written["cells"], key=lambda row: (row["model"], row["workload"], row["concurrency"], row["arm"]))
    lines += [_line(row) for row in order]
    lines += ["", "## Missing", ""]
    lines += [f"- {row['arm']} on {row['model']}: {row['why']}" for row in written["missing"]]
    lines += ["", "## Commands", ""]
    lines += [f"- {row['arm']} on {row['model']}: `{row['command']}`" for row in written["commands"]]
    return "\n".join(lines) + "\n"


def _line(row: Mapping[str, Any]) -> str:
    share = row.get("bandwidth_share")
    peak = row["peak_rss_bytes"]
    cells = (
        row["model"],
        row["workload"],
        row["concurrency"],
        row["arm"],
        f"{row['ttft_p50_ms']} / {row['ttft_p99_ms']}",
        f"{row['tpot_p50_ms']} / {row['tpot_p99_ms']}",
        row["tokens_per_s"],
        "" if share is None else f"{share:.2f}",
        "" if peak is None else f"{peak / 1e6:.0f}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def write(folder: Path, written: Mapping[str, Any], keys: Mapping[str, Key]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "engine.json").write_text(json.dumps(written, indent=1) + "\n")
    (folder / "engine.md").write_text(as_markdown(written, keys))
