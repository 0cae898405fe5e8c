"""In which order waiting prompts get their reservation: the urgent, then the short, with bounded bypass.

Offers go by priority, then shortest prompt first with aging (`triptych.sched.aging`); the length is that of the
expanded prompt, pictures included. A reservation is all or nothing, so who waits holds nothing, and no two can wait for
each other. A prompt too large for what is free now may be passed, but only so many times: then it is the next.

**Bounds.** A request is *passed* when one that came later, of its own or a less urgent priority, gets in before it.

1. It is passed at most `max_bypass` times. Then it is the first of its priority, and nobody of it or a less urgent one
   gets in before it.
2. When it has waited for `max_wait_s`, nobody at all gets in before it but those that came earlier and wait as long:
   everything waits until it fits. So more urgent requests hold it up for `max_wait_s`, and then only for as long as
   those that run take to make room.
3. One that was in before and comes again (a replay) goes before all others, and nobody passes it. It counts for no
   bypass: before it lost its place it was in before those that wait now, and no more than `MAX_RETRACTIONS` times.
4. As each fits an empty worker (the engine refuses the others), and all that run end, everybody gets in.

Cost: O(n log n) a call, and O(n) for each request that gets in (a nearly sorted list is sorted again).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from triptych.sched.aging import Aging
from triptych.sched.language import PROMPT_AGING

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ticket:
    """What the policy may know of a request: tokens of its prompt, when it was queued, and its priority (the lower, the
    more urgent), and how often it was in before. Those pushed later are queued no earlier."""

    num_tokens: int
    queued_ns: int
    priority: int = 0
    num_replays: int = 0


@dataclass(slots=True)
class _Waiting(Generic[T]):
    request: T
    ticket: Ticket
    serial: int
    num_passed: int = 0


class AdmissionQueue(Generic[T]):
    """Waiting requests. Owned by one engine."""

    def __init__(
        self, max_bypass: int = 16, max_wait_s: float = 10.0, max_refusals: int = 32, aging: Aging = PROMPT_AGING
    ) -> None:
        """`max_refusals` bounds how many are offered in vain in one call: an offer costs a look at the cache."""
        self._waiting: list[_Waiting[T]] = []
        self._num_pushed = 0
        self._max_bypass = max_bypass
        self._max_wait_s = max_wait_s
        self._max_refusals = max_refusals
        self._aging = aging

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: T, ticket: Ticket) -> None:
        self._waiting.append(_Waiting(request, ticket, self._num_pushed))
        self._num_pushed += 1

    def remove(self, request: T) -> bool:
        """Takes a request out; False when it was not waiting."""
        kept = [entry for entry in self._waiting if entry.request is not request]
        removed = len(kept) < len(self._waiting)
        self._waiting = kept
        return removed

    def admit(self, reserve: Callable[[T], bool], max_admissions: int, now_ns: int) -> list[T]:
        """Offers requests in order to `reserve`, which takes all that a request needs or nothing, until one that may be
        passed no more is refused or `max_admissions` got in. Returns those that got in."""
        admitted: list[T] = []
        refused: list[_Waiting[T]] = []
        rest = sorted(self._waiting, key=lambda entry: self._turn(entry, now_ns), reverse=True)
        while rest and len(admitted) < max_admissions and len(refused) < self._max_refusals:
            entry = rest.pop()
            if not reserve(entry.request):
                refused.append(entry)
                if self._is_next(entry, now_ns):
                    break
                continue
            admitted.append(entry.request)
            is_rest_spent, is_refused_spent = self._has_passed(entry, rest), self._has_passed(entry, refused)
            if is_refused_spent:
                break
            if is_rest_spent:
                rest.sort(key=lambda entry: self._turn(entry, now_ns), reverse=True)
        self._waiting = refused + rest
        return admitted

    def _has_passed(self, winner: _Waiting[T], others: list[_Waiting[T]]) -> bool:
        """Counts whom it passed; True when one of them may be passed no more."""
        is_spent = False
        if winner.ticket.num_replays:
            return False
        for entry in others:
            if entry.serial < winner.serial and entry.ticket.priority <= winner.ticket.priority:
                entry.num_passed += 1
                is_spent = is_spent or entry.num_passed >= self._max_bypass
        return is_spent

    def _is_next(self, entry: _Waiting[T], now_ns: int) -> bool:
        is_spent = entry.num_passed >= self._max_bypass
        return entry.ticket.num_replays > 0 or is_spent or self._has_waited(entry, now_ns)

    def _has_waited(self, entry: _Waiting[T], now_ns: int) -> bool:
        return now_ns - entry.ticket.queued_ns >= self._max_wait_s * 1e9

    def _turn(self, entry: _Waiting[T], now_ns: int) -> tuple[int, int, int, float, int]:
        """What to sort by: those that come again and then those that waited long enough, in order of arrival, then by
        priority; within one first those that were passed often enough."""
        ticket = entry.ticket
        if ticket.num_replays:
            return -1, 0, 0, 0.0, entry.serial
        if self._has_waited(entry, now_ns):
            return 0, 0, 0, 0.0, entry.serial
        if entry.num_passed >= self._max_bypass:
            return 1, ticket.priority, 0, 0.0, entry.serial
        rank = self._aging.rank(ticket.num_tokens, (now_ns - ticket.queued_ns) / 1e9)
        return 1, ticket.priority, 1, rank, entry.serial
