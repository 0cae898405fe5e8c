"""Stop strings over a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Cuts a stream of text where the first stop string is complete, whatever the pieces.

    "First" is the stop string that is complete earliest; of several complete at the same character, the longest. No
    character of it is ever released: text that may yet become a stop string is held back. One automaton per stop
    string (Knuth-Morris-Pratt), so the work is linear in the text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Empty stop strings are ignored."""
        self._stops = [stop for stop in sorted(set(stops), key=len, reverse=True) if stop]
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is now certain to come before any stop string. Empty for ever once `stopped`."""
        if self.stopped:
            return ""
        start = len(self._held)
        self._held += text
        for index in range(start, len(self._held)):
            complete = self._step(self._held[index])
            if complete is not None:
                self.stopped = True
                return self._release(index + 1 - len(complete), keep="")
        return self._release_certain()

    def pass_over(self, text: str) -> str:
        """As `push`, for text in which no stop string counts as complete. One that begins in it may end later."""
        if self.stopped:
            return ""
        self._held += text
        for char in text:
            self._step(char)
        return self._release_certain()

    def flush(self) -> str:
        """What was held back, when the text has ended without a stop string."""
        return self._release(len(self._held), keep="")

    def _step(self, char: str) -> str | None:
        """Feeds one character to every automaton; the longest stop string that it completes."""
        complete: str | None = None
        for which, stop in enumerate(self._stops):
            size = self._matched[which]
            while size and stop[size] != char:
                size = self._borders[which][size - 1]
            size += stop[size] == char
            if size == len(stop):
                complete = complete or stop
                size = self._borders[which][size - 1]
            self._matched[which] = size
        return complete

    def _release_certain(self) -> str:
        certain = len(self._held) - max(self._matched, default=0)
        return self._release(certain, keep=self._held[certain:])

    def _release(self, size: int, *, keep: str) -> str:
        released, self._held = self._held[:size], keep
        return released


def _borders(pattern: str) -> list[int]:
    """For each prefix of the pattern, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    size = 0
    for index in range(1, len(pattern)):
        while size and pattern[index] != pattern[size]:
            size = borders[size - 1]
        size += pattern[index] == pattern[size]
        borders[index] = size
    return borders
