"""`triptych models`: which architectures this installation serves."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.core.errors import StartupError
from triptych.model.adapters.base import Adapter
from triptych.model.registry import Scan, scan

HEAD = ("architecture", "family", "takes", "attention", "embedding levels", "status")


def main(argv: Sequence[str]) -> int:
    """Prints the table; status 0, also when a module could not be imported: the others serve."""
    if argv and argv[0] in ("-h", "--help"):
        print("usage: triptych models\n\nlists the architectures that can be served, and what each takes")
        return 0
    if argv:
        raise StartupError("triptych models takes no flags")
    print(table(scan()))
    return 0


def table(found: Scan) -> str:
    """A row for each family, then what could not be imported and why."""
    rows = [HEAD, *(_row(adapter) for adapter in found.adapters)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if found.broken:
        lines += ["", "left out, because they could not be imported:"]
        lines += [f"  {broken.module}: {_one_line(broken.reason)}" for broken in found.broken]
    return "\n".join(lines)


def _row(adapter: type[Adapter]) -> tuple[str, ...]:
    takes = ", ".join(["text", *(modality.value for modality in adapter.modalities)])
    levels = "1 + those of the checkpoint" if adapter.extra_inputs else "1"
    return adapter.architecture, adapter.family, takes, adapter.attention.value, levels, "served"


def _one_line(text: str) -> str:
    return " ".join(text.split())
