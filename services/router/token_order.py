"""Tokens of one answer, put in order whatever stream they came by."""

from __future__ import annotations

from collections.abc import Iterable

from triptych.core.plan import Token


class TokenOrder:
    """Emits only the current attempt's tokens, each index once, in order.

    The first token comes from prefill and the others from decode, on connections that know nothing of each other.
    """

    def __init__(self) -> None:
        self._attempt = 0
        self._emitted = 0
        self._early: dict[int, Token] = {}

    @property
    def emitted(self) -> int:
        """Tokens that have been let through; the next index."""
        return self._emitted

    @property
    def has_gap(self) -> bool:
        return bool(self._early)

    def begin(self, attempt: int) -> None:
        """From now on only tokens of `attempt` count. What older ones had delivered early is dropped."""
        assert attempt >= self._attempt
        self._attempt = attempt
        self._early.clear()

    def offer(self, attempt: int, tokens: Iterable[Token]) -> list[Token]:
        """The tokens that are now next in order."""
        if attempt != self._attempt:
            return []
        for token in tokens:
            if token.index >= self._emitted:
                self._early.setdefault(token.index, token)
        ready: list[Token] = []
        while self._emitted in self._early:
            ready.append(self._early.pop(self._emitted))
            self._emitted += 1
        return ready
