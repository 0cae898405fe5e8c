"""Resident memory of process trees, from /proc."""

from __future__ import annotations

import os
import threading
from pathlib import Path

PERIOD_SECONDS = 0.5


def tree(root: int) -> list[int]:
    """The process and all its descendants that live now."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _parent(entry)) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def resident_bytes(root: int) -> int:
    """Of the whole tree. Memory that its processes share counts once for each: an upper bound."""
    return sum(_resident(pid) for pid in tree(root))


class PeakMemory:
    """Samples trees on a thread of its own until closed, and keeps the peaks."""

    def __init__(self) -> None:
        self._peaks: dict[str, int] = {}
        self._roots: dict[str, int] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._sample, daemon=True).start()

    def watch(self, name: str, root: int) -> None:
        self._roots = {**self._roots, name: root}

    def peaks(self) -> dict[str, int]:
        """Bytes, by name."""
        return dict(self._peaks)

    def close(self) -> None:
        self._closed.set()

    def _sample(self) -> None:
        while not self._closed.wait(PERIOD_SECONDS):
            for name, root in self._roots.items():
                self._peaks[name] = max(self._peaks.get(name, 0), resident_bytes(root))


def _parent(entry: Path) -> int | None:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None  # it has ended


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
