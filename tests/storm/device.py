"""The real model on a device of its own: a step computes, by dice, some time between its launch and the wait for it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from triptych.model.runner import LanguageRunner, RunOutput, RunSlice
from triptych.testing.async_runner import resolved


class DicedRunner:
    """Takes a real runner's place in an engine that looks one step ahead. Deterministic."""

    lookahead = 1

    def __init__(self, runner: LanguageRunner, dice: random.Random) -> None:
        self.part = runner.part
        self.pool = runner.pool
        self._runner = runner
        self._dice = dice
        self._pending: list[DicedFlight] = []
        self._last: list[int | None] = []

    def launch(self, slices: Sequence[RunSlice]) -> DicedFlight:
        flight = DicedFlight(self, list(slices))
        self._pending.append(flight)
        if self._dice.random() < 0.4:
            self.compute_until(flight)
        return flight

    @property
    def page_bytes(self) -> int:
        return self._runner.page_bytes

    def save_pages(self, pages: Sequence[int]) -> torch.Tensor:
        """In order, after the steps that were launched before."""
        if self._pending:
            self.compute_until(self._pending[-1])
        return self._runner.save_pages(pages)

    def load_pages(self, saved: torch.Tensor, pages: Sequence[int]) -> None:
        """At once: no step under way may name these pages."""
        self._runner.load_pages(saved, pages)

    def compute_until(self, last: DicedFlight) -> None:
        while last in self._pending:
            flight = self._pending.pop(0)
            flight.output = self._runner.run([resolved(piece, self._last) for piece in flight.slices])
            self._last = flight.output.token_ids


class DicedFlight:
    """A launched step of a DicedRunner."""

    def __init__(self, runner: DicedRunner, slices: list[RunSlice]) -> None:
        self.slices = slices
        self.output: RunOutput | None = None
        self._runner = runner

    def wait(self) -> RunOutput:
        self._runner.compute_until(self)
        assert self.output is not None
        return self.output
