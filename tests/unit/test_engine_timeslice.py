"""A longer time slice, as the kernel tells of it."""

from __future__ import annotations

import os
import platform
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from triptych.engine.timeslice import lengthen_time_slice

T = TypeVar("T")

needs_slices = pytest.mark.skipif(
    platform.system() != "Linux" or tuple(map(int, re.findall(r"\d+", platform.release())[:2])) < (6, 12),
    reason="time slices can be asked for since Linux 6.12",
)


def in_a_thread(action: Callable[[], T]) -> T:
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(action()))
    thread.start()
    thread.join()
    return found[0]


def own_slice_ns() -> int:
    """As /proc tells it of the calling thread; 0 where the kernel was built without it."""
    told = Path(f"/proc/self/task/{threading.get_native_id()}/sched")
    found = re.search(r"^se\.slice\s*:\s*(\d+)", told.read_text(), re.M) if told.exists() else None
    return int(found[1]) if found else 0


@needs_slices
def test_a_thread_gets_the_slice_that_it_asks_for_and_no_other_thread_does() -> None:
    def ask() -> tuple[bool, int]:
        return lengthen_time_slice(0.02), own_slice_ns()

    before = own_slice_ns()
    has_it, slice_ns = in_a_thread(ask)
    assert has_it
    assert slice_ns in (0, 20_000_000)
    assert own_slice_ns() == before


def test_how_far_a_thread_stands_back_stays() -> None:
    def ask() -> tuple[int, int]:
        me = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, me, 7)
        lengthen_time_slice(0.02)
        return os.getpriority(os.PRIO_PROCESS, me), os.sched_getscheduler(me)

    assert in_a_thread(ask) == (7, os.SCHED_OTHER)


def test_a_slice_that_no_kernel_gives_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "another")
    assert in_a_thread(lambda: lengthen_time_slice(0.02)) is False
