"""Token ids to the text that the caller sees: detokenized, and cut at the caller's stop strings."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from triptych.core.plan import Sampling, Token
from triptych.text.detokenizer import IncrementalDetokenizer
from triptych.text.stop import StopMatcher


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that became certain, and the tokens shown with it: those whose text begins in what is certain by now.

    All pieces of an answer together hold every token of which any text is shown, in order and once: not the token that
    ended the answer, and none that only spelled a stop string.
    """

    text: str
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class _Placed:
    """A token, and the characters of the whole text that it has a part in."""

    token: Token
    start: int
    end: int


class AnswerText:
    """The text of one answer. `num_tokens` counts those that were needed for it."""

    def __init__(self, detokenizer: IncrementalDetokenizer, stops: Sequence[str], sampling: Sampling) -> None:
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops)
        self._end_ids = sampling.stop_token_ids
        self._min_tokens = sampling.min_tokens
        self._unplaced: list[Token] = []
        self._placed: deque[_Placed] = deque()
        self._num_read = 0
        self._num_shown = 0
        self.num_tokens = 0

    @property
    def stopped(self) -> bool:
        """A stop string was completed: nothing more is needed."""
        return self._stops.stopped

    def push(self, tokens: Sequence[Token]) -> TextPiece:
        """What became certain."""
        shown: list[str] = []
        for token in tokens:
            if self.stopped:
                break
            self.num_tokens += 1
            if token.id in self._end_ids:
                continue  # it ends the answer and is no part of it
            self._unplaced.append(token)
            shown.append(self._show(self._detokenizer.push([token.id])))
        return TextPiece("".join(shown), self._take())

    def finish(self) -> TextPiece:
        """What was held back, when the tokens have ended."""
        text = self._show(self._detokenizer.flush())
        self._place(0)
        if not self.stopped:
            rest = self._stops.flush()
            self._num_shown += len(rest)
            text += rest
        return TextPiece(text, self._take())

    def _show(self, fresh: str) -> str:
        """Of `fresh` text and what was held back before it: what is certain now. Stop strings count when they end in a
        token after the first `min_tokens`."""
        if fresh:
            self._place(len(fresh))
        text = self._stops.push(fresh) if self.num_tokens > self._min_tokens else self._stops.pass_over(fresh)
        self._num_shown += len(text)
        return text

    def _place(self, num_chars: int) -> None:
        """The tokens that waited for a whole character share the text that they make together."""
        end = self._num_read + num_chars
        self._placed.extend(_Placed(token, self._num_read, end) for token in self._unplaced)
        self._unplaced.clear()
        self._num_read = end

    def _take(self) -> tuple[Token, ...]:
        ready: list[Token] = []
        while self._placed and (self._placed[0].start < self._num_shown or self._placed[0].end <= self._num_shown):
            ready.append(self._placed.popleft().token)
        return tuple(ready)
