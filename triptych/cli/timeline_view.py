"""A timeline record as text: one row an event, with a bar that shows when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

BAR_COLUMNS = 40
_HEADINGS = ("stage", "event", "worker", "start ms", "took ms", "tokens", "bytes", "note")
_NUMERIC = frozenset({"start ms", "took ms", "tokens", "bytes"})


def render(timeline: Sequence[Mapping[str, Any]], bar_columns: int = BAR_COLUMNS) -> str:
    """The rows by start. Times count from the first event. An empty timeline gives a sentence."""
    if not timeline:
        return "the server sent no timeline"
    rows = sorted(timeline, key=lambda row: (int(row["start_ns"]), int(row["end_ns"])))
    first = int(rows[0]["start_ns"])
    span = max(1, max(int(row["end_ns"]) for row in rows) - first)
    cells = [_cells(row, first) for row in rows]
    widths = [max(len(heading), *(len(row[i]) for row in cells)) for i, heading in enumerate(_HEADINGS)]
    lines = [_line(_HEADINGS, widths, "when")]
    for row, texts in zip(rows, cells, strict=True):
        lines.append(
            _line(texts, widths, _bar(int(row["start_ns"]) - first, int(row["end_ns"]) - first, span, bar_columns))
        )
    return "\n".join(lines)


def served_by(timeline: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Which worker served each stage; several of one stage joined by a plus."""
    workers: dict[str, list[str]] = {}
    for row in timeline:
        names = workers.setdefault(str(row["stage"]), [])
        if row.get("worker") and row["worker"] not in names:
            names.append(str(row["worker"]))
    return {stage: "+".join(sorted(names)) for stage, names in workers.items() if names}


def _cells(row: Mapping[str, Any], first_ns: int) -> tuple[str, ...]:
    return (
        str(row["stage"]),
        str(row["event"]),
        str(row.get("worker") or ""),
        f"{(int(row['start_ns']) - first_ns) / 1e6:.1f}",
        f"{(int(row['end_ns']) - int(row['start_ns'])) / 1e6:.1f}",
        str(row.get("tokens") or ""),
        str(row.get("bytes") or ""),
        _note(row),
    )


def _note(row: Mapping[str, Any]) -> str:
    notes = []
    if row.get("item") is not None:
        notes.append(f"item {row['item']}")
    if row.get("source"):
        notes.append(str(row["source"]))
    if row.get("attempt"):
        notes.append(f"attempt {row['attempt']}")
    return ", ".join(notes)


def _line(texts: Sequence[str], widths: Sequence[int], bar: str) -> str:
    padded = (
        text.rjust(width) if heading in _NUMERIC else text.ljust(width)
        for text, width, heading in zip(texts, widths, _HEADINGS, strict=True)
    )
    return "  ".join((*padded, bar)).rstrip()


def _bar(start_ns: int, end_ns: int, span_ns: int, columns: int) -> str:
    """At least one column; a moment is a dot."""
    begin = min(columns - 1, start_ns * columns // span_ns)
    if start_ns == end_ns:
        return " " * begin + "·"
    end = max(begin + 1, min(columns, -(-end_ns * columns // span_ns)))
    return " " * begin + "█" * (end - begin)
