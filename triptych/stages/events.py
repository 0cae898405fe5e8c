"""From the engine's thread to a call's coroutine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from triptych.core.errors import TriptychError
from triptych.core.plan import FinishReason, Token


@dataclass(frozen=True, slots=True)
class Admitted:
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Sampled:
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class HandedOff:
    """The first token, and all of the prompt's KV is written to the grant's pages."""

    token: Token
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Decoding:
    """The prompt is done and the answer goes on in the same engine."""


@dataclass(frozen=True, slots=True)
class Finished:
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Retracted:
    """It lost its place: the router replays it."""


Event = Admitted | Sampled | HandedOff | Decoding | Finished | Retracted


class EventStream:
    """A SequenceSink that keeps events for one coroutine. Bounded by the tokens that a plan allows."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: deque[Event | TriptychError] = deque()
        self._wake = asyncio.Event()

    async def next(self) -> Event:
        """The next event; raises the error with which the sequence failed."""
        while not self._events:
            self._wake.clear()
            await self._wake.wait()
        event = self._events.popleft()
        if isinstance(event, TriptychError):
            raise event
        return event

    def ready(self) -> list[Event]:
        """Events that wait right now, up to an error, which the next call of `next` raises."""
        events: list[Event] = []
        while self._events and not isinstance(head := self._events[0], TriptychError):
            events.append(head)
            self._events.popleft()
        return events

    def admitted(self, cached_tokens: int) -> None:
        self._put(Admitted(cached_tokens))

    def tokens(self, tokens: Sequence[Token]) -> None:
        self._put(Sampled(tuple(tokens)))

    def handed_off(self, token: Token, num_bytes: int) -> None:
        self._put(HandedOff(token, num_bytes))

    def decoding(self) -> None:
        self._put(Decoding())

    def finished(self, reason: FinishReason) -> None:
        self._put(Finished(reason))

    def retracted(self) -> None:
        self._put(Retracted())

    def failed(self, error: TriptychError) -> None:
        self._put(error)

    def _put(self, event: Event | TriptychError) -> None:
        try:
            self._loop.call_soon_threadsafe(self._add, event)
        except RuntimeError:  # the loop is closed: the process is going down and nobody listens
            return

    def _add(self, event: Event | TriptychError) -> None:
        self._events.append(event)
        self._wake.set()


class SplitStream:
    """The sink of a sequence that is prefilled and decoded in one engine: the prompt's part of the story goes to one
    call, the answer's to another."""

    def __init__(self, prefill: EventStream, decode: EventStream) -> None:
        self._prefill = prefill
        self._decode = decode
        self._current: EventStream = prefill
        self.handed_off: Callable[[Token, int], None] = prefill.handed_off

    def admitted(self, cached_tokens: int) -> None:
        self._prefill.admitted(cached_tokens)

    def tokens(self, tokens: Sequence[Token]) -> None:
        self._current.tokens(tokens)

    def decoding(self) -> None:
        self._prefill.decoding()
        self._current = self._decode

    def finished(self, reason: FinishReason) -> None:
        self._current.finished(reason)

    def retracted(self) -> None:
        self._current.retracted()

    def failed(self, error: TriptychError) -> None:
        self._prefill.failed(error)
        self._decode.failed(error)
