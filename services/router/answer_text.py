"""Token ids to the text that the caller sees: detokenized, and cut at the caller's stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.core.plan import Token
from triptych.text.detokenizer import IncrementalDetokenizer
from triptych.text.stop import StopMatcher


class AnswerText:
    """The text of one answer. `num_tokens` counts those that were needed for it."""

    def __init__(self, detokenizer: IncrementalDetokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops)
        self.num_tokens = 0

    @property
    def stopped(self) -> bool:
        """A stop string was completed: nothing more is needed."""
        return self._stops.stopped

    def push(self, tokens: Sequence[Token]) -> str:
        """The text that became certain."""
        pieces: list[str] = []
        for token in tokens:
            if self.stopped:
                break
            self.num_tokens += 1
            pieces.append(self._stops.push(self._detokenizer.push([token.id])))
        return "".join(pieces)

    def finish(self) -> str:
        """What was held back, when the tokens have ended."""
        last = self._stops.push(self._detokenizer.flush())
        return last if self.stopped else last + self._stops.flush()
