"""Token ids back to text while they are being sampled."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
# While nothing can be emitted, the window is decoded at every push up to this many tokens; beyond it (the model writes
# bytes that are no UTF-8, or special tokens) only each time it has grown by half, so that the work stays linear.
_EAGER_TOKENS = 8


class IncrementalDetokenizer:
    """One answer's text. The pieces concatenate to exactly `tokenizer.decode(ids, skip_special_tokens=True)`.

    Decoders are not additive (a piece's white space may depend on its neighbour), so each step decodes a short window
    and emits what is new in it:

        ids:  ....... [ context ][ held back ]
                      ^prefix    ^read         both move only where the text so far ends in a whole character
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._context_tokens = 0
        self._context_text = ""
        self._next_try = 0

    def push(self, ids: Sequence[int]) -> str:
        """The text that became certain with these ids; may be empty."""
        self._window.extend(ids)
        held = len(self._window) - self._context_tokens
        if held > _EAGER_TOKENS and held < self._next_try:
            return ""
        text = self._decode(self._window)
        if len(text) > len(self._context_text) and not text.endswith(_REPLACEMENT):
            return self._advance(text)
        self._next_try = held + held // 2
        return ""

    def flush(self) -> str:
        """What was held back, with U+FFFD for bytes that never became a character."""
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        fresh = text[len(self._context_text) :]
        self._window = self._window[self._context_tokens :]
        self._context_tokens = len(self._window)
        self._context_text = self._decode(self._window)
        self._next_try = 0
        return fresh

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text
