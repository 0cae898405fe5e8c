"""In which order waiting prompts get their reservation: first come first served, with bounded bypass.

A prompt too large for what is free now may be overtaken, but only so many times: then everybody waits for it. So a
large request is never starved, and a small one is not held up by it for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Waiting(Generic[T]):
    request: T
    overtaken: int = 0


class AdmissionQueue(Generic[T]):
    """Waiting requests in order of arrival. Owned by one engine."""

    def __init__(self, max_bypass: int = 16) -> None:
        self._waiting: list[_Waiting[T]] = []
        self._max_bypass = max_bypass

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: T) -> None:
        self._waiting.append(_Waiting(request))

    def remove(self, request: T) -> bool:
        """Takes a request out; False when it was not waiting."""
        kept = [entry for entry in self._waiting if entry.request is not request]
        removed = len(kept) < len(self._waiting)
        self._waiting = kept
        return removed

    def admit(self, reserve: Callable[[T], bool], max_admissions: int) -> list[T]:
        """Offers requests in order to `reserve`, which takes all that a request needs or nothing, until a blocked
        request has been overtaken often enough or `max_admissions` got in. Returns those that got in."""
        admitted: list[T] = []
        blocked: list[_Waiting[T]] = []
        rest = list(self._waiting)
        while rest and len(admitted) < max_admissions:
            entry = rest.pop(0)
            if reserve(entry.request):
                admitted.append(entry.request)
                for earlier in blocked:
                    earlier.overtaken += 1
            else:
                blocked.append(entry)
            if any(earlier.overtaken >= self._max_bypass for earlier in blocked):
                break
        self._waiting = blocked + rest
        return admitted
