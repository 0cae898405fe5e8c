"""Where failpoints fire (`triptych.core.failpoints` says what they are). Nothing happens unless `arm` was called.

A process has one set, armed once at its start; whoever passes a point does not know who armed it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence

from triptych.core.errors import error_from_code
from triptych.core.failpoints import Action, Delay, Exit, Fail, FailpointRule, Kill, Throttle
from triptych.obs import metrics

log = logging.getLogger(__name__)


class _Armed:
    """Owner of what is left of each rule's count. Used from any thread."""

    def __init__(self, rules: Sequence[FailpointRule], worker: str) -> None:
        self._rules = rules
        self._worker = worker
        self._left = [rule.count for rule in rules]
        # The same rules in the same worker draw the same chances, run after run.
        self._random = random.Random(f"{worker}:{rules}")
        self._lock = threading.Lock()

    def due(self, name: str, item: int | None) -> Iterator[FailpointRule]:
        for index, rule in enumerate(self._rules):
            if rule.matches(name, item, self._worker) and self._take(index, rule.probability):
                yield rule

    def _take(self, index: int, probability: float) -> bool:
        with self._lock:
            left = self._left[index]
            if left == 0 or self._random.random() >= probability:
                return False
            self._left[index] = None if left is None else left - 1
            return True


_armed: _Armed | None = None


def arm(rules: Sequence[FailpointRule], worker: str = "") -> None:
    """From now on these rules hold in this process, and no others."""
    global _armed
    _armed = _Armed(rules, worker) if rules else None
    if rules:
        log.warning("failpoints are armed", extra={"failpoints": [rule.name for rule in rules]})


def passing(name: str) -> None:
    """On a thread that may sleep. May raise what `error` names, or never come back."""
    if _armed is not None:
        for rule in _armed.due(name, None):
            if isinstance(rule.action, Delay):
                _tell(rule)
                time.sleep(rule.action.milliseconds / 1e3)
            else:
                _end(rule, rule.action)


async def passing_async(name: str, item: int | None = None, num_bytes: int = 0) -> None:
    """`passing` for an event loop, which goes on meanwhile. `num_bytes` are on their way there."""
    if _armed is not None:
        for rule in _armed.due(name, item):
            seconds = _slowness_s(rule.action, num_bytes)
            if seconds is None:
                _end(rule, rule.action)
            else:
                _tell(rule)
                await asyncio.sleep(seconds)


def _slowness_s(action: Action, num_bytes: int) -> float | None:
    """None for what is more than slow."""
    match action:
        case Delay(milliseconds):
            return milliseconds / 1e3
        case Throttle(bytes_per_s):
            return num_bytes / bytes_per_s
    return None


def _end(rule: FailpointRule, action: Action) -> None:
    _tell(rule)
    match action:
        case Fail(code):
            raise error_from_code(code, f"the failpoint {rule.name} was told to fail here")
        case Exit(status):
            os._exit(status)
        case Kill():
            os.kill(os.getpid(), signal.SIGKILL)


def _tell(rule: FailpointRule) -> None:
    metrics.FAILPOINTS.labels(rule.name).inc()
    log.warning("a failpoint fires", extra={"failpoint": rule.name, "action": type(rule.action).__name__})
