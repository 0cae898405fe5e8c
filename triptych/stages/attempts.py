"""Fences off older attempts: a stage never works for a try that the router has given up."""

from __future__ import annotations

from collections import OrderedDict

from triptych.core.errors import StaleAttempt
from triptych.core.ids import AttemptRef

MAX_REMEMBERED = 65_536


class AttemptFence:
    """Remembers the newest attempt of each (request, choice), the latest ones first to stay. Used on the event loop."""

    def __init__(self) -> None:
        self._newest: OrderedDict[tuple[str, int], int] = OrderedDict()

    def enter_once(self, ref: AttemptRef) -> None:
        """For calls that an attempt makes once: raises StaleAttempt also when this very attempt has been seen."""
        if self._newest.get(ref.sequence_key) == ref.attempt:
            raise StaleAttempt("this attempt is already under way")
        self.enter(ref)

    def enter(self, ref: AttemptRef) -> None:
        """Raises StaleAttempt when a newer attempt has been seen."""
        newest = self._newest.get(ref.sequence_key, -1)
        if ref.attempt < newest:
            raise StaleAttempt("a newer attempt at this request is under way")
        self._newest[ref.sequence_key] = ref.attempt
        self._newest.move_to_end(ref.sequence_key)
        if len(self._newest) > MAX_REMEMBERED:
            self._newest.popitem(last=False)
