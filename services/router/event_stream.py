"""The bytes of server-sent events. Pure: pieces of an answer in, bytes out.

Pieces that wait together leave in one write, each still an event of its own: what a caller reads does not depend on how
busy the router is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import orjson

from services.router.choices import Piece
from services.router.responses import Envelope, Json, error_json
from triptych.core.errors import TriptychError
from triptych.core.plan import Token, Usage

# No name of a model holds this character, which JSON has to escape.
_MARK = "\0"
_MARK_JSON = orjson.dumps(_MARK)
END = b"data: [DONE]\n\n"


class EventStream:
    """The events of one streamed answer. `logprobs(tokens)` is what is said of tokens, None for nothing."""

    def __init__(
        self, envelope: Envelope, *, with_usage: bool, logprobs: Callable[[Sequence[Token]], Json | None]
    ) -> None:
        self._envelope = envelope
        self._with_usage = with_usage
        self._logprobs = logprobs
        self._around_text: dict[int, tuple[bytes, bytes]] = {}

    def pieces(self, pieces: Iterable[Piece]) -> bytes:
        return b"".join(map(self._piece, pieces))

    def closing(self, usage: Usage, told: Json) -> bytes:
        """What there is to say when all choices are over, in one event without choices; and the end."""
        if self._with_usage:
            return _event({**self._envelope.usage_chunk(usage), **told}) + END
        return _event({**self._envelope.bare_chunk(), **told}) + END if told else END

    def _piece(self, piece: Piece) -> bytes:
        events = b""
        if piece.choice not in self._around_text:
            self._around_text[piece.choice] = self._text_event(piece.choice)
            events += _event(self._chunk(piece.choice, {"role": "assistant", "content": ""}))
        logprobs = self._logprobs(piece.tokens) if piece.tokens else None
        if logprobs is not None:
            events += _event(self._chunk(piece.choice, {"content": piece.text}, logprobs=logprobs))
        elif piece.text:
            before, after = self._around_text[piece.choice]
            events += before + orjson.dumps(piece.text) + after
        if piece.finish_reason is not None:
            events += _event(self._chunk(piece.choice, {}, finish_reason=piece.finish_reason.value))
        return events

    def _text_event(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the text in each event of a choice: all but the text is the same."""
        before, _, after = _event(self._chunk(index, {"content": _MARK})).partition(_MARK_JSON)
        return before, after

    def _chunk(self, index: int, delta: Json, finish_reason: str | None = None, logprobs: Json | None = None) -> Json:
        chunk = self._envelope.chunk(index, delta, finish_reason, logprobs)
        return {**chunk, "usage": None} if self._with_usage else chunk


def error_event(error: TriptychError) -> bytes:
    """Said where the status is out already. No END follows it."""
    return _event(error_json(error))


def _event(content: Json) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"
