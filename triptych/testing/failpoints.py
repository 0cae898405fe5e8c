"""Failpoints for the length of a `with` block, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from triptych.core.failpoints import parse_failpoints
from triptych.faults import points


@contextmanager
def armed(text: str, worker: str = "") -> Iterator[None]:
    """As TRIPTYCH_FAILPOINTS says it. Several workers in one process share them. Raises StartupError."""
    points.arm(parse_failpoints(text), worker)
    try:
        yield
    finally:
        points.arm(())
