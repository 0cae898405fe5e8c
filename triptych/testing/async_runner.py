"""Runners that look ahead, for tests: a step's result is there only when it is waited for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from triptych.model.runner import LanguageRunner, RunOutput, RunSlice
from triptych.testing.fake_runner import FakeRunner


class AsyncFakeRunner(FakeRunner):
    """The model in the head on a device of its own: each step computes at some time between its launch and the wait for
    it, by the dice of `seed`, always in the order of the launches.

    Attributes:
        launched: the slices of every step as they were launched; `steps` has them as they ran.
        max_under_way: the most steps that were launched and not yet waited for.
    """

    lookahead = 1

    def __init__(self, page_tokens: int, seed: int = 0) -> None:
        super().__init__(page_tokens)
        self.launched: list[list[RunSlice]] = []
        self._dice = random.Random(seed)
        self._under_way: list[FakeFlight] = []
        self._last: list[int | None] = []
        self.max_under_way = 0

    def launch(self, slices: Sequence[RunSlice]) -> FakeFlight:
        flight = FakeFlight(self, list(slices))
        self.launched.append(flight.slices)
        self._under_way.append(flight)
        self.max_under_way = max(self.max_under_way, len(self._under_way))
        assert len(self._under_way) <= 1 + self.lookahead, "more steps are under way than were promised"
        if self._dice.random() < 0.5:
            self.compute_until(flight)
        return flight

    def save_pages(self, pages: Sequence[int]) -> torch.Tensor:
        assert not self.pages_under_way() & set(pages), "pages are copied while a step may still write to them"
        return super().save_pages(pages)

    def load_pages(self, saved: torch.Tensor, pages: Sequence[int]) -> None:
        assert not self.pages_under_way() & set(pages), "pages are written while a step may still read them"
        super().load_pages(saved, pages)

    def pages_under_way(self) -> set[int]:
        """Pages that a launched step may read or write still."""
        return {
            page for flight in self._under_way for piece in flight.slices for page in _used(piece, self.page_tokens)
        }

    def compute_until(self, last: FakeFlight) -> None:
        for flight in self._under_way:
            if flight.result is None:
                flight.result = self._compute(flight.slices)
            if flight is last:
                return

    def ended(self, flight: FakeFlight) -> None:
        assert self._under_way.pop(0) is flight, "steps are waited for in the order of their launches"

    def _compute(self, slices: Sequence[RunSlice]) -> RunOutput | Exception:
        try:
            output = self.run([resolved(piece, self._last) for piece in slices])
        except Exception as error:
            self._last = [None] * len(slices)
            return error
        self._last = output.token_ids
        return output


class FakeFlight:
    """A launched step of an AsyncFakeRunner."""

    def __init__(self, runner: AsyncFakeRunner, slices: list[RunSlice]) -> None:
        self.slices = slices
        self.result: RunOutput | Exception | None = None
        self._runner = runner

    def wait(self) -> RunOutput:
        self._runner.compute_until(self)
        self._runner.ended(self)
        assert self.result is not None
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


class ThreadedRunner:
    """A real runner whose steps compute on a thread, as a device computes them, while the engine prepares the next."""

    lookahead = 1

    def __init__(self, runner: LanguageRunner) -> None:
        self.part = runner.part
        self.pool = runner.pool
        self._runner = runner
        self._device = ThreadPoolExecutor(1, thread_name_prefix="device")
        self._last: list[int | None] = []

    def launch(self, slices: Sequence[RunSlice]) -> ThreadedFlight:
        return ThreadedFlight(self._device.submit(self._compute, list(slices)))

    @property
    def page_bytes(self) -> int:
        return self._runner.page_bytes

    def save_pages(self, pages: Sequence[int]) -> torch.Tensor:
        return self._device.submit(self._runner.save_pages, pages).result()

    def load_pages(self, saved: torch.Tensor, pages: Sequence[int]) -> None:
        self._device.submit(self._runner.load_pages, saved, pages).result()

    def close(self) -> None:
        self._device.shutdown()

    def _compute(self, slices: list[RunSlice]) -> RunOutput:
        output = self._runner.run([resolved(piece, self._last) for piece in slices])
        self._last = output.token_ids
        return output


class ThreadedFlight:
    """A launched step of a ThreadedRunner."""

    def __init__(self, future: Future[RunOutput]) -> None:
        self._future = future

    def wait(self) -> RunOutput:
        return self._future.result()


def resolved(piece: RunSlice, last: Sequence[int | None]) -> RunSlice:
    """The slice with its id, where that is what the step before sampled (0 when that step failed: nobody will ask)."""
    if piece.follows is None:
        return piece
    return replace(piece, ids=np.array([last[piece.follows] or 0], dtype=np.int64), follows=None)


def _used(piece: RunSlice, page_tokens: int) -> Sequence[int]:
    return piece.pages[: -(-(piece.start + len(piece.ids)) // page_tokens)]
