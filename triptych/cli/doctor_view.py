"""The doctor's report: as a table for people, as JSON for programs."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TextIO

from triptych.cli.checks.finding import Finding, Status

_NAME_COLUMNS = 15
_COLOURS = {Status.OK: "32", Status.WARN: "33", Status.FAIL: "31;1"}


def has_colours(out: TextIO) -> bool:
    """On a terminal, unless NO_COLOR asks for none."""
    return out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def row(finding: Finding, colours: bool) -> str:
    """A line, and below it what to do."""
    mark = f"{finding.status.value:<4}"
    if colours:
        mark = f"\x1b[{_COLOURS[finding.status]}m{mark}\x1b[0m"
    line = f"{mark}  {finding.name:<{_NAME_COLUMNS}}  {_one_line(finding.found)}"
    return line if finding.todo is None else f"{line}\n{'':<{_NAME_COLUMNS + 8}}-> {_one_line(finding.todo)}"


def summary(findings: Sequence[Finding]) -> str:
    counts = {status: sum(finding.status is status for finding in findings) for status in Status}
    verdict = "a cluster cannot run like this" if counts[Status.FAIL] else "a cluster can run here"
    return f"{counts[Status.OK]} ok, {counts[Status.WARN]} to look at, {counts[Status.FAIL]} failed: {verdict}"


def as_json(findings: Sequence[Finding], version: str) -> str:
    return json.dumps(
        {
            "version": version,
            "ok": all(finding.status is not Status.FAIL for finding in findings),
            "checks": [
                {
                    "name": finding.name,
                    "status": finding.status.value,
                    "found": _one_line(finding.found),
                    "todo": None if finding.todo is None else _one_line(finding.todo),
                }
                for finding in findings
            ],
        },
        indent=2,
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())
