"""Where a sequence is in its life at a language-model stage: one table, no other place decides.

prefill worker:   QUEUED -> ADMITTED -> RUNNING -> HANDING_OFF -> DONE
decode worker:    GRANTED -> BOUND -> DECODING -> DONE
both in one:      QUEUED -> ADMITTED -> RUNNING -> DECODING -> DONE
without pages:    DECODING -> RETRACTED -> DECODING
anywhere:         -> ABORTED
"""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    QUEUED = "queued"
    ADMITTED = "admitted"
    RUNNING = "running"
    HANDING_OFF = "handing_off"
    GRANTED = "granted"
    BOUND = "bound"
    DECODING = "decoding"
    RETRACTED = "retracted"
    DONE = "done"
    ABORTED = "aborted"


TERMINAL = frozenset({Phase.DONE, Phase.ABORTED})

_NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.QUEUED: frozenset({Phase.ADMITTED}),
    Phase.ADMITTED: frozenset({Phase.RUNNING}),
    Phase.RUNNING: frozenset({Phase.HANDING_OFF, Phase.DECODING, Phase.DONE}),
    Phase.HANDING_OFF: frozenset({Phase.DONE}),
    Phase.GRANTED: frozenset({Phase.BOUND}),
    Phase.BOUND: frozenset({Phase.DECODING, Phase.DONE}),
    Phase.DECODING: frozenset({Phase.RETRACTED, Phase.DONE}),
    Phase.RETRACTED: frozenset({Phase.DECODING}),
    Phase.DONE: frozenset(),
    Phase.ABORTED: frozenset(),
}


class IllegalTransition(AssertionError):
    """A bug of ours: a phase was entered from one that does not lead there."""


def advance(current: Phase, to: Phase) -> Phase:
    """Returns `to`, or raises IllegalTransition."""
    if to is Phase.ABORTED and current not in TERMINAL:
        return to
    if to not in _NEXT[current]:
        raise IllegalTransition(f"{current.value} -> {to.value}")
    return to
