"""A message that leaves a trace where anybody unpickles it."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class Canary:
    """Unpickled, it makes the folder `trace`. It also tells `listening`."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self._trace),)

    def sung(self) -> bool:
        return self._trace.exists()

    @property
    def raw(self) -> bytes:
        return pickle.dumps(self)

    @property
    def text(self) -> str:
        """For fields that take text only: the protocol that is ASCII."""
        return pickle.dumps(self, protocol=0).decode("ascii")


_heard: list[str] | None = None


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if event == "pickle.find_class" and _heard is not None:
        _heard.append(".".join(map(str, arguments)))


@contextmanager
def listening() -> Iterator[list[str]]:
    """What was looked up to be called by any unpickling in this process meanwhile. The interpreter keeps its hooks, so
    there is one."""
    global _heard
    if not getattr(sys, "_triptych_canary_hook", False):
        sys.addaudithook(_hook)
        sys._triptych_canary_hook = True  # type: ignore[attr-defined]
    _heard = heard = []
    try:
        yield heard
    finally:
        _heard = None
